"""Constrained search: the best trainer on the devices D_T.

TP and DP groups hold one device kind; only PP crosses kinds. All (DP, TP, PP) of each kind are tried, and all pairs of
blocks of two kinds that a lower bound does not rule out. Layers go to stages in proportion to their compute.
"""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.cost.flops import compute_rate, head_flops, layer_flops
from planner.cost.model import CostModel
from planner.cost.network import best_link, spread_of
from planner.cost.training import StageShape, TrainerCost, TrainerShape, passes, split_layers
from planner.placing import StageLayout
from planner.record import record
from planner.space import BlockShape, DeviceClass, block_shapes


@record
class Trainer:
    """A trainer laid out on classes, and its cost."""

    stages: tuple[StageLayout, ...]
    cost: TrainerCost
    used: tuple[int, ...]  # devices by class


def stage_weights(cost: CostModel, blocks: Sequence[BlockShape]) -> list[float]:
    """Compute of each stage in FLOP/s, for dividing the layers."""
    out: list[float] = []
    for b in blocks:
        rate = compute_rate(
            cost.problem.cluster.kinds[b.kind], cost.problem.model, cost.moments.longest, b.tp, cost.assumptions
        )
        out += [rate * b.tp * b.dp] * b.pp
    return out


def head_layers(cost: CostModel) -> float:
    """The vocabulary projection in units of one layer's work."""
    m = cost.moments
    return head_flops(cost.problem.model, m.sequence) / layer_flops(cost.problem.model, m.sequence, m.sequence2)


def block_rate(cost: CostModel, block: BlockShape) -> float:
    """FLOP/s a block cannot exceed: the curve rises with rows, and no micro-batch has more than a whole batch."""
    kind = cost.problem.cluster.kinds[block.kind]
    rows = cost.problem.workload.samples_per_step * cost.moments.sequence
    return compute_rate(kind, cost.problem.model, rows, block.tp, cost.assumptions) * block.devices


def pair_bounds_s(
    cost: CostModel, left: Sequence[BlockShape], right: Sequence[BlockShape], link: Link
) -> NDArray[np.float64]:
    """Seconds that a trainer of blocks left[i] -> right[j] takes at least: perfect balance and no bubbles; and for the
    two stages at the border their fewest layers after `split_layers` plus the activations over `link`."""
    m, model, workload = cost.moments, cost.problem.model, cost.problem.workload
    samples, heads = workload.samples_per_step, head_layers(cost)
    layer_passes, head_passes = passes(workload, False)
    flops = samples * model.layers * layer_passes * layer_flops(model, m.sequence, m.sequence2)
    flops += samples * head_passes * head_flops(model, m.sequence)
    ra, rb = (np.array([block_rate(cost, b) for b in side])[:, None] for side in (left, right))
    balanced = flops / (ra + rb.T)
    crossing = 2 + layer_passes - 3
    size = samples * m.sequence * model.hidden * model.dtype_bytes
    transfer = crossing * size / (link.bytes_per_s * cost.assumptions.link_efficiency)
    wa, wb = (np.array([stage_weights(cost, (b,))[0] for b in side])[:, None] for side in (left, right))
    pa, pb = (np.array([b.pp for b in side])[:, None] for side in (left, right))
    total = wa * pa + (wb * pb).T
    units = model.layers + heads
    share_a, share_b = units * wa / total, units * wb.T / total
    short = np.where(share_a < 1, pa, 0) + np.where(share_b - np.where(pb.T == 1, heads, 0) < 1, pb.T, 0)
    border = np.minimum(
        np.maximum(1, np.floor(share_a) - short) / (ra / pa),
        np.maximum(1, np.floor(share_b - heads) - short) / (rb / pb).T,
    )
    per_layer = samples * layer_passes * layer_flops(model, m.sequence, m.sequence2)
    return np.maximum(balanced, transfer + per_layer * border)


def trainers(
    cost: CostModel, classes: Sequence[DeviceClass], counts: Sequence[int], best_s: float = float("inf")
) -> Iterator[Trainer]:
    """Every trainer on `counts` devices of each class that may beat the ones before it, and `best_s` seconds."""
    kinds: dict[str, list[int]] = {}
    for i, c in enumerate(classes):
        if counts[i]:
            kinds.setdefault(c.place.kind, []).append(i)
    options = {
        k: block_shapes(cost.problem, k, tuple(counts[i] for i in ix), sum(counts[i] for i in ix))
        for k, ix in kinds.items()
    }
    heads = head_layers(cost)
    for k in kinds:
        for block in options[k]:
            found = lay_out(cost, classes, counts, (block,), heads)
            if found is not None and found.cost.train_s < best_s:
                best_s = found.cost.train_s
                yield found
    if cost.problem.capabilities.train_max_kinds < 2 or len(kinds) < 2:
        return
    limit = cost.problem.capabilities.train_max_devices
    for ka, kb in itertools.permutations(kinds, 2):
        places = [tuple(classes[i].place for i in kinds[k]) for k in (ka, kb)]
        bounds = pair_bounds_s(cost, options[ka], options[kb], best_link(cost.problem.cluster, *places))
        for flat in np.argsort(bounds, axis=None, kind="stable"):
            i, j = divmod(int(flat), len(options[kb]))
            if bounds[i, j] >= best_s:
                break
            a, b = options[ka][i], options[kb][j]
            if limit is not None and a.devices + b.devices > limit:
                continue
            found = lay_out(cost, classes, counts, (a, b), heads)
            if found is not None and found.cost.train_s < best_s:
                best_s = found.cost.train_s
                yield found


def best_trainer(cost: CostModel, classes: Sequence[DeviceClass], counts: Sequence[int]) -> Trainer | None:
    """The fastest trainer on D_T; None when none fits or none covers the pinned devices."""
    best: Trainer | None = None
    for found in trainers(cost, classes, counts):
        best = found
    return best


def lay_out(
    cost: CostModel,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    blocks: Sequence[BlockShape],
    heads: float,
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
    layers = split_layers(cost.problem.model.layers, stage_weights(cost, blocks), heads)
    if layers is None:
        return None
    cluster = cost.problem.cluster
    places = [tuple(dict.fromkeys(classes[i].place for i in ix)) for _, ix in by_stage]
    shape = TrainerShape(
        stages=tuple(
            StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=n, spread=spread_of(cluster, p))
            for (b, _), n, p in zip(by_stage, layers, places, strict=True)
        ),
        links=tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(places)),
    )
    seconds = cost.trainer(shape)
    if seconds is None:
        return None
    stages = tuple(
        StageLayout(kind=b.kind, tp=b.tp, layers=n, chunks=ix) for (b, ix), n in zip(by_stage, layers, strict=True)
    )
    return Trainer(stages=stages, cost=seconds, used=used)
