"""Laying out trainers of one stage whose DP ranks are of two kinds."""

import itertools
from collections.abc import Sequence

from planner.columns import Columns
from planner.cost.ranks import RankShape, mixed_shape, shares_by_compute
from planner.cost.training import TrainerCost
from planner.placing import StageLayout
from planner.plan import Task
from planner.record import record
from planner.space import BlockShape, DeviceClass, tp_degrees


@record
class MixedTrainer:
    """Such a trainer on classes, and its cost."""

    stages: tuple[StageLayout, ...]
    cost: TrainerCost
    used: tuple[int, ...]  # devices by class


def mixed_stage(
    columns: Columns,
    classes: Sequence[DeviceClass],
    blocks: Sequence[BlockShape],
    chunks: Sequence[Sequence[int]],
    *,
    tasks: tuple[Task, ...] = (),
    beside_bytes: Sequence[float] = (),
) -> MixedTrainer | None:
    """The ranks of `blocks` as one stage; None when they do not fit or leave out a device that must train.

    `chunks`: for each block the class of each of its ranks; `beside_bytes`: by block, what replicas hold on its devices.
    """
    layers = columns.split(blocks, tasks)
    assert layers is not None, "one stage holds a model of any number of layers"
    tp = blocks[0].tp
    used = [0] * len(classes)
    for i in itertools.chain.from_iterable(chunks):
        used[i] += tp
    if any(n < len(c.must_train) for n, c in zip(used, classes, strict=True)):
        return None
    cost = columns.cost
    shares = shares_by_compute(cost.context, [(b.kind, b.dp) for b in blocks], tp)
    beside = beside_bytes or (0.0,) * len(blocks)
    shape = mixed_shape(
        cost.problem.cluster,
        [
            RankShape(kind=b.kind, dp=b.dp, share=x, beside_bytes=held)
            for b, x, held in zip(blocks, shares, beside, strict=True)
        ],
        [[classes[i].place for i in some] for some in chunks],
        tp=tp,
        layers=layers[0],
        tasks=tasks,
    )
    found = cost.trainer(shape)
    if found is None:
        return None
    stage = StageLayout(
        kind="+".join(b.kind for b in blocks),
        tp=tp,
        layers=layers[0],
        chunks=tuple(itertools.chain.from_iterable(chunks)),
        token_shares=tuple(x for b, x in zip(blocks, shares, strict=True) for _ in range(b.dp)),
    )
    return MixedTrainer(stages=(stage,), cost=found, used=tuple(used))


def best_mixed(columns: Columns, classes: Sequence[DeviceClass], counts: Sequence[int]) -> MixedTrainer | None:
    """The fastest such trainer on exactly `counts` devices of each class; None where there is none."""
    caps = columns.cost.problem.capabilities
    kinds = list(dict.fromkeys(c.place.kind for c, n in zip(classes, counts, strict=True) if n))
    best: MixedTrainer | None = None
    if not caps.train_mixed_dp or len(kinds) != 2 or (caps.train_max_devices or sum(counts)) < sum(counts):
        return None
    for tp in tp_degrees(columns.cost.problem, caps.train_max_tp):
        if any(n % tp for n in counts):
            continue
        chunks = [
            [i for i, c in enumerate(classes) if c.place.kind == k for _ in range(counts[i] // tp)] for k in kinds
        ]
        blocks = [
            BlockShape(kind=k, tp=tp, dp=len(some), pp=1, joins=i > 0)
            for i, (k, some) in enumerate(zip(kinds, chunks, strict=True))
        ]
        found = mixed_stage(columns, classes, blocks, chunks)
        if found is not None and (best is None or found.cost.train_s < best.cost.train_s):
            best = found
    return best
