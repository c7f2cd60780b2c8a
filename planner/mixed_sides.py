"""Groups of tasks on one stage whose DP ranks are of two kinds, many at once: the formulas of `planner.cost.ranks` as arrays.

Where the ranks lie is relaxed in their favour, and of the imbalance of ranks only what any way to share whole sequences has; so
each figure is a lower bound. Arrays have one row a kind and one column a candidate; all candidates of a batch are of one
pair of kinds and one TP degree.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context
from planner.cost.flops import hbm_rate
from planner.cost.memory import stage_params, state_bytes_per_param, task_state_bytes, task_working_bytes
from planner.cost.network import Spread, local_link
from planner.cost.ranks import rank_weight
from planner.cost.training import StageShape, head_s, layer_s, micro_sequences, passes
from planner.lanes import Straggler
from planner.mixed_ranks import least_skew
from planner.plan import Task
from planner.record import record
from planner.relaxed import Relaxed
from planner.space import BlockShape
from planner.workflow import TRAINING

Array = NDArray[np.float64]
Ints = NDArray[np.int_]
Flags = NDArray[np.bool_]

_ROUNDING = 1e-9
_CHUNK = 4096


def mixed_pairs(
    relaxed: Relaxed, blocks: Mapping[str, Sequence[BlockShape]]
) -> Iterator[tuple[tuple[str, str], tuple[Ints, Ints]]]:
    """The pairs of blocks, by position, that may be ranks of one stage: two kinds and, in chunks of one TP degree, which of
    their blocks."""
    problem = relaxed.columns.cost.problem
    caps, samples = problem.capabilities, problem.workload.samples_per_step
    if not caps.train_mixed_dp:
        return
    for kinds in itertools.combinations(relaxed.kinds, 2):
        for tp in sorted({b.tp for b in blocks[kinds[0]]}):
            ix = [np.array([i for i, b in enumerate(blocks[k]) if b.tp == tp and b.pp == 1], dtype=int) for k in kinds]
            a, b = (x.ravel() for x in np.meshgrid(*ix, indexing="ij"))
            dp = [np.array([x.dp for x in blocks[k]], dtype=int)[at] for k, at in zip(kinds, (a, b), strict=True)]
            total = dp[0] + dp[1]
            keep = (total <= samples) & (total * tp <= (caps.train_max_devices or total.max(initial=1) * tp))
            a, b = a[keep], b[keep]
            for start in range(0, len(a), _CHUNK):
                yield (kinds[0], kinds[1]), (a[start : start + _CHUNK], b[start : start + _CHUNK])


@record
class _Way:
    """One micro-batch size, with or without recomputation, on every candidate."""

    recompute: bool
    working: Array  # bytes beside the models, by kind
    time_s: Array
    more: Flags  # whether a larger micro-batch makes a difference


class MixedBatch:
    """Candidates of one pair of kinds and one TP degree."""

    def __init__(
        self, straggler: Straggler, relaxed: Relaxed, blocks: Sequence[Sequence[BlockShape]], crosses: Flags
    ) -> None:
        """`blocks`: for either kind the block of each candidate; `crosses`: candidates that no region holds."""
        self.ctx = relaxed.columns.cost.context
        self.tp = blocks[0][0].tp
        self.kinds = tuple(some[0].kind for some in blocks)
        self.ranks = np.array([[b.dp for b in some] for some in blocks], dtype=int)
        self.dp = self.ranks.sum(axis=0)
        weight = np.array([rank_weight(self.ctx, k, self.tp) for k in self.kinds])
        self.share = weight[:, None] / (weight @ self.ranks)
        slower = float(weight.min() / weight.max())
        self.skew = least_skew(straggler, self.share, self.dp, slower=slower, exactly=True)
        machines = [[relaxed.machines(b) for b in some] for some in blocks]
        self.fewest = np.array([[0 if m is None else m.fewest for m in some] for some in machines], dtype=int)
        self.most = np.array([[0 if m is None else m.most for m in some] for some in machines], dtype=int)
        self.shared = relaxed.share_machines(*self.kinds)
        near, far = relaxed.between(*self.kinds), relaxed.bridge
        self.remote = (_by(crosses, near, far, "latency_s"), _by(crosses, near, far, "bytes_per_s"))
        rooms = self.ctx.cluster.kinds
        memory = np.array([rooms[k].memory_bytes for k in self.kinds])
        self.room = (memory * self.ctx.a.train_memory_share - [self.ctx.a.overhead(m) for m in memory])[:, None]
        self._ways: dict[Task, list[_Way]] = {}

    def group_s(self, tasks: tuple[Task, ...]) -> tuple[Array, Array]:
        """(seconds of scoring, of training) of a group on every candidate; infinite where it does not fit."""
        resident = sum((self._state(t, tasks) for t in tasks), np.zeros(len(self.dp)))
        score, train = np.zeros(len(self.dp)), np.zeros(len(self.dp))
        for t in tasks:
            best = np.full(len(self.dp), np.inf)
            tried = dict.fromkeys((False, True), (self.fewest > 0).all(axis=0))
            for way in self._ways_of(t):
                # As in the plain formulas, larger micro-batches are not tried beyond the first that does not fit.
                fits = tried[way.recompute] & (resident + way.working <= self.room).all(axis=0)
                tried[way.recompute] = fits & way.more
                np.minimum(best, way.time_s, out=best, where=fits)
            (train if t in TRAINING else score).__iadd__(best)
        return score, train

    def _state(self, task: Task, beside: tuple[Task, ...]) -> Array:
        """`task_state_bytes`, which is a constant and a part that falls with the ranks."""
        layers = self.ctx.of(task).model.layers
        one, two = (
            task_state_bytes(self.ctx, task, beside, layers=layers, tp=self.tp, dp=dp, first=True, last=True)
            for dp in (1, 2)
        )
        found: Array = (2 * two - one) + 2 * (one - two) / self.dp
        return found

    def _ways_of(self, task: Task) -> list[_Way]:
        if task not in self._ways:
            self._ways[task] = list(self._made(task))
        return self._ways[task]

    def _made(self, task: Task) -> Iterator[_Way]:
        ctx = self.ctx.of(task)
        samples, most = ctx.workload.samples_per_step, self.share.max(axis=0)
        for recompute in (False, True) if task in TRAINING else (False,):
            slope_s, fixed_s = self._line_s(ctx, task, recompute)
            nothing, one = (self._working(ctx, task, x, recompute) for x in (0.0, 1.0))
            for sequences in micro_sequences(ctx):
                rounds = np.maximum(1, np.ceil(samples * most / sequences - _ROUNDING))
                part = self.share / rounds
                tokens = np.maximum(ctx.m.longest, ctx.batch_tokens * part)
                bent = np.minimum(1.0, ctx.batch_tokens * part)  # below one token a rank it is no straight line
                busy = (slope_s * part + fixed_s) * bent * self.skew
                yield _Way(
                    recompute=recompute,
                    working=nothing + (one - nothing) * tokens,
                    time_s=self._timed(ctx, task, busy, rounds, recompute),
                    more=rounds > 1,
                )
                if (rounds == 1).all():
                    break

    def _line_s(self, ctx: Context, task: Task, recompute: bool) -> tuple[Array, Array]:
        """Seconds of a rank of either kind for a micro-batch: a share of the batch, and whatever the share."""
        whole, half = np.zeros((2, 1)), np.zeros((2, 1))
        for i, k in enumerate(self.kinds):
            local = Spread(nodes=1, local=local_link(ctx.cluster, ctx.kind(k)))
            stage = StageShape(kind=k, dp=1, tp=self.tp, layers=ctx.model.layers, spread=local)
            for out, share in ((whole, 1.0), (half, 0.5)):
                out[i] = ctx.model.layers * layer_s(ctx, stage, share=share, recompute=recompute, task=task)
                out[i] += head_s(ctx, stage, share=share, task=task)
        return 2 * (whole - half), np.maximum(0.0, 2 * half - whole)

    def _working(self, ctx: Context, task: Task, tokens: float, recompute: bool) -> float:
        return task_working_bytes(
            ctx, task, layers=ctx.model.layers, tp=self.tp, last=True, in_flight=1, tokens=tokens, recompute=recompute
        )

    def _timed(self, ctx: Context, task: Task, busy: Array, rounds: Array, recompute: bool) -> Array:
        trains, fsdp, model = task in TRAINING, ctx.trainer == "fsdp", ctx.model
        floor = [passes(ctx.workload, recompute, task)[0] * model.layers * ctx.kind(k).launch_s for k in self.kinds]
        launched = np.array([model.layers * ctx.kind(k).train_floor_s * trains for k in self.kinds])[:, None]
        slowest = np.maximum(busy + launched, np.array(floor)[:, None]).max(axis=0)
        params = stage_params(model, model.layers, first=True, last=task != "critic_training")
        size = float(params * model.dtype_bytes)
        sync: Array = np.zeros(len(self.dp))
        update: Array = np.zeros(len(self.dp))
        if fsdp:
            slowest = np.maximum(slowest, (3 if trains else 1) * self._collective_s(size, 1))
        elif trains:
            sync = self._collective_s(size, 2)
        if trains:
            moved = 2 * params * state_bytes_per_param(model) / (self.tp * (self.dp if fsdp else 1))
            one = [moved / hbm_rate(ctx, k) + k.train_fixed_s for k in map(ctx.kind, self.kinds)]
            update = np.max(one, axis=0) if fsdp else np.zeros(len(self.dp)) + max(one)
        out: Array = rounds * slowest + sync + update
        return out

    def _collective_s(self, size: float, times: int) -> Array:
        """The shortest collective over all ranks, whatever machines they lie on."""
        a, cluster = self.ctx.a, self.ctx.cluster
        least = (np.maximum if self.shared else np.add)(*self.fewest)
        best: Array = np.full(len(self.dp), np.inf)
        links = [local_link(cluster, cluster.kinds[k]) for k in self.kinds]
        fast = (min(x.latency_s for x in links), max(x.bytes_per_s for x in links))
        for n in range(int(least.min(initial=1)), int(self.most.sum(axis=0).max(initial=1)) + 1):
            # Some machine has as many ranks as all have on average, whatever their kinds.
            inside = _ring_s(fast, size / self.tp, -(-self.dp // n), times, a)
            for link, ranks, most in zip(links, self.ranks, self.most, strict=True):
                # The other kind has a machine at least, unless they share them.
                fullest = -(-ranks // np.maximum(1, np.minimum(most, n if self.shared else n - 1)))
                inside = np.maximum(
                    inside, _ring_s((link.latency_s, link.bytes_per_s), size / self.tp, fullest, times, a)
                )
            found = inside + _ring_s(self.remote, size, n, times, a)
            np.minimum(best, found, out=best, where=n >= least)
        return np.where(np.isfinite(best), best, 0.0)


def _ring_s(
    link: tuple[Array | float, Array | float], size: float, ranks: Ints | int, times: int, a: Assumptions
) -> Array:
    """`ring_s` of many; nothing for a single rank."""
    latency, rate = link
    found: Array = np.asarray(times * (ranks - 1) * (latency + size / ranks / (rate * a.link_efficiency)))
    return found


def _by(crosses: Flags, near: Link, far: Link | None, name: str) -> Array:
    found: Array = np.where(crosses & (far is not None), getattr(far or near, name), getattr(near, name))
    return found
