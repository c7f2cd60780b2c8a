"""Training: FLOPs with recomputation, TP, PP, DP and FSDP communication, pipeline bubbles, and what fits."""

import heapq
import math
from collections.abc import Iterable, Sequence

from planner.cluster import DeviceKind, Link
from planner.cost.assumptions import Assumptions
from planner.cost.flops import compute_rate, hbm_rate, head_flops, layer_flops
from planner.cost.lengths import Moments, quantiles
from planner.cost.memory import stage_bytes, stage_fits, stage_params, state_bytes_per_param
from planner.cost.network import Spread, ring_s, send_s, spread_collective_s
from planner.model import ModelSpec
from planner.problem import TrainerKind
from planner.record import record
from planner.workload import Workload

_MICRO_SEQUENCES = (1, 2, 4, 8, 16, 64, 256, 1024)


@record
class StageShape:
    """One pipeline stage: `dp` groups of `tp` devices of one kind, and how they lie."""

    kind: str
    dp: int
    tp: int
    layers: int
    spread: Spread


@record
class TrainerShape:
    """A trainer: its stages in order and the link between each and the next."""

    stages: tuple[StageShape, ...]
    links: tuple[Link, ...] = ()


@record
class TrainerCost:
    """Seconds of one optimiser step and the choices behind it."""

    train_s: float
    compute_s: float  # of the slowest stage
    bubble_s: float
    communication_s: float  # gradients, and activations of the slowest stage
    recompute: bool
    micro_batches: int


def split_layers(layers: int, weights: Sequence[float], head_layers: float = 0.0) -> tuple[int, ...] | None:
    """Layers per stage in proportion to the stages' compute, at least one each; None when there are too few layers.

    `head_layers` is the vocabulary projection in units of layers; it burdens the last stage.
    """
    n = len(weights)
    if n > layers:
        return None
    total = sum(weights)
    ideal = [(layers + head_layers) * w / total for w in weights]
    ideal[-1] -= head_layers
    out = [max(1, math.floor(x + 1e-9)) for x in ideal]
    while sum(out) > layers:
        worst = max((i for i in range(n) if out[i] > 1), key=lambda i: (out[i] - ideal[i], out[i]))
        out[worst] -= 1
    while sum(out) < layers:
        best = max(range(n), key=lambda i: ideal[i] - out[i])
        out[best] += 1
    return tuple(out)


def assign_sequences(lengths: Iterable[float], workers: int) -> tuple[tuple[int, ...], ...]:
    """Give each sequence, longest first, to the worker with the fewest tokens; indices of `lengths` by worker."""
    values = list(lengths)
    heap = [(0.0, w) for w in range(workers)]
    groups: list[list[int]] = [[] for _ in range(workers)]
    for i in sorted(range(len(values)), key=lambda i: (-values[i], i)):
        load, worker = heapq.heappop(heap)
        groups[worker].append(i)
        heapq.heappush(heap, (load + values[i], worker))
    return tuple(tuple(g) for g in groups)


def imbalance(workload: Workload, m: Moments, dp: int) -> float:
    """Tokens of the fullest of `dp` workers over the mean, after `assign_sequences` on the workload's quantiles."""
    if dp == 1:
        return 1.0
    count = min(workload.samples_per_step, max(1024, dp))
    lengths = [m.prompt + float(x) for x in quantiles(workload.response, count)]
    fullest = max(sum(lengths[i] for i in group) for group in assign_sequences(lengths, dp))
    return fullest * dp / sum(lengths)


def passes(workload: Workload, recompute: bool) -> tuple[int, int]:
    """(layer passes, head passes) of one forward pass's FLOPs: 3 with backward, 4 with recomputation, and one for each
    forward-only task (proximal and reference log-probabilities)."""
    forward = (1 if workload.proximal_forward else 0) + (1 if workload.reference_model else 0)
    return (4 if recompute else 3) + forward, 3 + forward


def train_cost(
    shape: TrainerShape,
    *,
    kinds: Sequence[DeviceKind],
    model: ModelSpec,
    workload: Workload,
    m: Moments,
    skew: Sequence[float],
    trainer: TrainerKind,
    a: Assumptions,
) -> TrainerCost | None:
    """The cheapest way to run `shape` that fits, over micro-batch sizes and recomputation; None when nothing fits.

    `kinds` and `skew` (the DP imbalance) are by stage.
    """
    best: TrainerCost | None = None
    samples, dp_max = workload.samples_per_step, max(s.dp for s in shape.stages)
    for recompute in (False, True):
        for sequences in _MICRO_SEQUENCES:
            rounds = max(1, math.ceil(samples / (sequences * dp_max)))
            if not _fits(shape, kinds, model, m, samples, rounds, recompute, trainer, a):
                break
            cost = _timed(shape, kinds, model, workload, m, skew, rounds, recompute, trainer, a)
            if best is None or cost.train_s < best.train_s:
                best = cost
            if rounds == 1:
                break
    return best


def _fits(
    shape: TrainerShape,
    kinds: Sequence[DeviceKind],
    model: ModelSpec,
    m: Moments,
    samples: int,
    rounds: int,
    recompute: bool,
    trainer: TrainerKind,
    a: Assumptions,
) -> bool:
    n = len(shape.stages)
    for i, (stage, kind) in enumerate(zip(shape.stages, kinds, strict=True)):
        needed = stage_bytes(
            model,
            layers=stage.layers,
            tp=stage.tp,
            dp=stage.dp,
            first=i == 0,
            last=i == n - 1,
            in_flight=min(rounds, n - i),
            tokens=max(m.longest, samples * m.sequence / (rounds * stage.dp)),
            recompute=recompute,
            trainer=trainer,
            a=a,
        )
        if not stage_fits(kind, needed, a):
            return False
    return True


def _timed(
    shape: TrainerShape,
    kinds: Sequence[DeviceKind],
    model: ModelSpec,
    workload: Workload,
    m: Moments,
    skew: Sequence[float],
    rounds: int,
    recompute: bool,
    trainer: TrainerKind,
    a: Assumptions,
) -> TrainerCost:
    n = len(shape.stages)
    layer_passes, head_passes = passes(workload, recompute)
    sequences = workload.samples_per_step / rounds
    times: list[float] = []
    waits: list[float] = []
    sync = update = 0.0
    for i, (stage, kind) in enumerate(zip(shape.stages, kinds, strict=True)):
        last = i == n - 1
        tokens = sequences * m.sequence / stage.dp
        flops = layer_passes * stage.layers * layer_flops(model, tokens, sequences * m.sequence2 / stage.dp)
        flops += head_passes * head_flops(model, tokens) if last else 0.0
        compute = flops * skew[i] / (stage.tp * compute_rate(kind, model, tokens, stage.tp, a))
        compute = max(compute, layer_passes * stage.layers * kind.launch_s)
        hidden = tokens * model.hidden * model.dtype_bytes
        # Two all-reduces a layer and pass over it: forward, backward, and recomputation where there is one.
        reduces = 2 * (layer_passes - 1) * stage.layers
        compute += reduces * ring_s(stage.spread.local, hidden, stage.tp, 2, a)
        params = stage_params(model, stage.layers, first=i == 0, last=last)
        if trainer == "fsdp":
            gather = spread_collective_s(
                stage.spread, params * model.dtype_bytes, dp=stage.dp, tp=stage.tp, passes=1, a=a
            )
            compute = max(compute, 3 * gather)  # all-gather twice and reduce-scatter, prefetched behind compute
        else:
            sync = max(
                sync,
                spread_collective_s(stage.spread, params * model.dtype_bytes, dp=stage.dp, tp=stage.tp, passes=2, a=a),
            )
        shards = stage.tp * (stage.dp if trainer == "fsdp" else 1)
        update = max(update, 2 * params * state_bytes_per_param(model) / shards / hbm_rate(kind, a))
        # Activations forward (once for each forward-only pass too) and gradients back block both ends of a link
        # (measured pipelines over slow links are 30-50 % slower than without this term).
        crossing = 2 + (layer_passes - (4 if recompute else 3))
        whole = sequences * m.sequence * model.hidden * model.dtype_bytes
        near = [shape.links[j] for j in (i - 1, i) if 0 <= j < len(shape.links)]
        times.append(compute)
        waits.append(sum(crossing * send_s(link, whole, a) for link in near))
    busy = [t + w for t, w in zip(times, waits, strict=True)]
    slowest = max(range(n), key=lambda i: busy[i])
    bubble = sum(times) - times[slowest] + sum(waits) / 2 - waits[slowest] / 2
    total = rounds * busy[slowest] + bubble + sync + update
    return TrainerCost(
        train_s=total,
        compute_s=rounds * times[slowest],
        bubble_s=bubble,
        communication_s=rounds * waits[slowest] + sync,
        recompute=recompute,
        micro_batches=rounds,
    )
