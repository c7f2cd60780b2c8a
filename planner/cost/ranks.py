"""Training and scoring on one stage whose DP ranks are of two kinds, or take unequal shares of the tokens.

A rank's share is in proportion to its compute (the rule that divides layers among stages), the step waits for the slowest
rank, all ranks do the same number of micro-batches, and gradients or parameters cross the links between all of them.
Where all ranks are alike the figures are those of `planner.cost.training`.
"""

import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence

from planner.cluster import Cluster, Link
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context
from planner.cost.flops import compute_rate, hbm_rate
from planner.cost.lengths import quantiles
from planner.cost.memory import (
    layers_of,
    stage_fits,
    stage_params,
    state_bytes_per_param,
    task_state_bytes,
    task_working_bytes,
)
from planner.cost.network import Place, Spread, link_between, local_link, ring_s, worst_of
from planner.cost.training import IMBALANCE_DRAWS, StageShape, TrainerCost, head_s, layer_s, micro_sequences, passes
from planner.plan import Task
from planner.record import record
from planner.workflow import TRAINING, side_tasks
from planner.workload import Lengths

_ROUNDING = 1e-9


@record
class RankShape:
    """`dp` ranks of one kind that take the same share of every batch."""

    kind: str
    dp: int
    share: float  # of the batch's tokens, of one rank
    beside_bytes: float = 0.0  # what replicas on the same devices hold all the time


@record
class MixedShape:
    """A group of tasks on one stage of unlike ranks, and how they lie. The shares of all ranks sum to 1."""

    ranks: tuple[RankShape, ...]
    tp: int
    layers: int
    rings: tuple[tuple[Link, int], ...]  # inside machines: the link, and the ranks of one machine
    nodes: int  # machines the ranks lie on
    remote: Link | None = None  # the slowest link between two of them; None on one machine
    tasks: tuple[Task, ...] = ()

    @property
    def dp(self) -> int:
        """Ranks in all."""
        return sum(r.dp for r in self.ranks)


def rank_weight(ctx: Context, kind: str, tp: int) -> float:
    """FLOP/s of one rank, for dividing the tokens: the rule of `columns` for dividing layers."""
    k = ctx.kind(kind)
    return compute_rate(ctx, k, ctx.m.longest, tp) * k.train_efficiency * tp


def shares_by_compute(ctx: Context, ranks: Sequence[tuple[str, int]], tp: int) -> tuple[float, ...]:
    """The share of one rank of each (kind, number of ranks), in proportion to its compute."""
    weights = [rank_weight(ctx, kind, tp) for kind, _ in ranks]
    total = math.fsum(w * n for w, (_, n) in zip(weights, ranks, strict=True))
    return tuple(w / total for w in weights)


def mixed_shape(
    cluster: Cluster,
    ranks: Sequence[RankShape],
    places: Sequence[Sequence[Place]],
    *,
    tp: int,
    layers: int,
    tasks: tuple[Task, ...] = (),
) -> MixedShape:
    """The shape of ranks that lie at `places`: for each of `ranks` the place of every rank."""
    flat = [p for some in places for p in some]
    machines: dict[str, list[Place]] = {}
    for p in flat:
        machines.setdefault(p.node, []).append(p)
    rings: dict[Link, int] = {}
    for mine in machines.values():
        link = worst_of(local_link(cluster, cluster.kinds[p.kind]) for p in mine)
        if len(mine) > 1:
            rings[link] = max(rings.get(link, 0), len(mine))
    remote = list(_between(cluster, flat))
    return MixedShape(
        ranks=tuple(ranks),
        tp=tp,
        layers=layers,
        rings=tuple(sorted(rings.items(), key=lambda x: (x[0].bytes_per_s, x[1]))),
        nodes=len(machines),
        remote=worst_of(remote) if remote else None,
        tasks=tasks,
    )


def _between(cluster: Cluster, places: Sequence[Place]) -> Iterator[Link]:
    """The links between machines. They depend on kind and region: two machines of each are as good as all of them."""
    few: dict[tuple[str, str], dict[str, Place]] = {}
    for p in places:
        seen = few.setdefault((p.kind, p.region), {})
        if len(seen) < 2:
            seen.setdefault(p.node, p)
    for a, b in itertools.combinations([p for seen in few.values() for p in seen.values()], 2):
        if a.node != b.node:
            yield link_between(cluster, a, b)


def rank_imbalance(ctx: Context, ranks: Sequence[RankShape]) -> float:
    """Tokens of the fullest rank over its share, after giving each sequence, longest first, to the rank that would be
    done with it first; on the workload's quantiles, as `training.imbalance`."""
    dp = sum(r.dp for r in ranks)
    if dp == 1:
        return 1.0
    count = min(ctx.workload.samples_per_step, max(IMBALANCE_DRAWS, dp))
    lengths = _longest_first(ctx.workload.response, ctx.m.prompt, count)
    loads = [([0.0] * r.dp, 1 / r.share) for r in ranks]  # a heap for each set of alike ranks, and what a token counts
    for n in lengths:
        heap, done = loads[0][0], math.inf
        for mine, each in loads:
            if (mine[0] + n) * each < done:
                heap, done = mine, (mine[0] + n) * each
        heapq.heapreplace(heap, heap[0] + n)
    return max(max(mine) * each for mine, each in loads) / math.fsum(lengths)


@functools.lru_cache(maxsize=16)  # a pure function of values, asked for each way to share the tokens
def _longest_first(response: Lengths, prompt: float, count: int) -> tuple[float, ...]:
    return tuple(sorted((prompt + float(x) for x in quantiles(response, count)), reverse=True))


def mixed_collective_s(shape: MixedShape, size_bytes: float, passes: int, a: Assumptions) -> float:
    """Seconds of a collective over all ranks: inside machines first (all at once), then between them over the slowest link."""
    if shape.dp <= 1:
        return 0.0
    inside = max((ring_s(link, size_bytes / shape.tp, n, passes, a) for link, n in shape.rings), default=0.0)
    if shape.nodes == 1 or shape.remote is None:
        return inside
    return inside + ring_s(shape.remote, size_bytes, shape.nodes, passes, a)


def mixed_cost(ctx: Context, shape: MixedShape, skew: float) -> TrainerCost | None:
    """The cheapest way to run the tasks of `shape`, one after the other; None when they do not fit together.

    As `train_cost`; `skew` is the imbalance of the ranks.
    """
    tasks = shape.tasks or side_tasks(ctx.workload)
    resident = math.fsum(
        task_state_bytes(
            ctx, t, tasks, layers=_layers(ctx, shape, t), tp=shape.tp, dp=shape.dp, first=True, last=True
        )
        for t in tasks
    )  # fmt: skip
    parts: list[TrainerCost] = []
    for task in tasks:
        found = _task_cost(ctx, shape, skew, task, resident)
        if found is None:
            return None
        parts.append(found)
    return TrainerCost(
        train_s=math.fsum(p.train_s for p in parts),
        compute_s=math.fsum(p.compute_s for p in parts),
        bubble_s=0.0,
        communication_s=math.fsum(p.communication_s for p in parts),
        recompute=parts[-1].recompute,
        micro_batches=parts[-1].micro_batches,
        score_s=math.fsum(p.train_s for p, t in zip(parts, tasks, strict=True) if t not in TRAINING),
        resident_bytes=(resident,),
    )


def _layers(ctx: Context, shape: MixedShape, task: Task) -> int:
    split = layers_of(ctx.of(task).model, [shape.layers])
    assert split is not None, "one stage holds a model of any number of layers"
    return split[0]


def rounds_of(samples: int, most_share: float, sequences: int) -> int:
    """Micro-batches of a step in which the rank with the largest share takes `sequences` at a time."""
    return max(1, math.ceil(samples * most_share / sequences - _ROUNDING))


def _task_cost(ctx: Context, shape: MixedShape, skew: float, task: Task, resident: float) -> TrainerCost | None:
    """The fastest way to run one task, over micro-batch sizes and recomputation; None when nothing fits."""
    best: TrainerCost | None = None
    most = max(r.share for r in shape.ranks)
    for recompute in (False, True) if task in TRAINING else (False,):
        for sequences in micro_sequences(ctx):
            rounds = rounds_of(ctx.workload.samples_per_step, most, sequences)
            if not _fits(ctx, shape, task, resident, rounds=rounds, recompute=recompute):
                break
            cost = _timed(ctx, shape, skew, task, rounds=rounds, recompute=recompute)
            if best is None or cost.train_s < best.train_s:
                best = cost
            if rounds == 1:
                break
    return best


def _fits(ctx: Context, shape: MixedShape, task: Task, resident: float, *, rounds: int, recompute: bool) -> bool:
    """Each kind is asked for the tokens that its own ranks take in a micro-batch."""
    return all(
        stage_fits(
            ctx,
            r.kind,
            resident
            + r.beside_bytes
            + task_working_bytes(
                ctx,
                task,
                layers=_layers(ctx, shape, task),
                tp=shape.tp,
                last=True,
                in_flight=1,
                tokens=rank_tokens(ctx, r.share, rounds),
                recompute=recompute,
            ),
        )
        for r in shape.ranks
    )


def rank_tokens(ctx: Context, share: float, rounds: int) -> float:
    """Most tokens of a micro-batch on a rank with that share: never below the longest sequence."""
    return max(ctx.m.longest, ctx.batch_tokens * share / rounds)


def _timed(ctx: Context, shape: MixedShape, skew: float, task: Task, *, rounds: int, recompute: bool) -> TrainerCost:
    own, layers, trains, tp = ctx.of(task), _layers(ctx, shape, task), task in TRAINING, shape.tp
    params = stage_params(own.model, layers, first=True, last=task != "critic_training")
    size = params * own.model.dtype_bytes
    shards = tp * (shape.dp if ctx.trainer == "fsdp" else 1)
    slowest = update = 0.0
    for r in shape.ranks:
        kind = own.kind(r.kind)
        local = Spread(nodes=1, local=local_link(own.cluster, kind))
        one = StageShape(kind=r.kind, dp=1, tp=tp, layers=layers, spread=local)
        busy = layers * layer_s(own, one, share=r.share / rounds, recompute=recompute, task=task)
        busy = (busy + head_s(own, one, share=r.share / rounds, task=task)) * skew
        busy += layers * kind.train_floor_s if trains else 0.0
        slowest = max(slowest, busy, passes(own.workload, recompute, task)[0] * layers * kind.launch_s)
        if trains:
            moved = 2 * params * state_bytes_per_param(own.model) / shards
            update = max(update, moved / hbm_rate(own, kind) + kind.train_fixed_s)
    sync = 0.0
    if ctx.trainer == "fsdp":
        # All-gather for every pass over the layers, and reduce-scatter; prefetched behind compute.
        slowest = max(slowest, (3 if trains else 1) * mixed_collective_s(shape, size, 1, own.a))
    elif trains:
        sync = mixed_collective_s(shape, size, 2, own.a)
    return TrainerCost(
        train_s=rounds * slowest + sync + update,
        compute_s=rounds * slowest,
        bubble_s=0.0,
        communication_s=sync,
        recompute=recompute,
        micro_batches=rounds,
    )
