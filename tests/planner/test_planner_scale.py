"""Fleets of a thousand GPUs and more: a valid plan, near its bound, the same each time, at any stop."""

from collections import Counter

import pytest

from benchmarks.large_fleets import large_problem
from planner import Feasible, Problem, solve, violations
from planner.cost import CostModel
from planner.scan import scan_of
from planner.schedulers.layouts import laid_out
from planner.space import device_classes


def _within(p: Problem, gap: float) -> Feasible:
    found = solve(p, scheduler="hex")
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
    assert found.gap <= gap
    return found


def test_a_thousand_gpus() -> None:
    p = large_problem(1024)
    found = _within(p, 0.05)
    assert found.plan == _within(p, 0.05).plan


def test_a_stop_at_once_gets_the_first_plan() -> None:
    p = large_problem(1024)
    shown: list[Feasible] = []
    found = solve(p, scheduler="hex", should_stop=lambda: True, on_incumbent=shown.append)
    assert isinstance(found, Feasible)
    assert not found.finished
    assert [s.plan for s in shown] == [found.plan]
    assert violations(found.plan, p) == ()


@pytest.mark.accept
@pytest.mark.parametrize(("devices", "regions", "gap"), [(1024, 10, 0.15), (10_000, 1, 0.05)])
def test_the_largest_fleets(devices: int, regions: int, gap: float) -> None:
    _within(large_problem(devices, regions=regions), gap)


def test_layouts_hold_the_trainer_asked_for() -> None:
    p = large_problem(200, regions=3)
    cost, classes = CostModel(p), device_classes(p)
    scan = scan_of(cost)
    _, cell = next(scan.ascending())
    regions = [r for site in cell.sites for r in site]
    found = laid_out(scan.columns, classes, cell.blocks, regions)
    assert found
    for one in found:
        assert [len(s.chunks) for s in one.stages] == [b.dp for b in cell.blocks for _ in range(b.pp)]
        assert sum(s.layers for s in one.stages) == p.model.layers
        used = Counter(i for s in one.stages for i in s.chunks for _ in range(s.tp))
        assert one.used == tuple(used[i] for i in range(len(classes)))
        assert all(n <= c.size for n, c in zip(one.used, classes, strict=True))
        assert {classes[i].place.region for i in used} == set(regions)
        assert one.cost.train_s >= cell.train_s * (1 - 1e-9)
