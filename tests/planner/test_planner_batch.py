"""Many shapes at once cost what each costs alone, and the ways of a workflow what the plans made of them do."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from fleets import kind, problem, problems, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Capabilities, Problem
from planner.columns import Columns
from planner.cost import CostModel
from planner.cost.model import side_s
from planner.record import replace
from planner.sides import Sides
from planner.space import BlockShape, device_classes
from planner.workflow import side_tasks
from planner.workload import Workload


@st.composite
def workflows(draw: st.DrawFn) -> Workload:
    return workload(
        algorithm=draw(st.sampled_from(["grpo", "ppo"])),
        reward=draw(st.sampled_from(["rule", "model"])),
        reference_model=draw(st.booleans()),
        proximal_forward=draw(st.booleans()),
        prompts_per_step=draw(st.sampled_from([1, 8, 64])),
        responses_per_prompt=draw(st.sampled_from([1, 8])),
    )


@st.composite
def larger(draw: st.DrawFn) -> Problem:
    p = draw(problems(least=2, most=16))
    caps = Capabilities(
        trainer=draw(st.sampled_from(["replicated", "fsdp"])),
        task_groups=draw(st.sampled_from([1, 2])),
        train_row_tokens=p.capabilities.train_row_tokens,
    )
    model = replace(p.model, layers=draw(st.sampled_from([2, 3, 24])), tied=draw(st.booleans()))
    return replace(p, workload=draw(workflows()), capabilities=caps, model=model)


@settings(max_examples=25)
@given(larger())
def test_many_shapes_at_once_cost_what_each_costs_alone(p: Problem) -> None:
    sides = Sides(Columns(CostModel(p)), device_classes(p))
    count = int(sides.starts[-1])
    positions = range(0, count, max(1, count // 40))
    for group, (score, train) in sides.seconds.items():
        for at in positions:
            blocks = sides.candidate(at)
            alone = sides.relaxed.group(blocks, group)
            used = [sum(b.devices for b in blocks if b.kind == k) for k in sides.kinds]
            held = any(all(n <= m for n, m in zip(used, room, strict=True)) for room in sides.relaxed.room_by_machine)
            if alone is None:
                assert math.isinf(score[at] + train[at]), (group, blocks)
            elif not held and sum(b.pp for b in blocks) > 1:  # a crossing between machines is charged
                assert score[at] >= alone.score_s * (1 - 1e-9), (group, blocks)
                assert train[at] >= (alone.train_s - alone.score_s) * (1 - 1e-9), (group, blocks)
            else:
                assert score[at] == pytest.approx(alone.score_s, rel=1e-9), (group, blocks)
                assert train[at] == pytest.approx(alone.train_s - alone.score_s, rel=1e-9), (group, blocks)


@settings(max_examples=8)
@given(larger())
def test_what_else_fits_beside_a_group_does_not_slow_it(p: Problem) -> None:
    """Of groups that share their devices: as much memory as is said to be left by block, and no more."""
    shared = replace(p.capabilities, colocate=True)
    here = tuple(replace(d, region="") for d in p.cluster.devices)
    p = replace(
        p,
        cluster=replace(p.cluster, devices=here),
        workload=replace(p.workload, mode="sync", eta=0),
        capabilities=shared,
    )
    sides = Sides(Columns(CostModel(p)), device_classes(p))
    assert sides.hosts
    count = int(sides.starts[-1])
    for group, memory in sides.memory.items():
        seconds = np.sum(sides.seconds[group], axis=0)
        for at in range(0, count, max(1, count // 6)):
            blocks = sides.candidate(at)
            alone = sides.relaxed.group(blocks, group)
            if alone is None or seconds[at] != pytest.approx(alone.train_s, rel=1e-9):
                continue  # a crossing is charged: another way may be the fastest
            room, held = (memory[i : i + 2, at][2 - len(blocks) :].astype(float) for i in (0, 2))
            assert [sides.kinds[k] for k in sides.block_kinds[at] if k >= 0] == [b.kind for b in blocks]
            # The batch counts in float32: limits and what is held are right to some roundings of a device's memory.
            off = 1e-6 * max(k.memory_bytes for k in p.cluster.kinds.values())
            stages = [r for b, r in zip(blocks, room, strict=True) for _ in range(b.pp)]
            beside = sides.relaxed.group(blocks, group, [max(0.0, r - off) for r in stages])
            assert beside is not None
            assert beside.train_s == pytest.approx(alone.train_s, rel=1e-9)
            more = sides.relaxed.group(blocks, group, [r + off for r in stages])
            assert more is None or more.train_s >= alone.train_s
            for b, mean, some in zip(blocks, held, _by_block(blocks, alone.resident_bytes), strict=True):
                assert mean == pytest.approx(sum(some) / b.pp, rel=1e-6)


def _by_block(blocks: Sequence[BlockShape], by_stage: Sequence[float]) -> list[Sequence[float]]:
    ends = list(itertools.accumulate(b.pp for b in blocks))
    return [by_stage[end - b.pp : end] for b, end in zip(blocks, ends, strict=True)]


@settings(max_examples=12)
@given(larger())
def test_nothing_that_fits_is_dropped(p: Problem) -> None:
    sides = Sides(Columns(CostModel(p)), device_classes(p))
    known = {sides.candidate(i) for i in range(int(sides.starts[-1]))}
    for chain in sides._chains():
        shapes = list(itertools.product(*(sides.blocks[k] for k in chain)))
        for blocks in shapes[:: max(1, len(shapes) // 20)]:
            for group in sides.seconds:
                if sides.relaxed.group(blocks, group) is not None:
                    assert blocks in known


@settings(max_examples=12)
@given(larger(), st.data())
def test_the_best_way_is_the_least_of_all_ways(p: Problem, data: st.DataObject) -> None:
    sides = Sides(Columns(CostModel(p)), device_classes(p))
    used, actors, low = sides.cells()
    if not len(used):
        return
    at = data.draw(st.integers(0, len(used) - 1))
    cell = tuple(int(x) for x in used[at])
    actor = tuple(bool(x) for x in actors[at])
    best = sides.best(cell, actor, math.inf)
    every = list(itertools.islice(sides.ways(cell, actor, math.inf), 500))
    assert best is not None
    assert {b.kind for b in best.blocks[0]} == {k for k, takes in zip(sides.kinds, actor, strict=True) if takes}
    assert best.side_s == pytest.approx(min(w.side_s for w in every))
    assert low[at] <= best.side_s * (1 + 1e-12)
    costs = [sides.relaxed.group(b, g) for b, g in zip(best.blocks, best.tasks, strict=True)]
    alone = side_s(c for c in costs if c is not None)
    assert alone <= best.side_s * (1 + 1e-9)
    if len(sides.relaxed.room_by_machine) == 1:  # else crossings between machines are charged
        assert alone == pytest.approx(best.side_s, rel=1e-9)
    assert sorted(itertools.chain(*best.tasks)) == sorted(side_tasks(p.workload))
    if p.capabilities.task_groups == 1:
        assert low[at] == pytest.approx(best.side_s)


def test_a_stage_whose_share_is_less_than_a_layer_gets_one() -> None:
    """A fast block before a slow one with many stages: the plain rule takes layers back, and so does the batch."""
    from fleets import cluster

    fleet = cluster(
        *[("fast", "a")] * 2, *[("slow", "b")] * 8, kinds=(kind("fast", tflops=2000), kind("slow", tflops=10))
    )
    p = problem(fleet, model=replace(problem().model, layers=9))
    sides = Sides(Columns(CostModel(p)), device_classes(p))
    made = [sides.candidate(i) for i in range(int(sides.starts[-1]))]
    deep = [i for i, c in enumerate(made) if len(c) == 2 and sum(b.pp for b in c) == 9]
    assert deep
    [group] = sides.seconds
    for i in deep:
        alone = sides.relaxed.group(made[i], group)
        assert alone is not None
        assert np.sum([sides.seconds[group][k][i] for k in (0, 1)]) == pytest.approx(alone.train_s, rel=1e-9)
