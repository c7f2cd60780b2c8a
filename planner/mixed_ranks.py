"""Trainers of one stage whose DP ranks are of two kinds: the boxes of the scan, bounded as arrays, and single ones.

Such a trainer is a pair of lanes of one stage and of one TP degree, with a number of ranks of each. A box is a range of both
numbers (columns as in `planner.trainers`). A rank's share of the tokens falls with more ranks of either kind, so a box takes at
least as long as the work of its upper ends, the collectives of its lower ends, and a straggler with the longest sequence.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.columns import Columns
from planner.cost.assumptions import Assumptions
from planner.cost.flops import hbm_rate
from planner.cost.memory import (
    stage_params,
    state_bytes_per_param,
    task_state_bytes,
    task_working_bytes,
)
from planner.cost.model import CostModel
from planner.cost.network import Spread, best_of, local_link, ring_s
from planner.cost.ranks import MixedShape, RankShape, rank_weight, shares_by_compute
from planner.cost.training import StageShape, head_s, layer_s, micro_sequences
from planner.lanes import Lanes, Straggler, ring_at_least_s
from planner.pools import Pools
from planner.record import record

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def least_skew(
    straggler: Straggler, share: Floats, dp: Ints, *, slower: Floats | float, exactly: Flags | bool
) -> Floats:
    """Tokens of the fullest rank over its share, at least. Some rank has the longest sequence; and where the shares are `exactly`
    these, some rank has at least its share of the sequences, rounded up.

    `share` [2, c] of one rank of either kind, at most; `dp` ranks in all, at most; `slower`: speed of the slower kind over the
    faster one's.
    """
    longest = straggler.longest / share.max(axis=0)
    count = np.minimum(np.ceil(share * straggler.draws - 1e-9).astype(np.int64), straggler.draws)
    whole = np.where(exactly, (straggler.shortest[count] / share).min(axis=0), 1.0)
    # Beyond so many ranks there is a draw for each.
    many = np.minimum(longest, straggler.beyond * slower)
    found: Floats = np.maximum(1.0, np.where(dp <= straggler.draws, np.maximum(longest, whole), many))
    return found


@record
class Machines:
    """On how many machines the ranks of one kind may lie, and the link inside one."""

    link: Link
    dp: int
    fewest: int
    most: int


def best_rings(
    kinds: Sequence[Machines],
    *,
    shared: bool,
    least: int,
    remote: Link,
    size_bytes: float,
    tp: int,
    passes: int,
    a: Assumptions,
) -> tuple[tuple[tuple[Link, int], ...], int]:
    """The numbers of machines of either kind with the shortest collective over all ranks, relaxed: its rings inside machines,
    and machines in all, at least `least`. `shared`: machines may hold both kinds."""
    choices = [np.arange(m.fewest, max(m.fewest, m.most) + 1) for m in kinds]
    inside = [
        np.array([ring_s(m.link, size_bytes / tp, -(-m.dp // int(n)), passes, a) for n in some])
        for m, some in zip(kinds, choices, strict=True)
    ]
    total = np.maximum((np.maximum if shared else np.add).outer(*choices), least)
    # Some machine holds its part of all ranks, at best over the faster of the links.
    best, dp = best_of(m.link for m in kinds), sum(m.dp for m in kinds)
    counts = range(1, int(total.max()) + 1)
    part = np.array([0.0, *(ring_s(best, size_bytes / tp, -(-dp // n), passes, a) for n in counts)])
    between = np.array([0.0, *(ring_s(remote, size_bytes, n, passes, a) for n in counts)])
    seconds = np.maximum(np.maximum.outer(*inside), part[total]) + between[total]
    at = np.unravel_index(int(np.argmin(seconds)), seconds.shape)
    rings = [(m.link, -(-m.dp // int(some[i]))) for m, some, i in zip(kinds, choices, at, strict=True)]
    return (*rings, (best, -(-dp // int(total[at])))), int(total[at])


class RankTables:
    """What ranks of one kind and TP degree take, as plain numbers."""

    def __init__(self, columns: Columns) -> None:
        self.cost, self.tasks = columns.cost, columns.tasks
        self.model = columns.cost.problem.model

    def work_s(self, kind: str, tp: int, share: float, *, recompute: bool) -> float:
        """Seconds of all tasks on a rank that takes `share` of the batch in one micro-batch; more of them take no less."""
        ctx = self.cost.context
        local = Spread(nodes=1, local=local_link(ctx.cluster, ctx.kind(kind)))
        stage = StageShape(kind=kind, dp=1, tp=tp, layers=self.model.layers, spread=local)
        return sum(
            self.model.layers * layer_s(ctx, stage, share=share, recompute=recompute, task=t)
            + head_s(ctx, stage, share=share, task=t)
            for t in self.tasks
        )

    def line_s(self, kind: str, tp: int, *, recompute: bool) -> tuple[float, float]:
        """`work_s` as (seconds a share, seconds whatever the share): it is a straight line from one token a rank on."""
        whole, half = (self.work_s(kind, tp, x, recompute=recompute) for x in (1.0, 0.5))
        return 2 * (whole - half), max(0.0, 2 * half - whole)

    def update_s(self, kind: str, tp: int) -> float:
        """Seconds of the optimiser on whole states of one rank."""
        ctx = self.cost.context
        return (
            2
            * self.size_bytes
            / tp
            / self.model.dtype_bytes
            * state_bytes_per_param(self.model)
            / hbm_rate(ctx, ctx.kind(kind))
        )

    @property
    def size_bytes(self) -> float:
        """Weights of the actor."""
        return float(stage_params(self.model, self.model.layers, first=True, last=True) * self.model.dtype_bytes)

    def held_bytes(self, kind: str, tp: int) -> tuple[float, float]:
        """What is free on a device of the kind beside all models, less a part that falls with the number of ranks: (bytes,
        bytes times ranks)."""
        ctx, layers = self.cost.context, self.model.layers
        one, two = (
            sum(
                task_state_bytes(ctx, t, self.tasks, layers=layers, tp=tp, dp=dp, first=True, last=True)
                for t in self.tasks
            )
            for dp in (1, 2)
        )
        memory = ctx.kind(kind).memory_bytes
        room = memory * ctx.a.train_memory_share - ctx.a.overhead(memory)
        return room - (2 * two - one), 2 * (one - two)

    def working_bytes(self, tp: int, *, recompute: bool) -> tuple[float, float]:
        """What training the actor needs beside the models: (bytes, bytes a token of a micro-batch)."""
        nothing, one = (
            task_working_bytes(
                self.cost.context,
                "actor_training",
                layers=self.model.layers,
                tp=tp,
                last=True,
                in_flight=1,
                tokens=tokens,
                recompute=recompute,
            )
            for tokens in (0.0, 1.0)
        )
        return nothing, one - nothing


class MixedRanks:
    """The trainers with ranks of two kinds of one fleet; none where the executor cannot run them."""

    def __init__(self, cost: CostModel, pools: Pools, columns: Columns, lanes: Lanes) -> None:
        self.cost, self.pools, self.lanes = cost, pools, lanes
        kinds = range(len(pools.kinds))
        able = cost.problem.capabilities.train_mixed_dp
        self.pairs: tuple[tuple[int, int], ...] = tuple(itertools.combinations(kinds, 2)) if able else ()
        self.fsdp = cost.context.trainer == "fsdp"
        self.tables = RankTables(columns)
        if self.pairs:
            self._tabulate()

    def _tabulate(self) -> None:
        """By lane of one stage: [2, n] seconds a share and besides, plain and recomputing; and what memory holds."""
        lanes, pools, tables = self.lanes, self.pools, self.tables
        self.of = {(k, tp): n for n, (k, tp, pp) in enumerate(lanes.keys) if pp == 1}
        size = len(lanes.keys)
        self.slope_s, self.fixed_s = np.zeros((2, size)), np.zeros((2, size))
        self.free_bytes, self.states_bytes = np.zeros((2, size)), np.zeros(size)
        self.token_bytes = np.ones((2, size))
        self.weight, self.update_s = np.ones(size), np.zeros(size)
        for (k, tp), n in self.of.items():
            kind = pools.kinds[k]
            self.weight[n] = rank_weight(self.cost.context, kind, tp)
            self.update_s[n] = tables.update_s(kind, tp)
            free, self.states_bytes[n] = tables.held_bytes(kind, tp)
            for again in (0, 1):
                self.slope_s[again, n], self.fixed_s[again, n] = tables.line_s(kind, tp, recompute=bool(again))
                nothing, self.token_bytes[again, n] = tables.working_bytes(tp, recompute=bool(again))
                self.free_bytes[again, n] = free - nothing
        cluster, a = pools.cluster, self.cost.context.a
        near = best_of([cluster.cross_kind.bulk(), *(x for g in pools.sites if len(g) > 1 for x in pools.pairs(g))])
        kinds = range(len(pools.kinds))
        self.shared = np.array([[pools.share_machines(x, y) for y in kinds] for x in kinds], dtype=bool)
        # By set of sites, the slowest link between two machines at best: one between the kinds, or between two sites.
        self.remote = tuple(near if x is None else x for x in pools.narrow)
        rates = np.array([x.bytes_per_s for x in self.remote]) * a.link_efficiency
        self.between_s = tables.size_bytes / rates
        self.between_latency_s = np.array([x.latency_s for x in self.remote])

    def first(self, first_trained: int, must: Ints) -> Ints:
        """Boxes that together hold every such trainer; `first_trained`: the number of the first pair among all ways to train,
        `must`: devices by kind that train whatever the plan."""
        pools, lanes, found = self.pools, self.lanes, [np.zeros((0, 8), dtype=np.int64)]
        for i, (a, b) in enumerate(self.pairs):
            if must.sum() > must[a] + must[b]:
                continue
            either = ~pools.member | ((pools.count[a] > 0) | (pools.count[b] > 0))[None, :]
            has = (pools.inside[:, a] > 0) & (pools.inside[:, b] > 0)
            for tp in sorted({tp for k, tp in self.of if k == a} & {tp for k, tp in self.of if k == b}):
                x, y = self.of[a, tp], self.of[b, tp]
                low = [max(1, -(-int(must[k]) // tp)) for k in (a, b)]
                fits = (low[0] <= lanes.highest[:, x]) & (low[1] <= lanes.highest[:, y])
                s = np.flatnonzero(either.all(axis=1) & has & pools.open & fits)
                one = np.ones(len(s), dtype=np.int64)
                ends = (x * one, low[0] * one, lanes.highest[s, x], y * one, low[1] * one, lanes.highest[s, y])
                found.append(np.stack([s, *ends, (first_trained + i) * one], axis=1))
        return np.concatenate(found)

    def least_s(self, boxes: Ints) -> Floats:
        """Seconds that trainers of each box take at least; infinite where none fits."""
        _, a, low_a, high_a, b, low_b, high_b, _ = boxes.T
        samples = self.cost.problem.workload.samples_per_step
        low, high = low_a + low_b, np.minimum(high_a + high_b, samples)
        wa, wb = self.weight[a], self.weight[b]
        units = high_a * wa + high_b * wb
        shares = (wa / units, wb / units)
        units = low_a * wa + low_b * wb
        skew = least_skew(
            self.lanes.straggler,
            np.stack([wa / units, wb / units]),
            high_a + high_b,
            slower=np.minimum(wa, wb) / np.maximum(wa, wb),
            exactly=(low_a == high_a) & (low_b == high_b),
        )
        gather = self._collective_s(boxes)
        update = np.maximum(self.update_s[a], self.update_s[b]) / (high if self.fsdp else 1)
        found: Floats = np.full(len(boxes), np.inf)
        for again in (0, 1):
            rounds = self._rounds(again, (a, b), shares, high)
            fits = np.isfinite(rounds)
            rounds = np.where(fits, rounds, 1.0)  # without end times nothing would be no number
            work = np.maximum(*(self._work_s(again, n, x, rounds) for n, x in zip((a, b), shares, strict=True))) * skew
            seconds = np.maximum(work, 3 * rounds * gather) if self.fsdp else work + gather
            found = np.where(fits, np.minimum(found, seconds), found)
        found = found + update
        found[low > samples] = np.inf
        return found

    def _rounds(self, again: int, lanes: tuple[Ints, Ints], shares: tuple[Floats, Floats], dp: Ints) -> Floats:
        """Micro-batches, at least, that either kind has memory for; infinite where the longest sequence does not fit."""
        ctx = self.cost.context
        most = [(self.free_bytes[again, n] - self.states_bytes[n] / dp) / self.token_bytes[again, n] for n in lanes]
        whole = ctx.workload.samples_per_step * np.maximum(*shares)
        found: Floats = np.full(len(dp), np.inf)
        for sequences in micro_sequences(ctx):
            rounds = np.maximum(1.0, np.ceil(whole / sequences - 1e-9))
            fits = np.minimum(*most) >= ctx.m.longest
            for tokens, share in zip(most, shares, strict=True):
                # Less than one micro-batch more comes of rounding.
                fits &= ctx.batch_tokens * share / (whole / sequences + 1) <= tokens
            found = np.where(fits, np.minimum(found, rounds), found)
        return found

    def _collective_s(self, boxes: Ints) -> Floats:
        """One collective over all ranks at least: of the gradients, or of the parameters once."""
        lanes, (sites, a, low_a, _, b, low_b, _, _) = self.lanes, boxes.T
        fewest = [lanes.machines(n, d) for n, d in ((a, low_a), (b, low_b))]
        shared = self.shared[lanes.kind[a], lanes.kind[b]]
        machines = np.maximum(np.where(shared, np.maximum(*fewest), sum(fewest)), self.pools.size[sites])
        local = np.minimum(lanes.local_s[a], lanes.local_s[b]) / lanes.layer_bytes * self.tables.size_bytes
        return ring_at_least_s(
            machines,
            low_a + low_b,
            inside_s=local,
            between_s=self.between_s[sites],
            latency_s=self.between_latency_s[sites],
            passes=1 if self.fsdp else 2,
        )

    def _work_s(self, again: int, lane: Ints, share: Floats, rounds: Floats) -> Floats:
        """The line of a rank at its share; below one token, where it bends, a part of it."""
        tokens = np.minimum(1.0, share * self.cost.context.batch_tokens)
        found: Floats = (self.slope_s[again, lane] * share + self.fixed_s[again, lane] * rounds) * tokens
        return found

    def seconds(self, box: Ints) -> float | None:
        """The least seconds of the one trainer of a box; None where it does not fit."""
        sites, a, da, _, b, db, _, _ = (int(x) for x in box)
        ctx, lanes = self.cost.context, self.lanes
        tp = int(lanes.tp[a])
        kinds = [self.pools.kinds[int(lanes.kind[n])] for n in (a, b)]
        ranks = [(kinds[0], da), (kinds[1], db)]
        shares = shares_by_compute(ctx, ranks, tp)
        rings, nodes = best_rings(
            (self._ideal(a, da), self._ideal(b, db)),
            shared=bool(self.shared[lanes.kind[a], lanes.kind[b]]),
            least=int(self.pools.size[sites]),
            remote=self.remote[sites],
            size_bytes=self.tables.size_bytes,
            tp=tp,
            passes=1 if self.fsdp else 2,
            a=ctx.a,
        )
        shape = MixedShape(
            ranks=tuple(RankShape(kind=k, dp=n, share=x) for (k, n), x in zip(ranks, shares, strict=True)),
            tp=tp,
            layers=self.cost.problem.model.layers,
            rings=rings,
            nodes=nodes,
            remote=self.remote[sites] if nodes > 1 else None,
        )
        cost = self.cost.trainer(shape)
        return None if cost is None else cost.train_s

    def _ideal(self, lane: int, dp: int) -> Machines:
        k, tp = int(self.lanes.kind[lane]), int(self.lanes.tp[lane])
        holding = sum(m >= tp for at in self.pools.machines[k] for m in at)
        fewest = int(self.lanes.machines(np.array(lane), np.array(dp)))
        ctx = self.cost.context
        return Machines(
            link=local_link(ctx.cluster, ctx.kind(self.pools.kinds[k])), dp=dp, fewest=fewest, most=min(dp, holding)
        )
