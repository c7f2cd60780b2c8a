"""The formulas of `planner.cost.training` over many shapes at once (`planner.cost.parts`): arrays have one row a part and one
column a shape. Tests hold every figure equal to the plain formulas.
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import numpy as np

from planner.cluster import DeviceKind, Link
from planner.cost.batch_rates import attention_seconds, train_rates
from planner.cost.context import Context
from planner.cost.flops import hbm_rate, head_flops, layer_flops
from planner.cost.memory import activation_bytes_per_token, logits_bytes, state_bytes_per_param
from planner.cost.micro_batches import Chain, Way, chain_of
from planner.cost.parts import BLOCKS, PARTS, Array, Block, Bools, Hop, Ints, divided, extent, front, parts_of
from planner.cost.training import micro_sequences, passes
from planner.plan import Task
from planner.record import record
from planner.workflow import TRAINING

T = TypeVar("T")


@record
class _Step:
    """One micro-batch size: what does not depend on a task. By part and shape, but for `rounds`."""

    rounds: Ints
    tokens: Array  # of a micro-batch, by DP rank
    held: Array  # the same for memory: the longest sequence may come alone
    flight: Ints  # micro-batches under way at a stage


@record
class _Speed:
    """What a micro-batch of one size takes of one model's shape."""

    per_flop: Array  # seconds of one FLOP a token, by part
    waits: Array  # of one crossing at each border that a part touches
    borders: Array  # the sum over all borders, by shape
    most: Array  # the slowest border, by shape
    hop: Array  # over the link by which a shape leaves a machine, by shape


@record
class _Work:
    """What one task asks of every part, whatever the micro-batch; seconds are of the fullest DP rank."""

    flops: Array  # a token
    moved_s: Array  # a token: memory, TP all-reduces, and attention where it has a speed of its own
    latency_s: Array  # a micro-batch
    floor_s: Array  # a micro-batch: launches and FSDP's gathers
    crossings: int


class Batch:
    """Times of groups of tasks on many shapes; every model has the same number of layers.

    What does not fit is not timed where it comes last: shapes with most room on their devices belong to the front.
    """

    def __init__(
        self,
        ctx: Context,
        first: Block | None,
        second: Block,
        link: Link | None,
        head_layers: float,
        *,
        hop: Hop | None = None,
        hosts: bool = False,
    ) -> None:
        """`hop`: of shapes that no machine holds one stage or border lies over a link no better than that; what they take is
        then a lower bound. `hosts`: `memory` will be asked."""
        self.ctx, self.hop, self.hosts = ctx, hop, hosts
        self.first, self.second, self.link = first, second, link
        self.size = len(second.pp)
        split = divided(first, second, ctx.model.layers, head_layers)
        self.possible = split[4] > 0
        self.parts = parts_of(first, second, split)
        self.stages = second.pp + (0 if first is None else first.pp)
        self.dp = self._by_part("dp")
        self.tp = self._by_part("tp")
        dp_first = second.dp if first is None else np.maximum(first.dp, second.dp)
        self.kinds = self._kinds()
        samples = ctx.workload.samples_per_step
        self.steps: list[_Step] = []
        for sequences in micro_sequences(ctx):
            self.steps.append(self._step(np.maximum(1, -(-samples // (sequences * dp_first)))))
            if (self.steps[-1].rounds == 1).all():
                break
        self._kept: dict[
            tuple[str, Hashable], tuple[int, object]
        ] = {}  # of so many shapes, for all batches of their front
        self._chains: dict[Task, list[Chain]] = {}
        self._groups: dict[frozenset[Task], tuple[Array, Array]] = {}
        self._memory: dict[tuple[Task, ...], tuple[Array, Array]] = {}
        self._made: dict[frozenset[Task], tuple[Task, ...]] = {}

    def _step(self, rounds: Ints) -> _Step:
        samples = self.ctx.workload.samples_per_step / rounds / self.dp
        return _Step(
            rounds=rounds,
            tokens=samples * self.ctx.m.sequence,
            held=np.maximum(self.ctx.m.longest, self.ctx.batch_tokens / (rounds * self.dp)),
            flight=np.minimum(rounds, self.stages - self.parts.index),
        )

    def _front(self, size: int) -> "Batch":
        """The batch of the first `size` shapes alone."""
        if size == self.size:
            return self
        found = copy.copy(self)
        found.size = size
        for name in ("first", "second", "hop", "possible", "parts", "stages", "dp", "tp", "steps"):
            setattr(found, name, front(getattr(self, name), size))
        return found

    def _once_made(self, name: str, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives for the shapes here, made once for them and all that come before."""
        size, value = self._kept.get((name, key), (0, None))
        if size < self.size:
            self._kept[name, key] = self.size, (made := make())
            return made
        return front(value, self.size)  # type: ignore[return-value]

    def group_s(self, tasks: tuple[Task, ...]) -> tuple[Array, Array]:
        """(seconds of scoring, of training) of a group on every shape; infinite where it does not fit."""
        key = frozenset(self._like(t, tasks) for t in tasks)
        if len(key) < len(tasks):  # two tasks that cost the same, in one group
            return self._group_s(tasks)
        if key not in self._groups:
            self._groups[key], self._made[key] = self._group_s(tasks), tasks
        elif self.hosts:
            self._memory[tasks] = self._memory[self._made[key]]
        return self._groups[key]

    def memory(self, tasks: tuple[Task, ...]) -> tuple[Array, Array]:
        """Of a group that `group_s` was asked about, by block (an absent first one has all the room): bytes that something
        else may hold on every device without slowing the group, and bytes that its models hold on the mean device."""
        return self._memory[tasks]

    def _like(self, task: Task, beside: Sequence[Task]) -> Task:
        """A task that costs the same: values of a critic that is not trained here are a forward pass as rewards are."""
        alike = self.ctx.of("reward").model == self.ctx.of("critic_values").model
        return "reward" if task == "critic_values" and alike and "critic_training" not in beside else task

    def _group_s(self, tasks: tuple[Task, ...]) -> tuple[Array, Array]:
        score, train = np.zeros(self.size), np.zeros(self.size)
        resident = np.zeros((PARTS, self.size))
        for t in tasks:
            if not (t == "critic_values" and "critic_training" in tasks):
                resident += self._state(self._like(t, tasks))
        room = np.full((2, self.size), np.inf)
        for t in tasks:
            # What is trained beside it changes what critic_values holds, not what it takes.
            best, beside = self._best(self._like(t, ()), resident)
            np.minimum(room, beside, out=room)
            (train if t in TRAINING else score).__iadd__(best)
        if self.hosts:
            self._memory[tasks] = room, self._mean_by_block(resident)
        return score, train

    def _best(self, task: Task, resident: Array) -> tuple[Array, Array]:
        """Seconds of the fastest way to run a task beside models that hold `resident` bytes by part, and by block what that
        way leaves; infinite where none fits."""
        best, beside = np.full(self.size, np.inf), np.full((2, self.size), -np.inf)
        for chain in self._chains_of(task):
            size = len(chain.time_s)
            time_s, room = chain.fastest(resident[:, :size], room=self.hosts)
            better = time_s < best[:size]
            np.copyto(best[:size], time_s, where=better)
            if room is not None:
                np.copyto(beside[:, :size], room, where=better)
        return best, beside

    def _mean_by_block(self, figures: Array) -> Array:
        """The mean over the stages of either block of figures by part; 0 for an absent block."""
        count = self.parts.count
        total = [(figures[at] * count[at]).sum(axis=0) for at in BLOCKS]
        stages = [np.maximum(count[at].sum(axis=0), 1) for at in BLOCKS]
        return np.stack([t / n for t, n in zip(total, stages, strict=True)])

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

        def make() -> Array:
            ctx = self.ctx.of(task)
            model = ctx.model
            per_param = state_bytes_per_param(model) if task in TRAINING else float(model.dtype_bytes)
            states = self._params(task) / self.tp * per_param
            if ctx.trainer == "fsdp":
                states = states / self.dp + 2 * model.layer_params * model.dtype_bytes / self.tp
            return states

        return self._once_made("states", task, make)

    def _activation(self, task: Task) -> Array:
        """`activation_bytes_per_token` by part."""
        model = self.ctx.of(task).model

        def make() -> Array:
            whole = activation_bytes_per_token(model, 1)
            split = 2 * (whole - activation_bytes_per_token(model, 2))  # the part that TP divides
            out: Array = (whole - split) + split / self.tp
            return out

        return self._once_made("activation", model, make)

    def _limit(self, task: Task, step: _Step, recompute: bool) -> Array:
        """Bytes that models may hold on each device of a part while the task runs so; no limit where there is no part."""
        ctx, p = self.ctx.of(task), self.parts
        model = ctx.model

        def of_token() -> tuple[Array, Array, Array]:
            """(bytes that are kept for each micro-batch under way, besides, logits: of a packing trainer in whole)"""
            layer, border = self._activation(task), model.hidden * model.dtype_bytes
            logits = p.last / self.tp * logits_bytes(ctx, 1.0, 1) * (task in ("reference", "actor_training"))
            if task not in TRAINING:
                return np.zeros(1), layer + border, logits
            kept: Array = p.layers * (border * 1.0 if recompute else layer)
            return kept, layer if recompute else 0.0 * layer, logits

        kept, besides, logits = self._once_made("token", (task, recompute), of_token)
        needed = step.held * (kept * step.flight + besides) + (step.held if ctx.row_tokens is None else 1.0) * logits
        if task in TRAINING:
            needed = needed + min(ctx.a.bucket_bytes, model.weight_bytes)
        room = self._column(
            [k.memory_bytes * ctx.a.train_memory_share - ctx.a.overhead(k.memory_bytes) for k in self.kinds]
        )
        return np.where(p.count > 0, room - needed, np.inf)

    # Time.

    def _chains_of(self, task: Task) -> list[Chain]:
        """Every way to run a task that some shape has room for, without and with recomputation."""
        if task not in self._chains:
            again = (False, True) if task in TRAINING else (False,)
            found = (self._chain(task, recompute) for recompute in again)
            self._chains[task] = [c for c in found if c is not None]
        return self._chains[task]

    def _chain(self, task: Task, recompute: bool) -> Chain | None:
        here, left, limit = self, self.possible, np.full((PARTS, self.size), np.inf)
        ways: list[tuple[Way, Bools]] = []
        for i in range(len(self.steps)):
            # A way is tried only where all smaller micro-batches fit, and those may need more: no micro-batch is shorter
            # than the longest sequence, and more of them are in flight.
            limit = np.minimum(limit, here._limit(task, here.steps[i], recompute))
            left = left & (here._state(task) <= limit).all(axis=0)
            if not (size := extent(left)):
                break
            here, left, limit = here._front(size), left[:size], limit[:, :size]
            way = Way(limit=limit, time_s=here._timed(task, i, recompute), more=here.steps[i].rounds > 1)
            ways.append((way, left))
            left = left & way.more
            if not (size := extent(left)):
                break
            here, left, limit = here._front(size), left[:size], limit[:, :size]
        return chain_of(ways) if ways else None

    def _speed(self, ctx: Context, at: int) -> _Speed:
        def make() -> _Speed:
            step = self.steps[at]
            links = (None if self.first is None else self.first.inner, self.link, self.second.inner)
            crosses = [self._cross_s(ctx, step.rounds, x) if x is not None else np.zeros(self.size) for x in links]
            borders = np.stack(crosses)
            return _Speed(
                per_flop=step.tokens / (train_rates(ctx, self.kinds, self.tp, step.tokens) * self.tp),
                waits=self._waits(borders),
                borders=(self._border_counts() * borders).sum(axis=0),
                most=borders.max(axis=0),
                hop=np.zeros(0) if self.hop is None else self._cross_s(ctx, step.rounds, self.hop),
            )

        return self._once_made("speed", (ctx.model, at), make)

    def _waits(self, borders: Array) -> Array:
        """The sum over the borders that each part touches; the first block has none of the second's, nor that any of its."""
        out: Array = self.parts.waits[1] * borders[1]
        out[:4] += self.parts.waits[0, :4] * borders[0]
        out[4:] += self.parts.waits[2, 4:] * borders[2]
        return out

    def _work(self, task: Task, recompute: bool) -> _Work:
        def make() -> _Work:
            ctx, p = self.ctx.of(task), self.parts
            model, trains = ctx.model, task in TRAINING
            layer_passes, head_passes = passes(ctx.workload, recompute, task)
            attend, attend_s = (
                layer_flops(model, 0, ctx.m.sequence2 / ctx.m.sequence),
                attention_seconds(ctx, self.kinds, self.tp, backward=trains),
            )
            per_layer = layer_flops(model, 1, 0) + np.where(attend_s == 0, attend, 0.0)
            flops = layer_passes * p.layers * per_layer + p.last * (head_passes * head_flops(model, ctx.head_share))
            hbm = self._column([hbm_rate(ctx, k) for k in self.kinds])
            local = self._links("local")
            over = layer_passes - (1 if trains else 0)
            hidden = np.full(self.tp.shape, float(model.hidden * model.dtype_bytes))
            latency = 2 * over * self._ring(local, hidden * 0, self.tp, 2)
            moved = layer_passes * (attend * attend_s + 2 * self._activation(task) / hbm)
            moved = moved + 2 * over * self._ring((local[0] * 0, local[1]), hidden, self.tp, 2)
            floor = layer_passes * p.layers * self._column([k.launch_s for k in self.kinds])
            if ctx.trainer == "fsdp":
                size = self._stage_params(task) * model.dtype_bytes
                floor = np.maximum(floor, (3 if trains else 1) * self._collective(size, 1))
            skew = self._skew()
            launched = p.layers * self._column([k.train_floor_s * trains for k in self.kinds])
            return _Work(
                flops=flops * skew,
                moved_s=p.layers * moved * skew,
                latency_s=p.layers * latency * skew + launched,
                floor_s=floor,
                crossings=layer_passes - (1 if recompute and trains else 0) - (1 if trains else 0),
            )

        return self._once_made("work", (task, recompute), make)

    def _once(self, task: Task) -> tuple[Array, Array]:
        """(seconds of gradients over the network, of the optimiser) once a step."""
        none = np.zeros(self.size)
        if task not in TRAINING:
            return none, none

        def make() -> tuple[Array, Array]:
            ctx, p = self.ctx.of(task), self.parts
            params, fsdp = self._stage_params(task), ctx.trainer == "fsdp"
            sync = none
            if not fsdp:
                sync = np.where(p.count > 0, self._collective(params * ctx.model.dtype_bytes, 2), 0.0).max(axis=0)
            hbm = self._column([hbm_rate(ctx, k) for k in self.kinds])
            moved = 2 * params * state_bytes_per_param(ctx.model) / (self.tp * (self.dp if fsdp else 1)) / hbm
            moved = moved + self._column([k.train_fixed_s for k in self.kinds])
            return sync, np.where(p.count > 0, moved, 0.0).max(axis=0)

        return self._once_made("once", task, make)

    def _timed(self, task: Task, at: int, recompute: bool) -> Array:
        """Seconds of a task on every shape with one micro-batch size."""
        ctx, p, step = self.ctx.of(task), self.parts, self.steps[at]
        speed, work = self._speed(ctx, at), self._work(task, recompute)
        sync, update = self._once(task)
        busy = work.flops * speed.per_flop + work.moved_s * step.tokens + work.latency_s
        busy = np.maximum(busy, work.floor_s)
        there = p.count > 0
        waiting = busy + work.crossings * speed.waits
        most = np.where(there, waiting, 0.0).max(axis=0)
        whole = (busy * p.count).sum(axis=0) + work.crossings * speed.borders
        out: Array = step.rounds * most + (whole - most) + sync + update
        if self.hop is None or not self.hop.leaves.any():
            return out
        cross = np.maximum(0.0, work.crossings * (speed.hop - speed.most))
        # A border has two stages: the slower of them is no faster than the second fastest of all.
        several = self.stages > 1
        second = np.where(several, _second(np.where(there, waiting, np.inf), p.count), 0.0)
        by_border = (step.rounds - 1) * (np.maximum(most, second + cross) - most) + cross
        by_border = np.where(several, by_border, np.inf)
        spanned = self._spanned_s(task, most, step.rounds, sync)
        return out + np.where(self.hop.leaves, np.minimum(by_border, spanned), 0.0)

    def _cross_s(self, ctx: Context, rounds: Ints, link: Link | Hop) -> Array:
        """Seconds of a micro-batch's activations over a link, once."""
        size = ctx.batch_tokens / rounds * ctx.model.hidden * ctx.model.dtype_bytes
        seconds: Array = link.latency_s + size / (link.bytes_per_s * ctx.a.link_efficiency)
        return seconds

    def _spanned_s(self, task: Task, most: Array, rounds: Ints, sync: Array) -> Array:
        """Seconds more, at least, where the DP ranks of one stage lie at both ends of the hop; infinite without any."""
        ring = self._span_s(task)
        if self.ctx.trainer == "fsdp":
            more: Array = np.maximum(0.0, ring - most)
            return rounds * more
        return np.maximum(0.0, ring - sync) if task in TRAINING else ring

    def _span_s(self, task: Task) -> Array:
        """Seconds that two ranks of one stage take over the hop, whatever the micro-batch: for the gathers of a micro-batch with
        FSDP, else for gradients; of the stage with least, infinite without any."""

        def make() -> Array:
            assert self.hop is not None
            may, trains = (self.parts.count > 0) & (self.dp > 1), task in TRAINING
            fsdp = self.ctx.trainer == "fsdp"
            if not (trains or fsdp):
                return np.where(may.any(axis=0), 0.0, np.inf)
            link = (self.hop.latency_s, self.hop.bytes_per_s)
            two: Ints = np.full_like(self.dp, 2)
            size = self._stage_params(task) * self.ctx.of(task).model.dtype_bytes
            ring: Array = self._ring(link, size, two, 1 if fsdp else 2) * (3 if fsdp and trains else 1)
            found: Array = np.where(may, ring, np.inf).min(axis=0)
            return found

        return self._once_made("span", task, make)

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

    def _border_counts(self) -> Array:
        na = np.zeros(self.size) if self.first is None else self.first.pp
        return np.stack([np.maximum(na - 1, 0), (na > 0) * 1.0, self.second.pp - 1]).astype(float)


def _second(waiting: Array, count: Array) -> Array:
    """By shape: the second lowest figure over its stages, of which part i has `count[i]` alike."""
    columns = np.arange(waiting.shape[1])
    lowest = waiting.argmin(axis=0)
    least = waiting[lowest, columns]
    others = waiting.copy()
    others[lowest, columns] = np.inf
    out: Array = np.where(count[lowest, columns] > 1, least, others.min(axis=0))
    return out
