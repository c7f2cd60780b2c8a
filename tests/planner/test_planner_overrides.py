"""Pins, keeps, freezes and caps: no plan breaks one, and `hex` finds what brute force finds under them."""

import pytest
from fleets import BANDWIDTH, COMPUTE, FLEET_OF_FIVE, cluster, problem, problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import Budget, Capabilities, Feasible, Problem, Solution, solve, violations
from planner.errors import InvalidInput
from planner.override import Cap, Override
from planner.plan import Placement, Plan
from planner.record import replace
from planner.resolve import changed, resolved

EVERYTHING = Budget(evaluations=10**9)


def oracle(p: Problem) -> Solution:
    return solve(p, scheduler="exhaustive", budget=EVERYTHING)


def planned(p: Problem, **more: str) -> Feasible:
    found = solve(p, **more)  # type: ignore[arg-type]
    assert isinstance(found, Feasible)
    return found


@st.composite
def held(draw: st.DrawFn, *, freezes: bool) -> Problem:
    """A problem whose plan in force is one for another workload, with keeps, caps and perhaps freezes."""
    p = draw(problems(most=4, least=3))
    before = solve(replace(p, workload=replace(p.workload, eta=1, prompts_per_step=4)), scheduler="hex")
    assume(isinstance(before, Feasible))
    assert isinstance(before, Feasible)
    said = []
    for d in p.cluster.devices:
        what = draw(st.sampled_from(["", "", "keep", "freeze" if freezes else "keep"]))
        if what:
            said.append(Override(device=d.id, kind=what))  # type: ignore[arg-type]
    caps = draw(
        st.lists(
            st.builds(
                Cap,
                kind=st.sampled_from([None, "k0", "k1"]),
                role=st.sampled_from(["train", "rollout"]),
                devices=st.integers(1, 3),
            ),
            max_size=2,
        )
    )
    # Without the concurrency chosen for the other workload: off the grid of this one, it may beat every plan on it.
    force = Plan(placements=tuple(replace(q, max_running=None) for q in before.plan.placements))
    return replace(p, overrides=tuple(said), caps=tuple(caps), in_force=force)


@settings(max_examples=25)
@given(held(freezes=False))
def test_hex_is_exact_under_keeps_and_caps(p: Problem) -> None:
    best, found = oracle(p), solve(p, scheduler="hex")
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        assert violations(found.plan, p) == ()
        assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
        assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * (1 + 1e-6)


@settings(max_examples=25)
@given(held(freezes=True), st.sampled_from(["hex", "areal-hex"]))
def test_no_override_is_ever_broken(p: Problem, scheduler: str) -> None:
    assert p.in_force is not None
    best, found = oracle(p), solve(p, scheduler=scheduler)
    if isinstance(found, Feasible):
        assert isinstance(best, Feasible)
        assert violations(found.plan, p) == ()
        frozen = {o.device for o in p.overrides if o.kind == "freeze"}
        assert not frozen & set(changed(found.plan, p.in_force, p))
        for o in p.overrides:
            assert found.plan.role_of(o.device) == p.in_force.role_of(o.device)
        assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * (1 + 1e-6)
        assert found.prediction.step_s >= best.prediction.step_s * (1 - 1e-6)
    else:
        assert not isinstance(best, Feasible)


def test_a_frozen_replica_stays_although_another_shape_is_better() -> None:
    p = problem(FLEET_OF_FIVE)
    free = planned(p, scheduler="hex")
    one = planned(replace(p, capabilities=Capabilities.single_device_roles()))
    assert one.plan.train is not None
    assert one.plan.train.devices[0] in ("d0", "d1")
    force = Plan(placements=(one.plan.train, Placement(role="rollout", kind="bandwidth", devices=("d3", "d4"), tp=2)))
    assert violations(force, p) == ()
    frozen = replace(p, in_force=force, overrides=(Override(device="d3", kind="freeze"),))
    for scheduler in ("hex", "areal-hex"):
        found = planned(frozen, scheduler=scheduler)
        assert any(r.devices == ("d3", "d4") and r.tp == 2 for r in found.plan.rollouts)
        assert found.prediction.step_s >= free.prediction.step_s
    assert any("frozen" in v for v in violations(free.plan, frozen))


def test_a_frozen_trainer_leaves_only_replicas_to_choose() -> None:
    p = problem(FLEET_OF_FIVE)
    one = planned(replace(p, capabilities=Capabilities.single_device_roles()))
    assert one.plan.train is not None
    where = one.plan.train.devices[0]
    frozen = replace(p, in_force=one.plan, overrides=(Override(device=where, kind="freeze"),))
    best, found = oracle(frozen), planned(frozen, scheduler="hex")
    assert isinstance(best, Feasible)
    assert found.plan.train is not None
    assert found.plan.train.devices == (where,)
    assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-9)


@pytest.mark.parametrize(
    ("role", "kind"), [("train", None), ("train", "compute"), ("rollout", "bandwidth"), ("rollout", None)]
)
def test_a_cap_binds(role: str, kind: str | None) -> None:
    cap = Cap(kind=kind, role=role, devices=1)  # type: ignore[arg-type]
    p = problem(FLEET_OF_FIVE, caps=(cap,))
    found = planned(p, scheduler="hex")
    assert violations(found.plan, p) == ()
    best = oracle(p)
    assert isinstance(best, Feasible)
    assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
    assert found.prediction.step_s >= planned(problem(FLEET_OF_FIVE), scheduler="hex").prediction.step_s


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"overrides": (Override(device="d0", kind="keep"),)}, "there is none"),
        ({"overrides": (Override(device="d0", kind="freeze"),)}, "there is none"),
        ({"overrides": (Override(device="d0", kind="pin"),)}, "needs a role"),
        ({"caps": (Cap(kind="nobody", role="train", devices=1),)}, "not in the cluster"),
    ],
)
def test_overrides_that_make_no_sense(change: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        solve(problem(**change))


def test_a_freeze_that_cannot_hold() -> None:
    fleet = cluster(*[("compute", "a")] * 2, *[("bandwidth", "b")] * 2, kinds=(COMPUTE, BANDWIDTH))
    plan = planned(problem(fleet)).plan
    assert plan.train is not None
    a, *rest = plan.train.devices
    other = rest[0] if rest else a
    said = (Override(device=a, kind="freeze"),)
    lost = replace(fleet, devices=tuple(d for d in fleet.devices if d.id != other))
    with pytest.raises(InvalidInput, match="not in the cluster"):
        solve(problem(lost, overrides=said, in_force=plan))
    for second in (Override(device=other, kind="cordon"), Override(device=other, kind="pin", role="rollout")):
        with pytest.raises(InvalidInput, match="frozen placement cannot stay"):
            solve(problem(fleet, overrides=(*said, second), in_force=plan))
    with pytest.raises(InvalidInput, match="negative"):
        Cap(role="train", devices=-1)


@settings(max_examples=15)
@given(held(freezes=True))
def test_resolving_twice_changes_nothing(p: Problem) -> None:
    assert resolved(resolved(p)) == resolved(p)


def test_machines_are_rented_for_kept_devices_too() -> None:
    p = problem(FLEET_OF_FIVE, objective="throughput_per_dollar", floor_tokens_per_s=1.0)
    force = planned(replace(p, objective="throughput"), scheduler="hex").plan
    one = replace(p, in_force=force, overrides=(Override(device="d4", kind="keep"),))
    found = planned(one)
    assert violations(found.plan, one) == ()
    assert found.plan.role_of("d4") == force.role_of("d4")
    with pytest.raises(InvalidInput, match="objective throughput only"):
        solve(replace(one, overrides=(Override(device="d4", kind="freeze"),)))
