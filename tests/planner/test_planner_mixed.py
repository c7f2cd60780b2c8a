"""Plans with DP ranks of two kinds: `hex` against brute force, and every bound against what it bounds."""

import itertools

import numpy as np
import pytest
from fleets import cluster, kind, problem, problems, workload
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_planner_groups import workflows
from test_planner_scan import middle_problems, spread_problems

from planner import Budget, Feasible, Infeasible, Problem, solve, violations
from planner.bound import upper_bound
from planner.columns import Columns
from planner.cost import CostModel
from planner.cost.ranks import RankShape, rank_imbalance, shares_by_compute
from planner.lanes import Straggler
from planner.mixed_sides import MixedBatch, mixed_pairs
from planner.record import replace
from planner.relaxed import Relaxed
from planner.scan import Scan
from planner.schedulers.mixed import best_mixed
from planner.space import block_shapes, device_classes
from planner.trainers import FIRST, HIGH, HIGH2, LOW, LOW2, SECOND, TrainerBoxes
from planner.workload import Lengths

SLACK = 1 + 1e-6
EVERYTHING = Budget(evaluations=10**9)


def mixing(p: Problem, **changes: object) -> Problem:
    """The problem where DP ranks may be of two kinds."""
    return replace(p, capabilities=replace(p.capabilities, train_mixed_dp=True, **changes))


def like_brute_force(p: Problem) -> None:
    """`hex` finds the best plan, and the bound is not below it."""
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        assert violations(found.plan, p) == ()
        bound = upper_bound(CostModel(p))
        assert bound is not None
        assert bound.step_s <= best.prediction.step_s * SLACK
        assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)
    else:
        assert isinstance(found, Infeasible)


@settings(max_examples=20)
@given(problems(most=5, overrides=True), st.sampled_from([1, 2]))
def test_hex_finds_the_optimum_with_ranks_of_two_kinds(p: Problem, kinds: int) -> None:
    like_brute_force(mixing(p, train_max_kinds=kinds))


@settings(max_examples=15)
@given(spread_problems(most=4))
def test_hex_finds_it_over_regions(p: Problem) -> None:
    like_brute_force(mixing(p, train_max_kinds=1))


@settings(max_examples=10)
@given(workflows(modes=("async",)))
def test_hex_finds_it_for_workflows_of_several_tasks(p: Problem) -> None:
    like_brute_force(mixing(p))


@pytest.mark.accept
@settings(max_examples=150)
@given(problems(most=6), st.sampled_from([1, 2]))
def test_hex_finds_it_on_150_fleets_of_up_to_six(p: Problem, kinds: int) -> None:
    like_brute_force(mixing(p, train_max_kinds=kinds))


@pytest.mark.accept
@settings(max_examples=300)
@given(spread_problems(most=5))
def test_hex_finds_it_on_300_fleets_over_regions(p: Problem) -> None:
    like_brute_force(mixing(p))


@settings(max_examples=10)
@given(middle_problems(most=8))
def test_plans_without_the_capability_have_no_unlike_ranks_and_lose_nothing_by_it(p: Problem) -> None:
    before, after = solve(p), solve(mixing(p))
    assert isinstance(before, Feasible) <= isinstance(after, Feasible)
    if isinstance(before, Feasible) and isinstance(after, Feasible):
        assert not any(s.token_shares for x in before.plan.sides for s in x.stages)
        assert after.prediction.tokens_per_s >= before.prediction.tokens_per_s / SLACK
        assert after.prediction.tokens_per_s <= after.bound_tokens_per_s * SLACK
        assert violations(after.plan, mixing(p)) == ()


# The scan's boxes.


@settings(max_examples=40)
@given(st.one_of(middle_problems(most=12), spread_problems(most=6)), st.data())
def test_a_box_takes_no_longer_than_any_trainer_in_it(p: Problem, data: st.DataObject) -> None:
    p = mixing(p)
    cost = CostModel(p)
    boxes = Scan(cost, device_classes(p)).boxes
    every = boxes.mixed.first(boxes.first_mixed, boxes.must)
    assume(len(every))
    box = data.draw(st.sampled_from(list(every)))
    low = float(boxes.cells(box[None, :]).train_s[0])
    while not TrainerBoxes.single(box[None, :])[0]:
        halves, _ = boxes.halves(box[None, :])
        below = boxes.cells(halves).train_s
        assert (below >= low / SLACK).all()
        at = data.draw(st.integers(0, len(halves) - 1))
        box, low = halves[at], float(below[at])
    seconds = boxes.mixed.seconds(box)
    assert seconds is None or seconds >= low / SLACK
    if np.isinf(low):
        assert seconds is None


def test_a_trainer_that_fits_only_with_recomputation_is_not_lost() -> None:
    """Longer and longer sequences, on devices that launch in no time: all fits, then recomputing alone does, then nothing."""
    fleet = cluster(("a", "x"), ("b", "y"), kinds=(kind("a", paced=True), kind("b", tflops=150.0, paced=True)))
    found: list[tuple[bool, bool]] = []
    for most in (2**n for n in range(10, 22)):
        lengths = Lengths(mean_tokens=500.0, cv=0.0, max_tokens=most)
        p = mixing(problem(fleet, workload=workload(response=lengths)))
        boxes = Scan(CostModel(p), device_classes(p)).boxes
        [box] = boxes.mixed.first(boxes.first_mixed, boxes.must)
        lanes, ranks = (box[None, FIRST], box[None, SECOND]), np.array([2])
        shares = (np.array([2 / 3]), np.array([1 / 3]))
        again = [bool(np.isfinite(boxes.mixed._rounds(x, lanes, shares, ranks))[0]) for x in (0, 1)]
        assert not boxes.mixed.fixed_s.all()  # nothing times no end is no number
        with np.errstate(all="raise"):
            low = float(boxes.mixed.least_s(box[None, :])[0])
        assert np.isfinite(low) == any(again), most
        seconds = boxes.mixed.seconds(box)
        assert seconds is None or seconds >= low / SLACK
        found.append((again[0], again[1]))
    assert list(dict.fromkeys(found)) == [(True, True), (False, True), (False, False)]


@settings(max_examples=30)
@given(st.one_of(middle_problems(most=12), spread_problems(most=6)))
def test_no_layout_beats_a_trainer_costed_as_it_could_lie_at_best(p: Problem) -> None:
    p = mixing(p)
    classes = device_classes(p)
    scan = Scan(CostModel(p), classes)
    boxes = scan.boxes
    for counts in itertools.islice(itertools.product(*(range(c.size + 1) for c in classes)), 0, 4000, 37):
        found = best_mixed(scan.columns, classes, counts)
        if found is None:
            continue
        (stage,) = found.stages
        kinds = [classes[i].place.kind for i in stage.chunks]
        regions = {classes[i].place.region for i in stage.chunks}
        sites = [i for i, g in enumerate(scan.pools.sites) if regions & set(g)]
        row = next(s for s, m in enumerate(scan.pools.member) if sorted(np.flatnonzero(m)) == sites)
        dp = {k: kinds.count(k) for k in dict.fromkeys(kinds)}
        every = boxes.mixed.first(boxes.first_mixed, boxes.must)
        for box in every:
            of = [boxes.lanes.keys[int(n)] for n in (box[1], box[4])]
            names = [scan.kinds[k] for k, _, _ in of]
            if box[0] == row and of[0][1] == stage.tp and set(names) == set(dp):
                one = box.copy()
                one[[LOW, HIGH]], one[[LOW2, HIGH2]] = dp[names[0]], dp[names[1]]
                seconds = boxes.mixed.seconds(one)
                assert seconds is not None
                assert seconds <= found.cost.train_s * SLACK


# Several groups.


@settings(max_examples=25)
@given(workflows(most=4))
def test_groups_as_arrays_are_at_most_what_they_cost_one_by_one(p: Problem) -> None:
    p = mixing(p)
    cost = CostModel(p)
    classes = device_classes(p)
    relaxed = Relaxed(Columns(cost), classes)
    sizes = {k: tuple(c.size for c in relaxed.of_kind[k]) for k in relaxed.kinds}
    blocks = {k: block_shapes(p, k, n, sum(n)) for k, n in sizes.items()}
    for kinds, at in mixed_pairs(relaxed, blocks):
        some = [[blocks[k][int(i)] for i in x] for k, x in zip(kinds, at, strict=True)]
        batch = MixedBatch(Straggler(cost), relaxed, some, np.zeros(len(at[0]), dtype=bool))
        for tasks in dict.fromkeys((cost.side_tasks, ("actor_training",))):
            score, train = batch.group_s(tasks)
            for i, pair in enumerate(zip(*some, strict=True)):
                whole = relaxed.group((pair[0], replace(pair[1], joins=True)), tasks)
                if whole is None:
                    continue
                assert score[i] <= whole.score_s * SLACK
                assert train[i] <= (whole.train_s - whole.score_s) * SLACK
                # Not far below either, but for the imbalance of whole sequences, which it knows in part.
                alike = [(b.kind, b.dp) for b in pair]
                shares = shares_by_compute(cost.context, alike, pair[0].tp)
                ranks = [RankShape(kind=k, dp=n, share=x) for (k, n), x in zip(alike, shares, strict=True)]
                assert score[i] + train[i] >= 0.5 * whole.train_s / rank_imbalance(cost.context, ranks)
