"""Problems without a plan name the limits that conflict; odd clusters get an answer, not a crash."""

import pytest
from fleets import BANDWIDTH, COMPUTE, MIXED, cluster, kind, problem, workload

from planner import Capabilities, Feasible, Infeasible, solve, violations
from planner.cluster import Link
from planner.errors import InvalidInput, UnknownName
from planner.override import Override
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
