"""Training and scoring on a pipeline: FLOPs with recomputation, TP, PP, DP and FSDP communication, bubbles, and what fits.

A training step of r micro-batches of n tokens each on one device takes

    step = fixed + optimiser's bytes / HBM + r x (layers x (floor + kernels of a layer(n)) + vocabulary(n))

where the *floor* (`DeviceKind.train_floor_s`) is what a layer costs whatever n: the host's work and its launches forward and
backward, less what the device hides of them; and the *fixed* part (`train_fixed_s`) what a step costs whatever its batch: the
optimiser's launches, figures, a checkpoint's share, the publication of weights, the words with whoever gives the batches. Both
are measured (`planner.calibrated`); 0 unmeasured, where launches count by `launch_s` alone, as a lower bound of a pass over a
layer. Kernels and launches add up, though a device may work off one layer while its host prepares another: of a micro-batch
whose kernels take about as long as its floor the sum is up to twice too long, and a fit to measured steps halves that.

A packing trainer (`Capabilities.train_row_tokens`) fills micro-batches to that many tokens and no further, without padding,
and makes logits of response tokens only, a chunk at a time.
"""

import functools
import heapq
import math
from collections.abc import Iterable, Sequence

from planner.cluster import Link
from planner.cost.context import Context
from planner.cost.flops import hbm_rate, head_flops, layer_flops, train_attention_rate, train_rate
from planner.cost.lengths import longest, quantiles
from planner.cost.memory import (
    activation_bytes_per_token,
    layers_of,
    stage_fits,
    stage_params,
    state_bytes_per_param,
    task_state_bytes,
    task_working_bytes,
)
from planner.cost.network import Spread, ring_s, send_s, spread_collective_s
from planner.cost.pipeline import pipeline_time
from planner.plan import Task
from planner.record import record, replace
from planner.workflow import TRAINING, side_tasks
from planner.workload import Workload

MICRO_SEQUENCES = (1, 2, 4, 8, 16, 64, 256, 1024)
IMBALANCE_DRAWS = 1024  # sequences given out to find the fullest worker, where a step has more


@record
class StageShape:
    """One pipeline stage: `dp` groups of `tp` devices of one kind, and how they lie."""

    kind: str
    dp: int
    tp: int
    layers: int
    spread: Spread
    beside_bytes: float = 0.0  # what replicas on the same devices hold all the time


@record
class TrainerShape:
    """A group of tasks: its stages in order, the link between each and the next, and the tasks (none named: all of the
    workflow's but generation)."""

    stages: tuple[StageShape, ...]
    links: tuple[Link, ...] = ()
    tasks: tuple[Task, ...] = ()


@record
class TrainerCost:
    """Seconds that a group takes a step, one task after the other, and the choices behind them (those of its last task)."""

    train_s: float  # all tasks of the group
    compute_s: float  # of the slowest stage
    bubble_s: float
    communication_s: float  # gradients, and activations of the slowest stage
    recompute: bool
    micro_batches: int
    score_s: float = 0.0  # the part of train_s that scores samples
    resident_bytes: tuple[float, ...] = ()  # by stage: what its models hold on each device all the time


@record
class _Run:
    """Stages in a row that are alike and hold alike; the first and the last of a pipeline are never among others."""

    at: int  # the first of them
    stage: StageShape
    count: int
    resident_bytes: float
    skew: float


@record
class TaskWay:
    """One way to run a task: so many micro-batches, and whether activations are computed twice."""

    task: Task
    rounds: int
    recompute: bool


def micro_sequences(ctx: Context) -> tuple[int, ...]:
    """Samples that a DP rank may take at a time: of a packing trainer as many as a row holds, and fewer where those do not fit."""
    if ctx.row_tokens is None:
        return MICRO_SEQUENCES
    most = max(1, int(ctx.row_tokens / ctx.m.sequence))
    return (*(n for n in MICRO_SEQUENCES if n < most), most)


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
        worst = max((i for i in range(n) if out[i] > 1), key=lambda i: (round(out[i] - ideal[i], 9), out[i], i))
        out[worst] -= 1
    while sum(out) < layers:
        best = max(range(n), key=lambda i: round(ideal[i] - out[i], 9))  # ties, rounding apart, go to the front
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


def imbalance(ctx: Context, dp: int) -> float:
    """Tokens of the fullest of `dp` workers over the mean, where `assign_sequences` gives out the workload's quantiles; with
    more workers than `IMBALANCE_DRAWS`, each of whom has one sequence, the longest of `dp` over the mean of those draws."""
    if dp == 1:
        return 1.0
    count = min(ctx.workload.samples_per_step, IMBALANCE_DRAWS)
    lengths: list[float] = [ctx.m.prompt + x for x in quantiles(ctx.workload.response, count).tolist()]
    if dp > count:
        return (ctx.m.prompt + longest(ctx.workload.response, dp)) * count / sum(lengths)
    loads = [0.0] * dp  # a heap
    for length in reversed(lengths):
        heapq.heapreplace(loads, loads[0] + length)
    return max(loads) * dp / sum(lengths)


def passes(workload: Workload, recompute: bool, task: Task = "actor_training") -> tuple[int, int]:
    """(layer passes, passes of the vocabulary projection) in units of one forward pass's FLOPs: scoring 1, training 3 with
    backward and 4 with recomputation, and one for the proximal log-probabilities. Only the actor's shape has a projection."""
    if task not in TRAINING:
        return 1, 1 if task == "reference" else 0
    forward = 1 if workload.proximal_forward and task == "actor_training" else 0
    return (4 if recompute else 3) + forward, (3 + forward) if task == "actor_training" else 0


def attention_passes(ctx: Context, recompute: bool, task: Task = "actor_training") -> float:
    """Passes of attention over a layer in units of a forward pass's seconds.

    Backward has 2.5 times a forward pass's FLOPs, five products for two, as the scores are computed again (FlashAttention-2,
    section 4.1), at `Assumptions.attention_backward` of its rate; recomputation and the proximal pass are forward passes.
    """
    layer_passes, _ = passes(ctx.workload, recompute, task)
    return layer_passes if task not in TRAINING else layer_passes - 2 + 2.5 / ctx.a.attention_backward


def layer_s(ctx: Context, stage: StageShape, *, share: float, recompute: bool, task: Task = "actor_training") -> float:
    """Seconds of one layer of a stage for `share` of a step's batch: products, elementwise kernels, TP all-reduces."""
    model, kind = ctx.model, ctx.kind(stage.kind)
    layer_passes, _ = passes(ctx.workload, recompute, task)
    samples = ctx.workload.samples_per_step * share / stage.dp
    tokens = samples * ctx.m.sequence
    rate = train_rate(ctx, kind, tokens, stage.tp)
    products = layer_passes * layer_flops(model, tokens, 0) / (rate * stage.tp)
    flops, attention_rate = layer_flops(model, 0, samples * ctx.m.sequence2), train_attention_rate(ctx, kind, stage.tp)
    if attention_rate is None:
        products += layer_passes * flops / (rate * stage.tp)
    else:
        products += attention_passes(ctx, recompute, task) * flops / (attention_rate * stage.tp)
    # Between the products every kept activation is written and read once a pass.
    moved = 2 * layer_passes * tokens * activation_bytes_per_token(model, stage.tp) / hbm_rate(ctx, kind)
    # Two all-reduces a layer for each pass over it: forward, backward, recomputation (backward counts as two passes).
    hidden = tokens * model.hidden * model.dtype_bytes
    over = layer_passes - (1 if task in TRAINING else 0)
    reduces = 2 * over * ring_s(stage.spread.local, hidden, stage.tp, 2, ctx.a)
    return products + moved + reduces


def head_s(ctx: Context, stage: StageShape, *, share: float, task: Task = "actor_training") -> float:
    """Seconds of the vocabulary projection on the last stage for `share` of a step's batch."""
    kind = ctx.kind(stage.kind)
    _, head_passes = passes(ctx.workload, False, task)
    tokens = ctx.batch_tokens * share / stage.dp
    rate = train_rate(ctx, kind, tokens, stage.tp) * stage.tp
    return head_passes * head_flops(ctx.model, tokens * ctx.head_share) / rate


def crossing_s(ctx: Context, link: Link, *, share: float, task: Task = "actor_training") -> float:
    """Seconds a border between stages blocks both of them for `share` of a step's batch: activations forward, once for
    the proximal pass too, and gradients back. Not overlapped: measured pipelines over slow links are 30-50 % slower than
    without this term."""
    crossings = passes(ctx.workload, False, task)[0] - (1 if task in TRAINING else 0)
    return crossings * send_s(link, ctx.batch_tokens * share * ctx.model.hidden * ctx.model.dtype_bytes, ctx.a)


def train_cost(
    ctx: Context, shape: TrainerShape, skew: Sequence[float], known: dict[TaskWay, TrainerCost] | None = None
) -> TrainerCost | None:
    """The cheapest way to run the tasks of `shape`, one after the other; None when they do not fit together.

    Models of the group lie on its devices side by side; the task at work has what they leave. Each picks its micro-batch
    and recomputation. `skew` is the DP imbalance by stage; `known`: what ways were found to take on these stages, whatever
    replicas hold there, added to.
    """
    known = {} if known is None else known
    tasks = shape.tasks or side_tasks(ctx.workload)
    layers = {t: layers_of(ctx.of(t).model, [s.layers for s in shape.stages]) for t in tasks}
    n = len(shape.stages)
    if any(split is None for split in layers.values()):
        return None
    held = functools.cache(functools.partial(task_state_bytes, ctx))
    resident = tuple(
        sum(held(t, tasks, layers=(layers[t] or ())[i], tp=s.tp, dp=s.dp, first=i == 0, last=i == n - 1) for t in tasks)
        for i, s in enumerate(shape.stages)
    )
    parts: list[TrainerCost] = []
    for task in tasks:
        split = layers[task]
        assert split is not None
        mine = shape
        if split != tuple(s.layers for s in shape.stages):
            mine = replace(shape, stages=tuple(replace(s, layers=x) for s, x in zip(shape.stages, split, strict=True)))
        found = _task_cost(ctx.of(task), task, mine.links, _runs(mine, skew, resident), known)
        if found is None:
            return None
        parts.append(found)
    return TrainerCost(
        train_s=math.fsum(p.train_s for p in parts),
        compute_s=math.fsum(p.compute_s for p in parts),
        bubble_s=math.fsum(p.bubble_s for p in parts),
        communication_s=math.fsum(p.communication_s for p in parts),
        recompute=parts[-1].recompute,
        micro_batches=parts[-1].micro_batches,
        score_s=math.fsum(p.train_s for p, t in zip(parts, tasks, strict=True) if t not in TRAINING),
        resident_bytes=resident,
    )


def _task_cost(
    ctx: Context, task: Task, links: Sequence[Link], runs: Sequence[_Run], known: dict[TaskWay, TrainerCost]
) -> TrainerCost | None:
    """The fastest way to run one task, over micro-batch sizes and recomputation; None when nothing fits."""
    best: TrainerCost | None = None
    samples, dp_max = ctx.workload.samples_per_step, max(run.stage.dp for run in runs)
    for recompute in (False, True) if task in TRAINING else (False,):
        for sequences in micro_sequences(ctx):
            rounds = max(1, math.ceil(samples / (sequences * dp_max)))
            way = TaskWay(task=task, rounds=rounds, recompute=recompute)
            if not _fits(ctx, runs, way):
                break
            if way not in known:
                known[way] = _timed(ctx, runs, links, way)
            if best is None or known[way].train_s < best.train_s:
                best = known[way]
            if rounds == 1:
                break
    return best


def _runs(shape: TrainerShape, skew: Sequence[float], resident: Sequence[float]) -> list[_Run]:
    found: list[_Run] = []
    n = len(shape.stages)
    for i, (stage, s, held) in enumerate(zip(shape.stages, skew, resident, strict=True)):
        before = found[-1] if 1 < i < n - 1 else None
        if before is not None and before.resident_bytes == held and before.stage == stage:
            found[-1] = replace(before, count=before.count + 1)
        else:
            found.append(_Run(at=i, stage=stage, count=1, resident_bytes=held, skew=s))
    return found


def _fits(ctx: Context, runs: Sequence[_Run], way: TaskWay) -> bool:
    n = runs[-1].at + 1
    for run in runs:
        stage = run.stage
        working = task_working_bytes(
            ctx,
            way.task,
            layers=stage.layers,
            tp=stage.tp,
            last=run.at == n - 1,
            in_flight=min(way.rounds, n - run.at),  # those behind the first have fewer
            tokens=max(ctx.m.longest, ctx.batch_tokens / (way.rounds * stage.dp)),
            recompute=way.recompute,
        )
        if not stage_fits(ctx, stage.kind, run.resident_bytes + stage.beside_bytes + working):
            return False
    return True


def _timed(ctx: Context, runs: Sequence[_Run], links: Sequence[Link], way: TaskWay) -> TrainerCost:
    task, rounds, recompute = way.task, way.rounds, way.recompute
    n, share = len(links) + 1, 1 / rounds
    trains = task in TRAINING
    times: list[float] = []
    sync = update = 0.0
    one_layer_s, like = 0.0, tuple[object, ...]()
    for run in runs:
        stage, kind, last = run.stage, ctx.kind(run.stage.kind), run.at == n - 1
        mine = (stage.kind, stage.dp, stage.tp, stage.spread)
        if like != mine:  # stages of a block are alike
            like, one_layer_s = mine, layer_s(ctx, stage, share=share, recompute=recompute, task=task)
        busy = stage.layers * one_layer_s
        busy = (busy + (head_s(ctx, stage, share=share, task=task) if last else 0.0)) * run.skew
        busy += stage.layers * kind.train_floor_s if trains else 0.0
        busy = max(busy, passes(ctx.workload, recompute, task)[0] * stage.layers * kind.launch_s)
        params = stage_params(ctx.model, stage.layers, first=run.at == 0, last=last and task != "critic_training")
        size = params * ctx.model.dtype_bytes
        shards = stage.tp
        if ctx.trainer == "fsdp":
            gather = spread_collective_s(stage.spread, size, dp=stage.dp, tp=stage.tp, passes=1, a=ctx.a)
            # All-gather for every pass over the layers, and reduce-scatter; prefetched behind compute.
            busy = max(busy, (3 if trains else 1) * gather)
            shards *= stage.dp
        elif trains:
            sync = max(sync, spread_collective_s(stage.spread, size, dp=stage.dp, tp=stage.tp, passes=2, a=ctx.a))
        if trains:
            moved = 2 * params * state_bytes_per_param(ctx.model) / shards
            update = max(update, moved / hbm_rate(ctx, kind) + kind.train_fixed_s)
        times += [busy] * run.count
    crossing = {link: crossing_s(ctx, link, share=share, task=task) for link in dict.fromkeys(links)}
    through = pipeline_time(times, [crossing[link] for link in links], rounds)
    return TrainerCost(
        train_s=through.total_s + sync + update,
        compute_s=through.busy_s,
        bubble_s=through.bubble_s,
        communication_s=through.wait_s + sync,
        recompute=recompute,
        micro_batches=rounds,
    )
