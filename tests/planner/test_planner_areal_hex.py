"""The parts of the two-phase scheduler, and its silence."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
from fleets import BANDWIDTH, COMPUTE, LINK, MIXED, SLOW, cluster, kind, problem, problems, workload
from hypothesis import given, settings

from planner import Feasible, Problem, solve
from planner.columns import Columns
from planner.cost import CostModel
from planner.cost.step import Group, solve_period
from planner.override import Override
from planner.record import replace
from planner.schedulers.areal_hex.partition import Partitioner, class_graph
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.schedulers.areal_hex.training import best_trainer
from planner.space import block_shapes, device_classes, replica_shapes

BATCH = workload(prompts_per_step=256)  # long enough a step to make weight updates between machines worth while
ROOT = Path(__file__).parents[2]


def test_the_graph_has_a_vertex_for_each_kind_of_a_machine() -> None:
    graph = class_graph(MIXED, device_classes(problem()))
    assert isinstance(graph, nx.Graph)
    assert sorted((d["devices"], d["compute"], d["hbm"]) for _, d in graph.nodes(data=True)) == [
        (2, 1e14, 4e12),
        (2, 8e14, 1e12),
    ]
    assert [d["bandwidth"] for _, _, d in graph.edges(data=True)] == [SLOW.bytes_per_s]


def _brute_value(p: Problem, counts: tuple[int, ...]) -> tuple[float, float]:
    """Compute share and objective of a cut, device by device."""
    classes = device_classes(p)
    side: list[tuple[int, bool]] = []
    for i, (c, n) in enumerate(zip(classes, counts, strict=True)):
        side += [(i, k < n) for k in range(c.size)]
    graph = class_graph(p.cluster, classes)
    pairs = [(a, b) for a, b in itertools.combinations(side, 2) if a[0] != b[0]]
    weight = [graph.edges[a[0], b[0]]["bandwidth"] for a, b in pairs]
    inside = sum(w for w, (a, b) in zip(weight, pairs, strict=True) if a[1] and b[1])
    hbm = [(graph.nodes[i]["hbm"], t) for i, t in side]
    flops = [(graph.nodes[i]["compute"], t) for i, t in side]
    share = sum(x for x, t in flops if t) / sum(x for x, _ in flops)
    value = sum(x for x, t in hbm if not t) / sum(x for x, _ in hbm)
    return share, value + (inside / sum(weight) if weight else 0.0)


FLEETS = [
    MIXED,
    cluster(*[("compute", "a")] * 2, *[("compute", "b")] * 3, *[("bandwidth", "b")] * 2, kinds=(COMPUTE, BANDWIDTH)),
    cluster(*[("compute", n) for n in "abc"], *[("bandwidth", n) for n in "cd"], kinds=(COMPUTE, BANDWIDTH)),
]


@pytest.mark.parametrize("fleet", FLEETS)
def test_figures_of_every_cut_agree_with_counting_pairs(fleet: object) -> None:
    p = problem(fleet)  # type: ignore[arg-type]
    parts = Partitioner(p.cluster, device_classes(p), max_train=None, in_force=None)
    assert len(parts.grid) > 3
    for row, share, value in zip(parts.grid, parts.share, parts.value, strict=True):
        expected = _brute_value(p, parts.allot(tuple(int(x) for x in row)))
        assert (share, value) == pytest.approx(expected)


@pytest.mark.parametrize("gamma", np.linspace(0, 1, 11))
def test_a_cut_is_in_its_band_or_the_nearest_there_is(gamma: float) -> None:
    p = problem(FLEETS[1])
    parts = Partitioner(p.cluster, device_classes(p), max_train=None, in_force=None)
    counts = parts.cut(float(gamma))
    assert counts is not None
    share, value = _brute_value(p, parts.allot(counts))
    distance = abs(share - gamma)
    nearest = min(abs(s - gamma) for s in parts.share)
    assert distance <= max(parts.half_band, nearest) + 1e-9
    rivals = [v for s, v in zip(parts.share, parts.value, strict=True) if abs(s - gamma) <= parts.half_band]
    assert value == pytest.approx(max(rivals, default=value))


def test_a_large_fleet_is_cut_on_a_bounded_grid() -> None:
    kinds = tuple(kind(f"k{i}", tflops=100 + i) for i in range(5))
    devices = [(f"k{i}", f"n{i}-{m}") for i in range(5) for m in range(16) for _ in range(8)]
    p = problem(cluster(*devices, kinds=kinds))
    parts = Partitioner(p.cluster, device_classes(p), max_train=None, in_force=None)
    assert 1000 < len(parts.grid) <= 20_000
    counts = parts.cut(0.5)
    assert counts is not None
    assert _brute_share(p, parts.allot(counts)) == pytest.approx(0.5, abs=0.05)


def _brute_share(p: Problem, given: tuple[int, ...]) -> float:
    flops = [p.cluster.kinds[c.place.kind].peak_flops for c in device_classes(p)]
    whole = sum(f * c.size for f, c in zip(flops, device_classes(p), strict=True))
    return sum(f * n for f, n in zip(flops, given, strict=True)) / whole


@settings(max_examples=20)
@given(problems(most=5))
def test_bounds_of_blocks_are_below_what_trainers_cost(p: Problem) -> None:
    """Else the search would drop the best trainer."""
    cost = CostModel(p)
    classes = device_classes(p)
    columns = Columns(cost)
    found = best_trainer(columns, classes, [c.size for c in classes])
    options = {
        k: block_shapes(p, k, tuple(c.size for c in classes if c.place.kind == k), 8)
        for k in {c.place.kind for c in classes}
    }
    if found is None:
        return
    blocks = [b for k in options for b in options[k]]
    assert min(columns.bound_s((b,), ()) for b in blocks) >= 0
    kinds = tuple(dict.fromkeys(s.kind for s in found.stages))
    mine = [b for b in options[kinds[0]] if _made_of(b, found.stages, kinds[0])]
    if len(kinds) == 1:
        assert columns.bound_s((mine[0],), ()) <= found.cost.train_s * (1 + 1e-9)
        return
    other = [b for b in options[kinds[1]] if _made_of(b, found.stages, kinds[1])]
    fast = max((LINK, SLOW, p.cluster.cross_kind), key=lambda x: x.bytes_per_s)
    link = replace(fast, bytes_per_s=max(fast.bytes_per_s, 2e11), latency_s=0.0)
    assert columns.bound_s((mine[0], other[0]), (link,)) <= found.cost.train_s * (1 + 1e-9)
    coarse = columns.pair_bounds_s([mine[0]], [other[0]], link)[0, 0]
    assert coarse <= columns.bound_s((mine[0], other[0]), (link,)) * (1 + 1e-9)


def _made_of(block: object, stages: object, kind_name: str) -> bool:
    mine = [s for s in stages if s.kind == kind_name]  # type: ignore[attr-defined]
    shape = (block.tp, block.dp, block.pp)  # type: ignore[attr-defined]
    return shape == (mine[0].tp, len(mine[0].chunks), len(mine))


@settings(max_examples=10)
@given(problems(most=5))
def test_the_rollout_milp_is_as_good_as_trying_every_mix(p: Problem) -> None:
    cost = CostModel(p)
    classes = device_classes(p)
    counts = [c.size for c in classes]
    trainer = (classes[0].place,)
    found = best_rollout(cost, classes, counts, trainer=trainer, train_s=1e-3, mip_seconds=5)
    best = float("inf")
    per_class = []
    for c in classes:
        shapes = [s for s in replica_shapes(cost, classes, c.place.kind) if s.pp == 1 and s.tp <= c.size]
        mixes = itertools.product(*(range(c.size // s.tp + 1) for s in shapes))
        per_class.append(
            [
                [(s, n, c.place) for s, n in zip(shapes, mix, strict=True) if n]
                for mix in mixes
                if sum(s.tp * n for s, n in zip(shapes, mix, strict=True)) <= c.size
            ]
        )
    for choice in itertools.product(*per_class):
        groups = [_group(cost, trainer[0], s, n, place) for part in choice for s, n, place in part]
        solved = solve_period(1e-3, groups, cost.rules) if groups else None
        if solved is not None:
            best = min(best, solved[0])
    if found is None:
        assert best == float("inf")
        return
    chosen = [_group(cost, trainer[0], r.shape, 1, classes[r.chunks[0]].place) for r in found.replicas]
    if all(r.shape.pp == 1 for r in found.replicas):
        solved = solve_period(1e-3, chosen, cost.rules)
        assert solved is not None
        assert solved[0] == pytest.approx(best, rel=1e-6)


def _group(cost: CostModel, trainer: object, shape: object, count: int, place: object) -> Group:
    from planner.cost.network import best_link

    link = best_link(cost.problem.cluster, (trainer,), (place,))  # type: ignore[arg-type]
    return Group(offers=cost.offers(shape, link), count=count)  # type: ignore[arg-type]


def test_bandwidth_generates_and_compute_trains() -> None:
    found = solve(problem(workload=BATCH))
    assert isinstance(found, Feasible)
    assert found.plan.train is not None
    assert found.plan.train.kind == "compute"
    assert "d2" in {d for r in found.plan.rollouts for d in r.devices}
    assert any("compute trains and bandwidth generates" in line for line in found.explanation.lines)


def test_whole_replicas_in_force_are_kept() -> None:
    card = kind("compute", memory=6e9)
    fleet = cluster(*[("compute", "a")] * 4, *[("bandwidth", "b")] * 2, kinds=(card, BANDWIDTH))
    first = solve(problem(fleet))
    assert isinstance(first, Feasible)
    again = solve(problem(fleet, in_force=first.plan))
    assert isinstance(again, Feasible)
    assert {p.devices for p in again.plan.placements} == {p.devices for p in first.plan.placements}


def test_a_pin_moves_the_trainer() -> None:
    free = solve(problem(workload=BATCH))
    assert isinstance(free, Feasible)
    assert free.plan.role_of("d2") == "rollout"
    held = solve(problem(workload=BATCH, overrides=(Override(device="d2", kind="pin", role="train"),)))
    assert isinstance(held, Feasible)
    assert held.plan.role_of("d2") == "train"


SILENT = """
import sys
sys.path.insert(0, "tests/planner")
from fleets import problem
import planner
found = planner.solve(problem())
assert isinstance(found, planner.Feasible), found
heavy = {"ray", "torch", "textual", "pydantic", "asyncio"} & set(sys.modules)
assert not heavy, heavy
print(f"milp={'pulp' in sys.modules}", file=sys.stderr)
"""


def test_nothing_reaches_standard_output_and_nothing_heavy_is_imported() -> None:
    """At the level of file descriptors: the solver is another process that would inherit it."""
    done = subprocess.run(
        [sys.executable, "-c", SILENT], cwd=ROOT, capture_output=True, timeout=120, check=False, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
    assert done.stderr == b"milp=True\n"


def test_importing_the_package_loads_no_solver() -> None:
    code = "import sys, planner, planner.errors, planner.record; assert not {'pulp', 'networkx', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
