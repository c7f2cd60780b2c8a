"""What a better fleet must never cost: more of anything physical never hurts, and money is only a unit."""

import pytest
from fleets import LINK, problem, problems, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Problem, solve
from planner.calibration.shipped import LIKENED
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, DeviceKind
from planner.record import replace
from planner.solution import Feasible


@st.composite
def known(draw: st.DrawFn) -> Problem:
    """Up to three cards of the catalogue, costed by their curves."""
    names = draw(st.lists(st.sampled_from(sorted(LIKENED)), min_size=2, max_size=3))
    devices = tuple(Device(id=f"d{i}", kind=n, node=n, index=i) for i, n in enumerate(names))
    kinds = {n: CATALOGUE[n] for n in names}
    return problem(Cluster(kinds=kinds, devices=devices, same_kind=LINK, cross_kind=LINK), workload=workload())


def changed(p: Problem, **factors: float) -> Problem:
    """The problem with figures of every kind multiplied."""

    def better(k: DeviceKind) -> DeviceKind:
        return replace(k, **{name: getattr(k, name) * x for name, x in factors.items() if getattr(k, name) is not None})

    return replace(p, cluster=replace(p.cluster, kinds={n: better(k) for n, k in p.cluster.kinds.items()}))


@settings(max_examples=6)
@given(
    st.one_of(problems(most=3), known()),
    st.sampled_from(["hbm_bytes_per_s", "peak_flops", "link_bytes_per_s"]),
    st.floats(1.01, 4),
)
def test_faster_cards_never_slow_the_optimum(p: Problem, figure: str, factor: float) -> None:
    before, after = solve(p), solve(changed(p, **{figure: factor}))
    if not isinstance(before, Feasible):
        return
    assert isinstance(after, Feasible)
    # The optimum lies between what was found and the bound, so only what is proven can be compared.
    assert before.prediction.tokens_per_s <= after.bound_tokens_per_s * (1 + 1e-6)


@settings(max_examples=6)
@given(st.one_of(problems(most=3), known()), st.floats(1.0, 8))
def test_more_memory_never_makes_a_fleet_infeasible(p: Problem, factor: float) -> None:
    if isinstance(solve(p), Feasible):
        assert isinstance(solve(changed(p, memory_bytes=factor)), Feasible)


@settings(max_examples=5)
@given(st.one_of(problems(most=3), known()))
def test_twice_the_prices_are_twice_the_cost_and_the_same_plan(p: Problem) -> None:
    before, after = solve(p), solve(changed(p, price_usd_per_h=2.0))
    if not isinstance(before, Feasible) or before.prediction.usd_per_h is None:
        return
    assert isinstance(after, Feasible)
    assert after.plan == before.plan
    assert after.prediction.usd_per_h == pytest.approx(2 * before.prediction.usd_per_h)
    assert before.prediction.usd_per_mtok is not None
    assert after.prediction.usd_per_mtok == pytest.approx(2 * before.prediction.usd_per_mtok)
