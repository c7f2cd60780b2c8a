"""The formulas of `planner.cost.training` over many shapes at once.

A shape is one block or two in pipeline: `pp` stages of one kind each, of `dp` groups of `tp` devices. The stages of a shape
differ in their layers, in what lies next to them and in what the first and the last hold, and so fall into at most eight
*parts* of equal stages: of the first block its first stage, those in the middle with one layer more, those with one less, its
last; and so of the second block. Arrays have one row a part and one column a shape. Tests hold every figure equal to the plain
formulas.
"""

import copy
import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import DeviceKind, Link
from planner.cost.context import Context
from planner.cost.flops import hbm_rate, head_flops, layer_flops, train_attention_rate
from planner.cost.memory import activation_bytes_per_token, state_bytes_per_param
from planner.cost.training import MICRO_SEQUENCES, passes, split_layers
from planner.plan import Task
from planner.record import record
from planner.workflow import TRAINING

Array = NDArray[np.float64]
Ints = NDArray[np.int_]
Bools = NDArray[np.bool_]
_PARTS = 8


@record
class Block:
    """One block of many shapes."""

    kind: str
    tp: Ints
    dp: Ints
    pp: Ints
    weight: Array  # FLOP/s of one stage, for dividing the layers
    skew: Array  # tokens of the fullest DP rank over the mean
    nodes: Ints  # machines a stage spans
    local: Link
    remote: Link | None  # the slowest link of a stage that spans machines
    inner: Link  # between stages of the block

    def take(self, at: NDArray[np.int_] | Bools) -> "Block":
        """Some of the shapes."""
        arrays = {n: getattr(self, n)[at] for n in ("tp", "dp", "pp", "weight", "skew", "nodes")}
        return dataclasses.replace(self, **arrays)


@record
class Parts:
    """The parts of every shape: rows of eight, by columns."""

    count: Ints  # stages in the part; 0 where there is none
    index: Ints  # the first of them, from the front
    layers: Ints
    waits: Array  # crossings of one sample's worth: multiples are added by task
    first: Bools
    last: Bools


def divided(first: Block | None, second: Block, layers: int, head_layers: float) -> tuple[Ints, ...]:
    """`split_layers` for every shape: (layers of a stage of the first block, how many of its stages have one more, the same
    for the second block without its last stage, layers of the last stage, 0 where there are more stages than layers)."""
    na = np.zeros_like(second.pp) if first is None else first.pp
    nb = second.pp
    wa = np.zeros_like(second.weight) if first is None else first.weight
    total = na * wa + nb * second.weight
    xa, xb = (layers + head_layers) * wa / total, (layers + head_layers) * second.weight / total
    xl = xb - head_layers
    ideal = np.stack([xa, xb, xl])
    out = np.maximum(1, np.floor(ideal + 1e-9)).astype(int)
    size = np.stack([na, nb - 1, np.ones_like(nb)])
    rest = layers - (out * size).sum(axis=0)
    order = np.argsort(-np.round(ideal - out, 9), axis=0, kind="stable")
    more = np.zeros_like(out)
    columns = np.arange(len(nb))
    for place in range(3):
        row = order[place]
        given = np.clip(rest, 0, size[row, columns])
        more[row, columns] = given
        rest = rest - given
    last = out[2] + more[2]
    for i in np.flatnonzero((na + nb <= layers) & (rest < 0)):  # rare: stages whose share is less than a layer
        weights = [float(wa[i])] * int(na[i]) + [float(second.weight[i])] * int(nb[i])
        plain = split_layers(layers, weights, head_layers)
        assert plain is not None, "there are no more stages than layers"
        for row, stages in ((0, plain[: na[i]]), (1, plain[na[i] : -1])):
            out[row, i], more[row, i] = min(stages, default=1), sum(n > min(stages) for n in stages)
        last[i] = plain[-1]
    last = np.where(na + nb <= layers, last, 0)
    return out[0], more[0], out[1], more[1], last


def parts_of(first: Block | None, second: Block, split: Sequence[Ints]) -> Parts:
    """The parts; `waits` holds, for the three kinds of border (in the first block, between, in the second), how many each
    part touches."""
    la, ma, lb, mb, ll = split
    na = np.zeros_like(second.pp) if first is None else first.pp
    nb, zero = second.pp, np.zeros_like(second.pp)
    n = na + nb
    between_a, between_b = np.clip(na - 2, 0, None), np.clip(nb - 2, 0, None)
    mid_a, mid_b = np.clip(ma - 1, 0, between_a), np.clip(mb - 1, 0, between_b)
    count = np.stack(
        [
            (na >= 1) * 1, mid_a, between_a - mid_a, (na >= 2) * 1, (nb >= 2) * 1, mid_b, between_b - mid_b, zero + 1,
        ]
    )  # fmt: skip
    index = np.stack([zero, zero + 1, np.maximum(1, ma), na - 1, na, na + 1, na + np.maximum(1, mb), n - 1])
    layers = np.stack([la + (ma >= 1), la + 1, la, la + (ma >= na), lb + (mb >= 1), lb + 1, lb, ll])
    border_a = np.stack([na >= 2, zero + 2, zero + 2, zero + 1, zero, zero, zero, zero])
    between = np.stack([(na == 1) & (nb >= 1), zero, zero, zero + 1, na >= 1, zero, zero, (nb == 1) & (na >= 1)])
    border_b = np.stack([zero, zero, zero, zero, zero + 1, zero + 2, zero + 2, nb >= 2])
    return Parts(
        count=count,
        index=index,
        layers=layers,
        waits=np.stack([border_a, between, border_b]).astype(float),
        first=index == 0,
        last=index == n - 1,
    )


@record
class _Way:
    """One micro-batch size, with or without recomputation, on every shape."""

    recompute: bool
    limit: Array  # bytes that models may hold, by part
    time_s: Array
    more: Bools  # whether a larger micro-batch makes a difference


class Batch:
    """Times of groups of tasks on many shapes; every model has the same number of layers."""

    def __init__(
        self,
        ctx: Context,
        first: Block | None,
        second: Block,
        link: Link | None,
        head_layers: float,
        *,
        crosses: Bools | None = None,
        bridge: Link | None = None,
    ) -> None:
        """`crosses`: shapes that no region holds, so that one of their stages or borders lies over a link no better than
        `bridge`; what they take is then a lower bound."""
        self.ctx, self.bridge = ctx, bridge
        self.crosses = np.zeros(len(second.pp), dtype=bool) if crosses is None else crosses
        self.first, self.second, self.link = first, second, link
        self.size = len(second.pp)
        split = divided(first, second, ctx.model.layers, head_layers)
        self.possible = split[4] > 0
        self.parts = parts_of(first, second, split)
        self.stages = second.pp + (0 if first is None else first.pp)
        self.dp = self._by_part("dp")
        self.tp = self._by_part("tp")
        dp_first = second.dp if first is None else np.maximum(first.dp, second.dp)
        samples = ctx.workload.samples_per_step
        self.rounds: list[Ints] = []
        for sequences in MICRO_SEQUENCES:
            rounds = np.maximum(1, -(-samples // (sequences * dp_first)))
            self.rounds.append(rounds)
            if (rounds == 1).all():
                break
        self._by_degree: dict[int, list[tuple[int, Ints]]] = {}
        self._ways: dict[Task, list[_Way]] = {}
        self._states: dict[Task, Array] = {}
        self._groups: dict[frozenset[Task], tuple[Array, Array]] = {}

    def group_s(self, tasks: tuple[Task, ...]) -> tuple[Array, Array]:
        """(seconds of scoring, of training) of a group on every shape; infinite where it does not fit."""
        key = frozenset(self._like(t, tasks) for t in tasks)
        if len(key) < len(tasks):  # two tasks that cost the same, in one group
            return self._group_s(tasks)
        if key not in self._groups:
            self._groups[key] = self._group_s(tasks)
        return self._groups[key]

    def _like(self, task: Task, beside: Sequence[Task]) -> Task:
        """A task that costs the same: values of a critic that is not trained here are a forward pass as rewards are."""
        alike = self.ctx.of("reward").model == self.ctx.of("critic_values").model
        return "reward" if task == "critic_values" and alike and "critic_training" not in beside else task

    def _group_s(self, tasks: tuple[Task, ...]) -> tuple[Array, Array]:
        score, train = np.zeros(self.size), np.zeros(self.size)
        resident = np.zeros((_PARTS, self.size))
        for t in tasks:
            if not (t == "critic_values" and "critic_training" in tasks):
                resident += self._state(self._like(t, tasks))
        for t in tasks:
            best = np.full(self.size, np.inf)
            tried = {False: self.possible, True: self.possible}
            for way in self._ways_of(self._like(t, tasks)):
                # As in the plain formulas, larger micro-batches are not tried beyond the first that does not fit.
                fits = tried[way.recompute] & (resident <= way.limit).all(axis=0)
                tried[way.recompute] = fits & way.more
                np.minimum(best, way.time_s, out=best, where=fits)
            (train if t in TRAINING else score).__iadd__(best)
        return score, train

    def _by_part(self, name: str) -> Ints:
        b = getattr(self.second, name)
        a = b if self.first is None else getattr(self.first, name)
        return np.stack([a] * 4 + [b] * 4)

    def _kinds(self) -> list[DeviceKind]:
        second = self.ctx.kind(self.second.kind)
        return [second if self.first is None else self.ctx.kind(self.first.kind)] * 4 + [second] * 4

    def _column(self, values: Sequence[float]) -> Array:
        return np.array(values, dtype=float)[:, None]

    # Memory.

    def _params(self, task: Task) -> Array:
        """Parameters of a stage of each part."""
        model, p = self.ctx.of(task).model, self.parts
        table = model.vocab * model.hidden
        has_head = task in ("actor_training", "reference")
        last = p.last if has_head else np.zeros_like(p.last)
        ends = table * (p.first * 1.0) + table * (last & ~(p.first & model.tied)) + model.hidden * (last * 1.0)
        extra = 0 if has_head else model.hidden
        out: Array = p.layers * float(model.layer_params) + ends + extra
        return out

    def _state(self, task: Task) -> Array:
        """`task_state_bytes` of a task whose weights nobody else in the group holds."""
        if task not in self._states:
            ctx = self.ctx.of(task)
            model = ctx.model
            per_param = state_bytes_per_param(model) if task in TRAINING else float(model.dtype_bytes)
            states = self._params(task) / self.tp * per_param
            if ctx.trainer == "fsdp":
                states = states / self.dp + 2 * model.layer_params * model.dtype_bytes / self.tp
            self._states[task] = states
        return self._states[task]

    def _activation(self, task: Task) -> Array:
        """`activation_bytes_per_token` by part."""
        model = self.ctx.of(task).model
        whole = activation_bytes_per_token(model, 1)
        split = 2 * (whole - activation_bytes_per_token(model, 2))  # the part that TP divides
        out: Array = (whole - split) + split / self.tp
        return out

    def _limit(self, task: Task, step: int, recompute: bool) -> Array:
        """Bytes that models may hold on each device of a part while the task runs so; no limit where there is no part."""
        ctx, p, rounds = self.ctx.of(task), self.parts, self.rounds[step]
        model = ctx.model
        tokens = np.maximum(ctx.m.longest, ctx.batch_tokens / (rounds * self.dp))
        layer = self._activation(task) * tokens
        border = model.hidden * model.dtype_bytes * tokens
        logits = tokens * model.vocab * (model.dtype_bytes + 4) / self.tp * p.last
        if task not in TRAINING:
            needed = layer + border + (logits if task == "reference" else 0.0)
        else:
            flight = np.minimum(rounds, self.stages - p.index)
            kept = p.layers * border * flight + layer if recompute else p.layers * layer * flight
            needed = kept + (logits if task == "actor_training" else 0.0) + min(ctx.a.bucket_bytes, model.weight_bytes)
        room = self._column(
            [k.memory_bytes * ctx.a.train_memory_share - ctx.a.overhead(k.memory_bytes) for k in self._kinds()]
        )
        return np.where(p.count > 0, room - needed, np.inf)

    # Time.

    def _ways_of(self, task: Task) -> list["_Way"]:
        """Every way to run a task that some shape has room for."""
        if task not in self._ways:
            self._ways[task] = []
            for recompute in (False, True) if task in TRAINING else (False,):
                left = self.possible
                for step in range(len(self.rounds)):
                    limit = self._limit(task, step, recompute)
                    left = left & (self._state(task) <= limit).all(axis=0)
                    if not left.any():
                        break
                    time_s = np.full(self.size, np.inf)
                    time_s[left] = self.take(left)._timed(task, step, recompute)
                    more = self.rounds[step] > 1
                    self._ways[task].append(_Way(recompute=recompute, limit=limit, time_s=time_s, more=more))
                    left = left & more
        return self._ways[task]

    def take(self, at: Bools) -> "Batch":
        """Some of the shapes."""
        if at.all():
            return self
        out = copy.copy(self)
        out.first = None if self.first is None else self.first.take(at)
        out.second = self.second.take(at)
        out.parts = Parts(**{n: getattr(self.parts, n)[..., at] for n in Parts.__dataclass_fields__})
        out.possible, out.stages, out.crosses = self.possible[at], self.stages[at], self.crosses[at]
        out.dp, out.tp = self.dp[:, at], self.tp[:, at]
        out.rounds = [r[at] for r in self.rounds]
        out.size = len(out.stages)
        out._ways, out._states, out._groups, out._by_degree = {}, {}, {}, {}
        return out

    def _timed(self, task: Task, step: int, recompute: bool) -> Array:
        ctx, p, rounds = self.ctx.of(task), self.parts, self.rounds[step]
        model, trains = ctx.model, task in TRAINING
        layer_passes, head_passes = passes(ctx.workload, recompute, task)
        samples = ctx.workload.samples_per_step / rounds / self.dp
        tokens = samples * ctx.m.sequence
        kinds = self._kinds()
        rate = self._rate(ctx, tokens) * self.tp
        attend = samples * ctx.m.sequence2 * layer_flops(model, 0, 1) / self._attention_rate(ctx, rate, trains)
        hbm = self._column([hbm_rate(ctx, k) for k in kinds])
        layer_s = (
            layer_passes * (tokens * layer_flops(model, 1, 0) / rate + attend)
            + 2 * layer_passes * tokens * self._activation(task) / hbm
        )
        hidden = tokens * model.hidden * model.dtype_bytes
        over = layer_passes - (1 if trains else 0)
        layer_s = layer_s + 2 * over * self._ring(self._links("local"), hidden, self.tp, 2)
        busy = p.layers * layer_s + p.last * (head_passes * head_flops(model, 1) * tokens / rate)
        busy = busy * self._skew()
        busy = np.maximum(busy, layer_passes * p.layers * self._column([k.launch_s for k in kinds]))
        params = self._stage_params(task)
        size = params * model.dtype_bytes
        shards = self.tp * (self.dp if ctx.trainer == "fsdp" else 1)
        sync: Array = np.zeros(self.size)
        if ctx.trainer == "fsdp":
            busy = np.maximum(busy, (3 if trains else 1) * self._collective(size, 1))
        elif trains:
            sync = np.where(p.count > 0, self._collective(size, 2), 0.0).max(axis=0)
        update: Array = np.zeros(self.size)
        if trains:
            moved = 2 * params * state_bytes_per_param(model) / shards / hbm
            update = np.where(p.count > 0, moved, 0.0).max(axis=0)
        crossings = layer_passes - (1 if recompute and trains else 0) - (1 if trains else 0)
        borders = self._borders(ctx, rounds, crossings)
        waits = (p.waits * borders[:, None, :]).sum(axis=0)
        most = np.where(p.count > 0, busy + waits, 0.0).max(axis=0)
        whole = (busy * p.count).sum(axis=0) + (self._border_counts() * borders).sum(axis=0)
        out: Array = rounds * most + (whole - most) + sync + update
        if self.bridge is None or not self.crosses.any():
            return out
        cross = self._cross_s(ctx, rounds, crossings, self.bridge) - borders.max(axis=0)
        at_border = np.maximum(most, np.where(p.count > 0, busy + waits, np.inf).min(axis=0) + np.maximum(cross, 0.0))
        by_border = np.where(self.stages > 1, (rounds - 1) * (at_border - most) + np.maximum(cross, 0.0), np.inf)
        return out + np.where(
            self.crosses, np.minimum(by_border, self._spanned_s(size, most, rounds, sync, trains)), 0.0
        )

    def _cross_s(self, ctx: Context, rounds: Ints, crossings: int, link: Link) -> Array:
        size = ctx.batch_tokens / rounds * ctx.model.hidden * ctx.model.dtype_bytes
        return crossings * (link.latency_s + size / (link.bytes_per_s * ctx.a.link_efficiency))

    def _spanned_s(self, size: Array, most: Array, rounds: Ints, sync: Array, trains: bool) -> Array:
        """Seconds more, at least, where the DP ranks of one stage lie on both sides of the bridge; infinite without any."""
        assert self.bridge is not None
        may = (self.parts.count > 0) & (self.dp > 1)
        link = (np.array(self.bridge.latency_s), np.array(self.bridge.bytes_per_s))
        two = np.full_like(self.dp, 2)
        if self.ctx.trainer == "fsdp":
            gather = np.where(may, (3 if trains else 1) * self._ring(link, size, two, 1), np.inf).min(axis=0)
            lost: Array = rounds * np.maximum(0.0, gather - most)
            return lost
        if not trains:
            return np.where(may.any(axis=0), 0.0, np.inf)
        more: Array = np.maximum(0.0, np.where(may, self._ring(link, size, two, 2), np.inf).min(axis=0) - sync)
        return more

    def _stage_params(self, task: Task) -> Array:
        """Parameters a step moves: `stage_params`, where only a critic in training has no projection."""
        model, p = self.ctx.of(task).model, self.parts
        table = float(model.vocab * model.hidden)
        last = p.last & (task != "critic_training")
        ends = table * p.first + table * (last & ~(p.first & model.tied)) + model.hidden * (last * 1.0)
        out: Array = p.layers * float(model.layer_params) + ends
        return out

    def _skew(self) -> Array:
        first = self.second.skew if self.first is None else self.first.skew
        return np.stack([first] * 4 + [self.second.skew] * 4)

    def _rate(self, ctx: Context, tokens: Array) -> Array:
        """`train_rate`."""
        out = np.empty(tokens.shape)
        for row, kind in enumerate(self._kinds()):
            if ctx.rates.curves(kind) is not None:
                if row % 4 == 0:  # the parts of a block have its kind and TP
                    for tp, at in self._degrees(row):
                        rate = ctx.rates.product_rate(kind, ctx.model, tp, tokens[row : row + 4, at])
                        out[row : row + 4, at] = ctx.a.train_products * rate * kind.train_efficiency
                continue
            if kind.paced:
                out[row] = kind.peak_flops * kind.train_efficiency
                continue
            width = np.minimum(ctx.model.hidden, ctx.model.intermediate / self.tp[row])
            rows = np.maximum(tokens[row], 1.0)
            curve = rows / (rows + ctx.a.gemm_half_tokens) * width / (width + ctx.a.gemm_half_width)
            out[row] = kind.peak_flops * ctx.a.gemm_ceiling * curve * kind.train_efficiency
        return out

    def _attention_rate(self, ctx: Context, rate: Array, trains: bool) -> Array:
        """`train_attention_rate` of the TP groups, `rate` (theirs for products) where there is none."""
        out = rate.copy()
        for row, kind in enumerate(self._kinds()):
            if row % 4 == 0 and ctx.rates.curves(kind) is not None:
                for tp, at in self._degrees(row):
                    found = train_attention_rate(ctx, kind, tp, backward=trains)
                    assert found is not None, "the kind has curves"
                    out[row : row + 4, at] = found * tp
        return out

    def _degrees(self, row: int) -> list[tuple[int, Ints]]:
        """(TP, shapes that have it) of the block that `row` is a part of."""
        if row not in self._by_degree:
            of = self.tp[row]
            self._by_degree[row] = [(tp, np.flatnonzero(of == tp)) for tp in sorted(set(of.tolist()))]
        return self._by_degree[row]

    def _links(self, name: str) -> tuple[Array, Array]:
        """(latency, bytes/s) of a link of each part's block; no link costs nothing."""
        rows: list[tuple[float, float]] = []
        for block in (self.second if self.first is None else self.first, self.second):
            link: Link | None = getattr(block, name)
            rows += [(0.0, np.inf) if link is None else (link.latency_s, link.bytes_per_s)] * 4
        return self._column([r[0] for r in rows]), self._column([r[1] for r in rows])

    def _ring(self, link: tuple[Array, Array], size: Array, ranks: Ints, times: int) -> Array:
        """`ring_s`; nothing for a single rank."""
        latency, rate = link
        return times * (ranks - 1) * latency + times * size * (ranks - 1) / ranks / (rate * self.ctx.a.link_efficiency)

    def _collective(self, size: Array, times: int) -> Array:
        """`spread_collective_s` over the DP ranks of a stage."""
        first = self.second.nodes if self.first is None else self.first.nodes
        nodes = np.stack([first] * 4 + [self.second.nodes] * 4)
        inside = self._ring(self._links("local"), size / self.tp, -(-self.dp // nodes), times)
        across = np.where(nodes > 1, self._ring(self._links("remote"), size, nodes, times), 0.0)
        return np.where(self.dp > 1, inside + across, 0.0)

    def _borders(self, ctx: Context, rounds: Ints, crossings: int) -> Array:
        """Seconds a micro-batch takes over a border: in the first block, between the blocks, in the second."""
        links = (None if self.first is None else self.first.inner, self.link, self.second.inner)
        return np.stack(
            [np.zeros(self.size) if link is None else self._cross_s(ctx, rounds, crossings, link) for link in links]
        )

    def _border_counts(self) -> Array:
        na = np.zeros(self.size) if self.first is None else self.first.pp
        return np.stack([np.maximum(na - 1, 0), (na > 0) * 1.0, self.second.pp - 1]).astype(float)
