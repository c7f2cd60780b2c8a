"""`hex` against brute force, and what it promises where brute force cannot go."""

import itertools
from collections import Counter

import pytest
from fleets import BANDWIDTH, COMPUTE, cluster, kind, problem, problems, workload
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import Budget, Feasible, Infeasible, Problem, solve, violations
from planner.cost import CostModel
from planner.override import Override
from planner.record import replace
from planner.scan import Scan
from planner.schedulers.hex import layouts
from planner.space import device_classes
from planner.workload import Lengths

SLACK = 1 + 1e-6
EVERYTHING = Budget(evaluations=10**9)


@settings(max_examples=25)
@given(problems(most=5, overrides=True))
def test_hex_finds_the_optimum_of_small_fleets(p: Problem) -> None:
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        assert violations(found.plan, p) == ()
        assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
        assert found.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK
    else:
        assert isinstance(found, Infeasible)
        assert found.conflicts


def test_the_faster_plan_is_found_although_another_gives_more_at_the_same_period() -> None:
    """Two samples a step on three cards: at the period at which single-card replicas become admissible they give more
    than one replica of two cards, which is admissible earlier."""
    one = kind("one", tflops=300, hbm=3e11, memory=80e9)
    few = workload(
        prompts_per_step=1,
        responses_per_prompt=2,
        eta=1,
        response=Lengths(mean_tokens=1500, cv=0.0, max_tokens=6000),
        update_mode="pause",
        kv_on_update="recompute",
        proximal_forward=True,
    )
    p = problem(cluster(*[("one", "a")] * 3, kinds=(one,)), workload=few)
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible)
    assert isinstance(found, Feasible)
    assert [r.tp for r in best.plan.rollouts] == [2]
    assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-9)


def test_a_pipeline_runs_along_the_faster_links() -> None:
    """Two kinds share machine c: the stages there belong next to each other."""
    devices = [("k1", "b"), ("k0", "c"), ("k1", "c"), ("k1", "b")]
    fleet = cluster(*devices, kinds=(kind("k0", memory=12e9), kind("k1", memory=12e9)))
    said = tuple(Override(device=f"d{i}", kind="pin", role="train") for i in (0, 1, 2))
    p = problem(fleet, overrides=said)
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible)
    assert isinstance(found, Feasible)
    assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-9)


@given(problems(most=5))
def test_cells_come_in_order_and_none_is_above_a_plan_in_it(p: Problem) -> None:
    """The period of a cell is a lower bound for every plan whose trainer takes these devices."""
    cost = CostModel(p)
    scan = Scan(cost, device_classes(p))
    cells = list(scan.ascending())
    periods = [s for s, _ in cells]
    assert all(a <= b * SLACK for a, b in itertools.pairwise(periods))
    found = solve(p, scheduler="hex")
    assume(isinstance(found, Feasible))
    assert isinstance(found, Feasible)
    train = found.plan.train
    assert train is not None
    trained = Counter(cost.places[d].kind for d in train.devices)
    mine = [s for s, c in cells if c.used == tuple(trained[k] for k in scan.kinds)]
    assert min(mine) <= found.prediction.step_s * SLACK


@given(problems(most=5, overrides=True), st.integers(0, 3), st.integers(0, 3))
def test_layouts_are_all_ways_that_look_different(p: Problem, k0: int, k1: int) -> None:
    classes = device_classes(p)
    wanted = {"k0": k0, "k1": k1}
    ranges = [range(len(c.must_train), c.size - len(c.must_roll) + 1) for c in classes]
    every = {
        counts
        for counts in itertools.product(*ranges)
        if all(sum(n for n, c in zip(counts, classes, strict=True) if c.place.kind == k) == wanted[k] for k in wanted)
    }
    some = list(layouts(classes, wanted))
    assert len(set(some)) == len(some)
    assert set(some) <= every

    def look(counts: tuple[int, ...]) -> tuple[object, ...]:
        machines = Counter[str]()
        for c in classes:
            machines[c.place.node] += 0
        at = {
            node: tuple(
                sorted(
                    (c.place.kind, c.size, len(c.must_train), len(c.must_roll), n)
                    for n, c in zip(counts, classes, strict=True)
                    if c.place.node == node
                )
            )
            for node in machines
        }
        return tuple(sorted(at.values()))

    assert {look(c) for c in some} == {look(c) for c in every}


@settings(max_examples=10)
@given(problems(most=5), st.integers(0, 4))
def test_a_stop_returns_the_best_so_far(p: Problem, after: int) -> None:
    asked = iter(range(10**9))
    shown: list[Feasible] = []
    found = solve(p, scheduler="hex", should_stop=lambda: next(asked) >= after, on_incumbent=shown.append)
    assume(isinstance(found, Feasible))
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.plan == shown[-1].plan


@settings(max_examples=10)
@given(problems(most=4))
def test_the_plan_in_force_is_the_first_incumbent(p: Problem) -> None:
    first = solve(p, scheduler="hex")
    assume(isinstance(first, Feasible))
    assert isinstance(first, Feasible)
    shown: list[Feasible] = []
    again = solve(replace(p, in_force=first.plan), scheduler="hex", on_incumbent=shown.append)
    assert isinstance(again, Feasible)
    assert again.prediction.step_s == pytest.approx(first.prediction.step_s)
    assert shown[0].prediction.step_s == pytest.approx(first.prediction.step_s)


def test_beyond_brute_force_it_is_near_its_bound() -> None:
    devices = [("compute", "c0")] * 4 + [("bandwidth", f"b{m}") for m in range(2) for _ in range(4)]
    p = problem(cluster(*devices, kinds=(COMPUTE, BANDWIDTH)))
    found, other = solve(p, scheduler="hex"), solve(p)
    assert isinstance(found, Feasible)
    assert isinstance(other, Feasible)
    assert violations(found.plan, p) == ()
    assert found.gap < 0.05
    assert found.prediction.step_s <= other.prediction.step_s * SLACK
