"""What must hold of every plan, against brute force on small clusters."""

import itertools
import random

import pytest
from fleets import BANDWIDTH, COMPUTE, cluster, problem, problems
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import Budget, Feasible, Infeasible, Problem, solve, violations
from planner.cluster import Device
from planner.cost import CostModel
from planner.record import replace

EVERYTHING = Budget(evaluations=10**9)
SLACK = 1 + 1e-6


def oracle(p: Problem) -> Feasible | Infeasible:
    return solve(p, scheduler="exhaustive", budget=EVERYTHING)


def check_sound(p: Problem, found: Feasible) -> None:
    """Valid, told truly, and not above its bound."""
    assert violations(found.plan, p) == ()
    scored = CostModel(p).evaluate(found.plan)
    assert scored is not None
    assert scored.prediction.step_s == pytest.approx(found.prediction.step_s, rel=1e-9)
    assert found.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK
    assert 0 <= found.gap < 1


@settings(max_examples=15)
@given(problems(most=4))
def test_no_plan_beats_the_bound_and_areal_hex_finds_one_where_there_is_one(p: Problem) -> None:
    best, found = oracle(p), solve(p)
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        check_sound(p, best)
        check_sound(p, found)
        assert found.prediction.tokens_per_s <= best.prediction.tokens_per_s * SLACK
        assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK


@pytest.mark.parametrize(("fast", "wide", "nodes"), [(2, 4, "ab"), (3, 3, "ab"), (4, 2, "aa")])
def test_no_plan_beats_the_bound_on_six_devices(fast: int, wide: int, nodes: str) -> None:
    devices = [("compute", nodes[0])] * fast + [("bandwidth", nodes[1])] * wide
    p = problem(cluster(*devices, kinds=(COMPUTE, BANDWIDTH)))
    best, found = oracle(p), solve(p)
    assert isinstance(best, Feasible)
    assert isinstance(found, Feasible)
    assert found.prediction.tokens_per_s <= best.prediction.tokens_per_s * SLACK
    assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK


@given(problems(most=5, least=0, single=True, overrides=True))
def test_with_one_device_a_role_areal_hex_is_exact_and_proves_it(p: Problem) -> None:
    best, found = oracle(p), solve(p)
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        check_sound(p, found)
        assert found.prediction.step_s <= best.prediction.step_s * SLACK
        assert found.gap < 1e-6


@settings(max_examples=15)
@given(problems(most=4, overrides=True))
def test_overrides_are_kept_and_no_plan_under_them_beats_the_bound(p: Problem) -> None:
    best, found = oracle(p), solve(p)
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        check_sound(p, found)
        assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK
        for o in p.overrides:
            assert found.plan.role_of(o.device) == (o.role if o.kind == "pin" else "idle")
    else:
        assert isinstance(found, Infeasible)
        assert found.conflicts


@settings(max_examples=15)
@given(problems(most=5), st.randoms(use_true_random=False))
def test_relabelling_devices_does_not_change_the_score(p: Problem, rng: random.Random) -> None:
    names = [f"x{i}" for i in range(len(p.cluster.devices))]
    rng.shuffle(names)
    nodes = dict(zip("abc", rng.sample(["m1", "m2", "m3"], 3), strict=True))
    devices = [
        Device(id=n, kind=d.kind, node=nodes[d.node], index=i)
        for i, (d, n) in enumerate(zip(p.cluster.devices, names, strict=True))
    ]
    rng.shuffle(devices)
    other = replace(p, cluster=replace(p.cluster, devices=tuple(devices)))
    a, b = solve(p), solve(other)
    assert isinstance(a, Feasible) == isinstance(b, Feasible)
    if isinstance(a, Feasible) and isinstance(b, Feasible):
        assert abs(a.prediction.step_s / b.prediction.step_s - 1) < 1e-6
        assert abs(a.bound_tokens_per_s / b.bound_tokens_per_s - 1) < 1e-6


@given(problems(most=5, single=True), st.sampled_from(["k0", "k1"]), st.sampled_from(["a", "z"]))
def test_one_more_device_never_makes_the_optimum_worse(p: Problem, kind: str, node: str) -> None:
    more = replace(p.cluster, devices=(*p.cluster.devices, Device(id="new", kind=kind, node=node)))
    before, after = solve(p), solve(replace(p, cluster=more))
    if isinstance(before, Feasible):
        assert isinstance(after, Feasible)
        assert after.prediction.step_s <= before.prediction.step_s * SLACK


@settings(max_examples=10)
@given(problems(most=4))
def test_the_same_problem_gets_the_same_plan(p: Problem) -> None:
    assert solve(p) == solve(p)


@settings(max_examples=15)
@given(problems(most=4), st.integers(1, 3))
def test_a_smaller_budget_never_helps(p: Problem, evaluations: int) -> None:
    less, whole = solve(p, budget=Budget(evaluations=evaluations)), solve(p)
    assert isinstance(less, Feasible) == isinstance(whole, Feasible)
    if isinstance(less, Feasible) and isinstance(whole, Feasible):
        assert whole.prediction.step_s <= less.prediction.step_s * SLACK
        check_sound(p, less)


@settings(max_examples=15)
@given(problems(most=5), st.integers(0, 4))
def test_a_stop_returns_the_best_plan_so_far(p: Problem, after: int) -> None:
    shown: list[Feasible] = []
    asked = iter(range(10**9))
    found = solve(p, should_stop=lambda: next(asked) >= after, on_incumbent=shown.append)
    assume(isinstance(found, Feasible))
    assert isinstance(found, Feasible)
    check_sound(p, found)
    assert found.plan == shown[-1].plan
    steps = [s.prediction.step_s for s in shown]
    assert all(b <= a * SLACK for a, b in itertools.pairwise(steps)), "incumbents only get better"
    if len(shown) > after + 1:
        assert not found.finished


@given(problems(most=5, single=True))
def test_the_plan_in_force_stays_when_nothing_is_better(p: Problem) -> None:
    first = solve(p)
    assume(isinstance(first, Feasible))
    assert isinstance(first, Feasible)
    again = solve(replace(p, in_force=first.plan))
    assert isinstance(again, Feasible)
    assert all(first.plan.role_of(d.id) == again.plan.role_of(d.id) for d in p.cluster.devices)


def test_problems_compare_as_values() -> None:
    assert problem() == problem()
