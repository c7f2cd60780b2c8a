"""Constrained search: the best trainer on the devices D_T.

TP and DP groups hold one device kind; only PP crosses kinds. All (DP, TP, PP) of each kind are tried, and all pairs of
blocks of two kinds that a lower bound does not rule out. Layers go to stages in proportion to their compute.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from planner.cluster import Link
from planner.columns import Columns
from planner.cost.network import Place, best_link, spread_of
from planner.cost.training import StageShape, TrainerCost, TrainerShape
from planner.placing import StageLayout
from planner.plan import Task
from planner.record import record
from planner.schedulers.mixed import mixed_stage
from planner.space import BlockShape, DeviceClass, block_shapes, is_mixed

_FEW_MACHINES = 3  # up to so many of a kind, every order of them along a pipeline is tried


@record
class Trainer:
    """A trainer laid out on classes, and its cost."""

    stages: tuple[StageLayout, ...]
    cost: TrainerCost
    used: tuple[int, ...]  # devices by class


def best_trainer(
    columns: Columns,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    *,
    exactly: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trainer | None:
    """The fastest trainer on `counts` devices of each class, or on fewer of them unless `exactly`; None when none fits or
    none covers the pinned devices. Once it should stop: the fastest so far, or the first."""
    best: Trainer | None = None
    for found in improving_trainers(columns, classes, counts, exactly=exactly, should_stop=should_stop):
        best = found
    return best


def improving_trainers(
    columns: Columns,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    *,
    exactly: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[Trainer]:
    """Trainers, each faster than the one before; the last is the fastest, unless it should stop: then there is one, if any."""
    problem = columns.cost.problem
    kinds: dict[str, list[int]] = {}
    for i, c in enumerate(classes):
        if counts[i]:
            kinds.setdefault(c.place.kind, []).append(i)
    options = {
        k: block_shapes(problem, k, tuple(counts[i] for i in ix), sum(counts[i] for i in ix)) for k, ix in kinds.items()
    }
    if exactly:
        options = {
            k: tuple(b for b in options[k] if b.devices == sum(counts[i] for i in ix)) for k, ix in kinds.items()
        }
    best_s = float("inf")

    def faster(blocks: tuple[BlockShape, ...], links: tuple[Link, ...]) -> Iterator[Trainer]:
        nonlocal best_s
        if columns.bound_s(blocks, links) < best_s:
            for found in lay_outs(columns, classes, counts, blocks):
                if found.cost.train_s < best_s:
                    best_s = found.cost.train_s
                    yield found

    if not exactly or len(kinds) == 1:
        for k in kinds:
            # The most promising first, as pairs are.
            for block in sorted(options[k], key=lambda b: columns.bound_s((b,), ())):
                if best_s < float("inf") and should_stop():
                    return
                yield from faster((block,), ())
    if problem.capabilities.train_max_kinds < 2 or (exactly and len(kinds) > 2):
        return
    for ka, kb in itertools.permutations(kinds, 2):
        places = [tuple(classes[i].place for i in kinds[k]) for k in (ka, kb)]
        link = best_link(problem.cluster, *places)
        for pair in _pairs(columns, options[ka], options[kb], link, best_s):
            if best_s < float("inf") and should_stop():
                return
            yield from faster(pair, (link,))


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


def lay_outs(
    columns: Columns,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    blocks: Sequence[BlockShape],
    *,
    tasks: tuple[Task, ...] = (),
    beside_bytes: Sequence[float] = (),
) -> Iterator[Trainer]:
    """The blocks on the classes, in the order of the classes; where stages lie on few machines, in every order of them.

    `beside_bytes`: by stage (of ranks of two kinds: by block), what replicas hold on its devices.
    """
    orders = []
    for block in blocks:
        mine = [i for i, c in enumerate(classes) if c.place.kind == block.kind and counts[i] >= block.tp]
        some = block.pp > 1 and 1 < len(mine) <= _FEW_MACHINES
        orders.append(list(itertools.permutations(mine)) if some else [tuple(mine)])
    for order in itertools.product(*orders):
        found = _lay_out(columns, classes, counts, blocks, order, tasks=tasks, beside_bytes=beside_bytes)
        if found is not None:
            yield found


def _lay_out(
    columns: Columns,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    blocks: Sequence[BlockShape],
    orders: Sequence[Sequence[int]],
    *,
    tasks: tuple[Task, ...],
    beside_bytes: Sequence[float],
) -> Trainer | None:
    """Put blocks on classes in the orders given; None when they do not fit or leave a pinned device out."""
    left = list(counts)
    by_stage: list[tuple[BlockShape, tuple[int, ...]]] = []
    for block, order in zip(blocks, orders, strict=True):
        chunks = [i for i in order for _ in range(left[i] // block.tp)]
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
    if is_mixed(blocks):
        ranks = [ix for _, ix in by_stage]
        mixed = mixed_stage(columns, classes, blocks, ranks, tasks=tasks, beside_bytes=beside_bytes)
        return None if mixed is None else Trainer(stages=mixed.stages, cost=mixed.cost, used=mixed.used)
    layers = columns.split(blocks, tasks)
    if layers is None:
        return None
    cluster = columns.cost.problem.cluster
    beside = beside_bytes or (0.0,) * len(layers)
    places: list[tuple[Place, ...]] = [tuple(classes[i].place for i in dict.fromkeys(ix)) for _, ix in by_stage]
    shape = TrainerShape(
        stages=tuple(
            StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=n, spread=spread_of(cluster, p), beside_bytes=held)
            for (b, _), n, p, held in zip(by_stage, layers, places, beside, strict=True)
        ),
        links=tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(places)),
        tasks=tasks,
    )
    seconds = columns.cost.trainer(shape)
    if seconds is None:
        return None
    stages = tuple(
        StageLayout(kind=b.kind, tp=b.tp, layers=n, chunks=ix) for (b, ix), n in zip(by_stage, layers, strict=True)
    )
    return Trainer(stages=stages, cost=seconds, used=used)
