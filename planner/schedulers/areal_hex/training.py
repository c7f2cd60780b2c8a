"""Constrained search: the best trainer on the devices D_T.

TP and DP groups hold one device kind; only PP crosses kinds. All (DP, TP, PP) of each kind are tried, and all pairs of
blocks of two kinds that a lower bound does not rule out. Layers go to stages in proportion to their compute.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from planner.cluster import Link
from planner.columns import Columns
from planner.cost.network import Place, best_link, spread_of
from planner.cost.training import StageShape, TrainerCost, TrainerShape
from planner.placing import StageLayout
from planner.record import record
from planner.space import BlockShape, DeviceClass, block_shapes


@record
class Trainer:
    """A trainer laid out on classes, and its cost."""

    stages: tuple[StageLayout, ...]
    cost: TrainerCost
    used: tuple[int, ...]  # devices by class


def best_trainer(columns: Columns, classes: Sequence[DeviceClass], counts: Sequence[int]) -> Trainer | None:
    """The fastest trainer on `counts` devices of each class; None when none fits or none covers the pinned devices."""
    best: Trainer | None = None
    for found in improving_trainers(columns, classes, counts):
        best = found
    return best


def improving_trainers(columns: Columns, classes: Sequence[DeviceClass], counts: Sequence[int]) -> Iterator[Trainer]:
    """Trainers, each faster than the one before; the last is the fastest."""
    problem = columns.cost.problem
    kinds: dict[str, list[int]] = {}
    for i, c in enumerate(classes):
        if counts[i]:
            kinds.setdefault(c.place.kind, []).append(i)
    options = {
        k: block_shapes(problem, k, tuple(counts[i] for i in ix), sum(counts[i] for i in ix)) for k, ix in kinds.items()
    }
    best_s = float("inf")
    for k in kinds:
        for block in options[k]:
            if columns.bound_s((block,), ()) < best_s:
                found = _lay_out(columns, classes, counts, (block,))
                if found is not None and found.cost.train_s < best_s:
                    best_s = found.cost.train_s
                    yield found
    if problem.capabilities.train_max_kinds < 2:
        return
    for ka, kb in itertools.permutations(kinds, 2):
        places = [tuple(classes[i].place for i in kinds[k]) for k in (ka, kb)]
        link = best_link(problem.cluster, *places)
        for pair in _pairs(columns, options[ka], options[kb], link, best_s):
            if columns.bound_s(pair, (link,)) < best_s:
                found = _lay_out(columns, classes, counts, pair)
                if found is not None and found.cost.train_s < best_s:
                    best_s = found.cost.train_s
                    yield found


def _pairs(
    columns: Columns, left: Sequence[BlockShape], right: Sequence[BlockShape], link: Link, best_s: float
) -> Iterator[tuple[BlockShape, BlockShape]]:
    """Pairs whose coarse bound is below `best_s`, most promising first."""
    if not left or not right:
        return
    limit = columns.cost.problem.capabilities.train_max_devices
    bounds = columns.pair_bounds_s(left, right, link)
    for flat in np.argsort(bounds, axis=None, kind="stable"):
        i, j = divmod(int(flat), len(right))
        if bounds[i, j] >= best_s:
            return
        if limit is None or left[i].devices + right[j].devices <= limit:
            yield left[i], right[j]


def _lay_out(
    columns: Columns, classes: Sequence[DeviceClass], counts: Sequence[int], blocks: Sequence[BlockShape]
) -> Trainer | None:
    """Put blocks on classes, in the order of the classes; None when they do not fit or leave a pinned device out."""
    left = list(counts)
    by_stage: list[tuple[BlockShape, tuple[int, ...]]] = []
    for block in blocks:
        chunks = [i for i, c in enumerate(classes) if c.place.kind == block.kind for _ in range(left[i] // block.tp)]
        if len(chunks) < block.dp * block.pp:
            return None
        for s in range(block.pp):
            mine = tuple(chunks[s * block.dp : (s + 1) * block.dp])
            by_stage.append((block, mine))
            for i in mine:
                left[i] -= block.tp
    used = tuple(n - rest for n, rest in zip(counts, left, strict=True))
    if any(used[i] < len(c.must_train) for i, c in enumerate(classes)):
        return None
    layers = columns.split(blocks)
    if layers is None:
        return None
    cluster = columns.cost.problem.cluster
    places: list[tuple[Place, ...]] = [tuple(classes[i].place for i in dict.fromkeys(ix)) for _, ix in by_stage]
    shape = TrainerShape(
        stages=tuple(
            StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=n, spread=spread_of(cluster, p))
            for (b, _), n, p in zip(by_stage, layers, places, strict=True)
        ),
        links=tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(places)),
    )
    seconds = columns.cost.trainer(shape)
    if seconds is None:
        return None
    stages = tuple(
        StageLayout(kind=b.kind, tp=b.tp, layers=n, chunks=ix) for (b, ix), n in zip(by_stage, layers, strict=True)
    )
    return Trainer(stages=stages, cost=seconds, used=used)
