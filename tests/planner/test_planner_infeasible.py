"""Problems without a plan name the limits that conflict; odd clusters get an answer, not a crash."""

from collections.abc import Sequence

import pytest
from fleets import BANDWIDTH, COMPUTE, MIXED, cluster, kind, problem, problems, workload
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import Budget, Capabilities, Feasible, Infeasible, Problem, solve, violations
from planner.cluster import Link
from planner.errors import InvalidInput, UnknownName
from planner.infeasible import Limit, has_plan, limits_of, smallest_conflict
from planner.override import Cap, Override
from planner.record import replace
from planner.workload import Lengths

TWO = cluster(("compute", "a"), ("compute", "b"), kinds=(COMPUTE,))


def limits(p: object) -> list[str]:
    found = solve(p)  # type: ignore[arg-type]
    assert isinstance(found, Infeasible)
    assert found.message
    return [c.limit for c in found.conflicts]


@pytest.mark.parametrize("single", [False, True])
def test_no_device_and_one_device(single: bool) -> None:
    caps = Capabilities.single_device_roles() if single else Capabilities()
    assert limits(problem(cluster(kinds=(COMPUTE,)), capabilities=caps)) == ["devices"]
    assert limits(problem(cluster(("compute", "a"), kinds=(COMPUTE,)), capabilities=caps)) == ["devices"]


def test_all_but_one_cordoned() -> None:
    said = (
        Override(device="d0", kind="cordon"),
        Override(device="d1", kind="drain"),
        Override(device="d2", kind="cordon"),
    )
    found = limits(problem(overrides=said))
    assert found == ["devices", "override cordon d0", "override drain d1", "override cordon d2"]


@pytest.mark.parametrize(("role", "word"), [("train", "training"), ("rollout", "rollout")])
def test_everything_pinned_to_one_role(role: str, word: str) -> None:
    said = tuple(Override(device=d.id, kind="pin", role=role) for d in TWO.devices)  # type: ignore[arg-type]
    found = solve(problem(TWO, overrides=said))
    assert isinstance(found, Infeasible)
    assert [c.limit for c in found.conflicts] == ["devices", f"override pin d0 {role}", f"override pin d1 {role}"]
    assert word in found.message


def test_more_pinned_to_training_than_the_trainer_takes() -> None:
    said = tuple(Override(device=d, kind="pin", role="train") for d in ("d0", "d1"))
    caps = Capabilities.single_device_roles()
    assert limits(problem(overrides=said, capabilities=caps))[0] == "capability.train_max_devices"


def test_a_model_larger_than_the_fleet() -> None:
    large = replace(problem().model, hidden=16384, intermediate=53248, layers=126, heads=128, kv_heads=8, head_dim=128)
    found = solve(problem(model=large))
    assert isinstance(found, Infeasible)
    assert {c.limit for c in found.conflicts} >= {"memory"}
    assert "GB" in found.message


def test_a_model_that_fits_a_fleet_but_not_one_device() -> None:
    caps = Capabilities.single_device_roles()
    card = kind("compute", memory=9e9)
    fleet = cluster(*[("compute", "a")] * 4, kinds=(card,))
    assert limits(problem(fleet, capabilities=caps)) == ["memory", "capability.train_max_devices"]
    assert isinstance(solve(problem(fleet)), Feasible)


def test_sequences_that_no_engine_can_hold() -> None:
    w = workload(response=Lengths(mean_tokens=4e6, max_tokens=10_000_000))
    assert "memory" in limits(problem(workload=w))


def test_a_disconnected_cluster_gets_a_plan() -> None:
    """Machines with next to no link between them: slow, but an answer."""
    gone = Link(latency_s=10.0, bytes_per_s=1.0)
    p = problem(replace(MIXED, same_kind=gone, cross_kind=gone, cross_region=gone))
    found = solve(p)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert len({p.cluster.device(d).node for q in found.plan.placements for d in q.devices}) == 1


def test_a_floor_above_the_bound() -> None:
    assert limits(problem(floor_tokens_per_s=1e12)) == ["floor_tokens_per_s"]


def test_override_of_an_unknown_device() -> None:
    with pytest.raises(InvalidInput, match="not in the cluster"):
        solve(problem(overrides=(Override(device="nobody", kind="cordon"),)))


def test_unknown_scheduler() -> None:
    with pytest.raises(UnknownName, match="areal-hex"):
        solve(problem(), scheduler="magic")


def test_the_oracle_refuses_large_clusters() -> None:
    with pytest.raises(InvalidInput, match="tiny"):
        solve(problem(cluster(*[("compute", "a")] * 9, kinds=(COMPUTE,))), scheduler="exhaustive")


# throughput per dollar


def test_per_dollar_needs_a_floor_and_prices() -> None:
    with pytest.raises(InvalidInput, match="floor"):
        solve(problem(objective="throughput_per_dollar"))
    free = replace(MIXED, kinds={"compute": COMPUTE, "bandwidth": replace(BANDWIDTH, price_usd_per_h=None)})
    with pytest.raises(InvalidInput, match="price"):
        solve(problem(free, objective="throughput_per_dollar", floor_tokens_per_s=1.0))


def test_per_dollar_rents_less_but_reaches_the_floor() -> None:
    fleet = cluster(*[("compute", n) for n in "abcd" for _ in range(2)], kinds=(COMPUTE,))
    whole = solve(problem(fleet))
    assert isinstance(whole, Feasible)
    seen: list[Feasible] = []
    for share in (0.1, 0.6, 0.95):
        floor = share * whole.prediction.tokens_per_s
        p = problem(fleet, objective="throughput_per_dollar", floor_tokens_per_s=floor)
        found = solve(p)
        assert isinstance(found, Feasible)
        assert violations(found.plan, p) == ()
        assert found.prediction.tokens_per_s >= floor
        seen.append(found)
    ratios = [f.prediction.tokens_per_s / (f.prediction.usd_per_h or 1) for f in seen]
    assert ratios == sorted(ratios, reverse=True), "a higher floor never gives more tokens a dollar"
    assert (seen[0].prediction.usd_per_h or 0) < (whole.prediction.usd_per_h or 0)
    assert limits(problem(fleet, objective="throughput_per_dollar", floor_tokens_per_s=1e12)) == ["floor_tokens_per_s"]


def test_per_dollar_keeps_pinned_machines() -> None:
    said = (Override(device="d3", kind="pin", role="rollout"),)
    p = problem(objective="throughput_per_dollar", floor_tokens_per_s=1.0, overrides=said)
    found = solve(p)
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()


# the smallest conflicting set


@st.composite
def overconstrained(draw: st.DrawFn) -> Problem:
    p = draw(problems(most=4, least=2, overrides=True))
    caps = draw(
        st.lists(
            st.builds(
                Cap,
                kind=st.sampled_from([None, "k0"]),
                role=st.sampled_from(["train", "rollout"]),
                devices=st.integers(0, 1),
            ),
            max_size=2,
        )
    )
    kinds = {n: replace(k, memory_bytes=draw(st.sampled_from([1, 0.5])) * 12e9) for n, k in p.cluster.kinds.items()}
    may = draw(st.sampled_from([Capabilities(), Capabilities.single_device_roles(), Capabilities(train_max_kinds=1)]))
    return replace(p, caps=tuple(caps), cluster=replace(p.cluster, kinds=kinds), capabilities=may)


def possible(p: Problem) -> bool:
    """By brute force where that is possible."""
    try:
        return isinstance(solve(p, scheduler="exhaustive", budget=Budget(evaluations=1)), Feasible)
    except InvalidInput:
        return has_plan(p)


@settings(max_examples=10)
@given(overconstrained())
def test_lifting_any_limit_of_the_set_gives_a_plan_and_the_set_alone_has_none(p: Problem) -> None:
    assert has_plan(p) == possible(p)
    assume(not possible(p))
    found = solve(p, scheduler="hex")
    assert isinstance(found, Infeasible)
    all_limits = limits_of(p)
    names = [c.limit for c in found.conflicts]
    assert set(names) <= {x.name for x in all_limits}
    mine = smallest_conflict(p, all_limits, has_plan)
    assert sorted(x.name for x in mine) == sorted(names)
    others = [x for x in all_limits if x not in mine]
    assert not possible(lifted(p, others)), "the set alone conflicts"
    for x in mine:
        assert possible(lifted(p, [*others, x])), f"{x.name} is one too many"


def lifted(p: Problem, limits: Sequence[Limit]) -> Problem:
    for x in limits:
        p = x.lifted(p)
    return p


def test_of_many_overrides_only_those_that_conflict_are_named() -> None:
    fleet = cluster(*[("compute", "a")] * 6, kinds=(COMPUTE,))
    said = (
        Override(device="d0", kind="cordon"),
        Override(device="d1", kind="pin", role="train"),
        Override(device="d2", kind="pin", role="train"),
        Override(device="d3", kind="pin", role="rollout"),
    )
    found = limits(problem(fleet, overrides=said, capabilities=Capabilities(train_max_devices=1)))
    assert found == ["capability.train_max_devices", "override pin d1 train", "override pin d2 train"]


def test_a_cap_and_a_pin() -> None:
    p = problem(
        caps=(Cap(role="train", kind="compute", devices=0),),
        overrides=(Override(device="d0", kind="pin", role="train"),),
    )
    assert limits(p) == ["cap train compute 0", "override pin d0 train"]


def test_a_floor_that_a_cordon_makes_unreachable() -> None:
    whole = solve(problem(), scheduler="hex")
    assert isinstance(whole, Feasible)
    floor = 0.95 * whole.prediction.tokens_per_s
    said = (Override(device="d0", kind="cordon"),)
    found = limits(problem(overrides=said, floor_tokens_per_s=floor))
    assert found[0] == "floor_tokens_per_s"
    assert set(found[1:]) <= {"devices", "override cordon d0", "eta", "memory"}
    assert "override cordon d0" in found


def test_an_empty_cluster_is_called_empty() -> None:
    found = solve(problem(cluster(kinds=(kind("k"),))))
    assert isinstance(found, Infeasible)
    assert found.message == "devices: the cluster has no device"


def test_sequences_that_no_memory_holds_are_blamed_on_memory() -> None:
    """10^18 tokens: lifting any limit, all of them even, would not help."""
    for name in ("prompt", "response"):
        endless = Lengths(mean_tokens=1e18, max_tokens=10**18)
        found = solve(problem(workload=workload(**{name: endless})))
        assert isinstance(found, Infeasible)
        assert [c.limit for c in found.conflicts] == ["memory"]
        assert "token" in found.message
