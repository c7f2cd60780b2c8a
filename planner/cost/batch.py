"""The formulas of `planner.cost.training` over many shapes at once (`planner.cost.parts`): axes of arrays are block, part and
shape. Tests hold every figure equal to the plain formulas.

Tasks that run one model differ in the last stage alone, where only the actor's shape has a vocabulary projection: all other
parts are costed once for them.
"""

from collections.abc import Sequence

import numpy as np

from planner.cluster import Link
from planner.cost.batch_rates import Alike, attention_seconds, train_rates
from planner.cost.context import Context
from planner.cost.flops import hbm_rate, head_flops, layer_flops
from planner.cost.memory import activation_bytes_per_token, logits_bytes, state_bytes_per_param
from planner.cost.micro_batches import Chain, Way, chain_of
from planner.cost.parts import PARTS, Array, Block, Bools, Hop, Ints, extent
from planner.cost.shapes import Shapes, Step
from planner.cost.training import attention_passes, passes
from planner.plan import Task
from planner.record import record
from planner.workflow import TRAINING

_LAST = (-1, -1)  # block and part of the last stage


@record
class _Speed:
    """What a micro-batch of one size takes of one model's shape."""

    per_flop: Array  # seconds of one FLOP a token, by block
    waits: Array  # of one crossing at each border that a part touches
    borders: Array  # the sum over all borders, by shape
    most: Array  # the slowest border, by shape
    hop: Array  # over the link by which a shape leaves a machine, by shape
    crosses: bool  # whether that is slower than the slowest border of some shape that leaves


@record
class _Work:
    """What one task asks of parts, whatever the micro-batch; seconds are of the fullest DP rank."""

    flops: Array  # a token
    moved_s: Array  # a token: memory, TP all-reduces, and attention where it has a speed of its own
    latency_s: Array  # a micro-batch
    floor_s: Array  # a micro-batch: launches and FSDP's gathers
    crossings: int

    def busy_s(self, per_flop: Array, tokens: Array) -> Array:
        """Seconds of a micro-batch."""
        busy = self.flops * per_flop
        busy += self.moved_s * tokens
        busy += self.latency_s
        return np.maximum(busy, self.floor_s, out=busy)


@record
class _Rest:
    """What all stages but the last take of a micro-batch, by shape."""

    most: Array  # the slowest with its borders
    whole: Array  # the sum without
    lowest: Array  # the two fastest with their borders, infinite where there are fewer; where something crosses


class Batch(Shapes):
    """Times of groups of tasks on many shapes.

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
        super().__init__(ctx, first, second, link, head_layers, hop=hop)
        self.hosts = hosts
        self._chains: dict[Task, list[Chain]] = {}
        self._groups: dict[frozenset[Task], tuple[Array, Array]] = {}
        self._memory: dict[tuple[Task, ...], tuple[Array, Array]] = {}
        self._made: dict[frozenset[Task], tuple[Task, ...]] = {}

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
        resident = np.zeros((*PARTS, self.size))
        for t in tasks:
            if not (t == "critic_values" and "critic_training" in tasks):
                resident += self._state(self._like(t, tasks))
        room = np.full((2, self.size), np.inf)
        known: dict[Task, tuple[Array, Array]] = {}
        for t in tasks:
            # What is trained beside it changes what critic_values holds, not what it takes.
            like = self._like(t, ())
            if like not in known:
                known[like] = self._best(like, resident)
            best, beside = known[like]
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
            time_s, room = chain.fastest(resident, room=self.hosts)
            better = np.flatnonzero(time_s < best[: len(time_s)])
            best[better] = time_s[better]
            if room is not None:
                beside[:, better] = room.take(better, axis=1)
        return best, beside

    def _mean_by_block(self, figures: Array) -> Array:
        """The mean over the stages of either block of figures by part; 0 for an absent block."""
        count = self.parts.count
        found: Array = (figures * count).sum(axis=1) / np.maximum(count.sum(axis=1), 1)
        return found

    # Memory.

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

    def _limit(self, task: Task, at: int, recompute: bool) -> Array:
        """Bytes that models may hold on each device of a part while the task runs so; no limit where there is no part."""
        ctx, p, step = self.ctx.of(task), self.parts, self.steps[at]
        model, trains = ctx.model, task in TRAINING
        bucket = min(ctx.a.bucket_bytes, model.weight_bytes)
        memory = [ctx.kind(b.kind).memory_bytes for b in self.blocks]
        room = self._column([m * ctx.a.train_memory_share - ctx.a.overhead(m) for m in memory])

        def of_token() -> tuple[Array, Array]:
            """(bytes that are kept for each micro-batch under way, besides)"""
            layer, border = self._activation(task), model.hidden * model.dtype_bytes
            if not trains:
                return np.zeros((*PARTS, self.size)), layer + border
            kept: Array = p.layers * (border * 1.0 if recompute else layer)
            return kept, layer if recompute else 0.0 * layer

        def without_logits() -> Array:
            kept, besides = self._once_made("token", (model, trains, recompute), of_token)
            needed = besides
            if trains:
                needed = kept * np.minimum(step.rounds, p.behind)
                needed += besides
            needed = step.held * needed
            return room - (needed + bucket if trains else needed) + p.absent

        limit = self._once_made("limit", (model, trains, recompute, at), without_logits)
        if task not in ("reference", "actor_training"):
            return limit
        kept, besides = (x[_LAST] for x in self._once_made("token", (model, trains, recompute), of_token))
        logits = 1.0 / self.tp[_LAST] * logits_bytes(ctx, 1.0, 1)
        held = step.held[_LAST]
        needed = held * (kept * np.minimum(step.rounds, p.behind[_LAST]) + besides)
        needed = needed + (held if ctx.row_tokens is None else 1.0) * logits
        limit = limit.copy()
        limit[_LAST] = room[_LAST] - (needed + bucket if trains else needed)
        return limit

    # Time.

    def _chains_of(self, task: Task) -> list[Chain]:
        """Every way to run a task that some shape has room for, without and with recomputation."""
        if task not in self._chains:
            again = (False, True) if task in TRAINING else (False,)
            found = (self._chain(task, recompute) for recompute in again)
            self._chains[task] = [c for c in found if c is not None]
        return self._chains[task]

    def _chain(self, task: Task, recompute: bool) -> Chain | None:
        here, left, limit = self, self.possible, np.full((*PARTS, self.size), np.inf)
        ways: list[tuple[Way, Bools]] = []
        for i in range(len(self.steps)):
            # A way is tried only where all smaller micro-batches fit, and those may need more: no micro-batch is shorter
            # than the longest sequence, and more of them are in flight.
            limit = np.minimum(limit, here._limit(task, i, recompute))
            left = left & np.logical_and.reduce(here._state(task) <= limit, axis=(0, 1))
            if not (size := extent(left)):
                break
            here, left, limit = here._front(size), left[:size], limit[..., :size]
            way = Way(limit=limit, time_s=here._timed(task, i, recompute), more=here.steps[i].rounds > 1)
            ways.append((way, left))
            left = left & way.more
            if not (size := extent(left)):
                break
            here, left, limit = here._front(size), left[:size], limit[..., :size]
        return chain_of(ways) if ways else None

    def _speed(self, ctx: Context, at: int) -> _Speed:
        def make() -> _Speed:
            step = self.steps[at]
            links = (None if self.first is None else self.first.inner, self.link, self.second.inner)
            crosses = [self._cross_s(ctx, step.rounds, x) if x is not None else np.zeros(self.size) for x in links]
            borders = np.stack(crosses)
            most = borders.max(axis=0)
            hop = np.zeros(0) if self.hop is None else self._cross_s(ctx, step.rounds, self.hop)
            waits = self.parts.between * borders[1]
            waits += self.parts.inside * borders[::2, None]
            return _Speed(
                per_flop=self._of_blocks([self._per_flop(ctx, step, x) for x in self.alike]),
                waits=waits,
                borders=(self._border_counts() * borders).sum(axis=0),
                most=most,
                hop=hop,
                crosses=self.hop is not None and bool((self.hop.leaves & (hop > most)).any()),
            )

        return self._once_made("speed", (ctx.model, at), make)

    def _per_flop(self, ctx: Context, step: Step, blocks: Alike) -> Array:
        tokens = self._tokens(self._rounds(step.sequences, blocks.widest), blocks.dp)
        found: Array = tokens / (train_rates(ctx, blocks, tokens) * blocks.tp)
        return found

    def _work(self, task: Task, recompute: bool) -> _Work:
        """Of the last stage as if it had no projection."""

        def make() -> _Work:
            ctx, p = self.ctx.of(task), self.parts
            trains = task in TRAINING
            layer_passes, _ = passes(ctx.workload, recompute, task)
            attend, attend_s, per_layer = self._per_layer(task)
            hbm = self._column([hbm_rate(ctx, k) for k in self.kinds])
            local = self._links("local")
            over = layer_passes - (1 if trains else 0)
            hidden = np.full(self.tp.shape, float(ctx.model.hidden * ctx.model.dtype_bytes))
            latency = 2 * over * self._ring(local, hidden * 0, self.tp, 2)
            moved = attention_passes(ctx, recompute, task) * attend * attend_s
            moved = moved + layer_passes * 2 * self._activation(task) / hbm
            moved = moved + 2 * over * self._ring((local[0] * 0, local[1]), hidden, self.tp, 2)
            skew = self._by_block("skew")
            launched = p.layers * self._column([k.train_floor_s * trains for k in self.kinds])
            return _Work(
                flops=layer_passes * p.layers * per_layer * skew,
                moved_s=p.layers * moved * skew,
                latency_s=p.layers * latency * skew + launched,
                floor_s=self._floor_s(task, layer_passes),
                crossings=layer_passes - (1 if recompute and trains else 0) - (1 if trains else 0),
            )

        return self._once_made("work", (task, recompute), make)

    def _per_layer(self, task: Task) -> tuple[float, Array, Array]:
        """(FLOPs of a forward pass of attention a token and layer, seconds of one of them, FLOPs that run as products do), by
        block."""
        ctx = self.ctx.of(task)

        def make() -> tuple[Array, Array]:
            attend_s = self._of_blocks([attention_seconds(ctx, x) for x in self.alike])
            return attend_s, layer_flops(ctx.model, 1, 0) + attend * (attend_s == 0)

        attend = layer_flops(ctx.model, 0, ctx.m.sequence2 / ctx.m.sequence)
        return attend, *self._once_made("layer", ctx.model, make)

    def _floor_s(self, task: Task, layer_passes: int) -> Array:
        ctx, p = self.ctx.of(task), self.parts
        floor: Array = layer_passes * p.layers * self._column([k.launch_s for k in self.kinds])
        if ctx.trainer == "fsdp":
            size = self._stage_params(task) * ctx.model.dtype_bytes
            gathers = (3 if task in TRAINING else 1) * self._collective(size, 1)
            floor = np.maximum(floor, gathers * (p.count > 0))
        return floor

    def _bare(self, task: Task) -> Task:
        """A task that takes as long on all stages but the last."""
        ctx = self.ctx.of(task)
        bare: Task = "critic_training" if task in TRAINING else "reward"
        alike = (
            self.ctx.of(bare).model == ctx.model
            and passes(ctx.workload, False, bare)[0] == passes(ctx.workload, False, task)[0]
        )
        return bare if alike else task

    def _last(self, task: Task, recompute: bool) -> _Work:
        """The work of the last stage."""

        def make() -> _Work:
            ctx = self.ctx.of(task)
            work = self._work(self._bare(task), recompute)
            layer_passes, head_passes = passes(ctx.workload, recompute, task)
            flops = layer_passes * self.parts.layers[_LAST] * self._per_layer(task)[2][_LAST]
            if head_passes:
                flops = flops + head_passes * head_flops(ctx.model, ctx.head_share)
            floor = work.floor_s
            if ctx.trainer == "fsdp":
                floor = self._floor_s(task, layer_passes)
            return _Work(
                flops=flops * self.second.skew,
                moved_s=work.moved_s[_LAST],
                latency_s=work.latency_s[_LAST],
                floor_s=floor[_LAST],
                crossings=work.crossings,
            )

        return self._once_made("last", (task, recompute), make)

    def _once(self, task: Task) -> tuple[Array, Array]:
        """(seconds of gradients over the network, of the optimiser) once a step."""
        none = np.zeros(self.size)
        if task not in TRAINING:
            return none, none

        def make() -> tuple[Array, Array]:
            ctx, p = self.ctx.of(task), self.parts
            params, fsdp = self._stage_params(task), ctx.trainer == "fsdp"
            sync = none
            there = p.count > 0
            if not fsdp:
                sync = (self._collective(params * ctx.model.dtype_bytes, 2) * there).max(axis=(0, 1))
            hbm = self._column([hbm_rate(ctx, k) for k in self.kinds])
            moved = 2 * params * state_bytes_per_param(ctx.model) / (self.tp * (self.dp if fsdp else 1)) / hbm
            moved = moved + self._column([k.train_fixed_s for k in self.kinds])
            return sync, (moved * there).max(axis=(0, 1))

        return self._once_made("once", task, make)

    def _timed(self, task: Task, at: int, recompute: bool) -> Array:
        """Seconds of a task on every shape with one micro-batch size."""
        ctx, step = self.ctx.of(task), self.steps[at]
        speed, work = self._speed(ctx, at), self._last(task, recompute)
        rest = self._rest(self._bare(task), at, recompute)
        sync, update = self._once(task)
        busy = work.busy_s(speed.per_flop[_LAST], step.tokens[_LAST])
        waiting = busy + work.crossings * speed.waits[_LAST]
        most = np.maximum(rest.most, waiting)
        whole = rest.whole + busy + work.crossings * speed.borders
        out: Array = step.rounds * most + (whole - most) + sync + update
        if self.hop is None:
            return out
        cross = work.crossings * (speed.hop - speed.most)
        several = self.stages > 1
        # Of several stages, where no border is slower than the slowest anyway there is nothing to add.
        rows = np.flatnonzero(self.hop.leaves & ((cross > 0) | ~several))
        if len(rows):
            cross, several, most = np.maximum(0.0, cross[rows]), several[rows], most[rows]
            more = np.full(len(rows), np.inf)
            if rest.lowest.shape[1]:
                # A border has two stages: the slower of them is no faster than the second fastest of all.
                first, second = rest.lowest[:, rows]
                second = np.where(several, np.minimum(second, np.maximum(first, waiting[rows])), 0.0)
                slower = (step.rounds[rows] - 1) * (np.maximum(most, second + cross) - most) + cross
                more = np.where(several, slower, np.inf)
            out[rows] += np.minimum(more, self._spanned_s(task, most, step.rounds[rows], sync[rows], rows))
        return out

    def _rest(self, task: Task, at: int, recompute: bool) -> _Rest:
        def make() -> _Rest:
            speed, work = self._speed(self.ctx.of(task), at), self._work(task, recompute)
            busy = work.busy_s(speed.per_flop, self.steps[at].tokens)
            waiting = work.crossings * speed.waits
            waiting += busy
            return _Rest(
                most=waiting.reshape(-1, self.size)[:-1].max(axis=0),
                whole=np.multiply(busy, self.parts.count, out=busy).reshape(-1, self.size)[:-1].sum(axis=0),
                lowest=self._two_lowest(waiting) if speed.crosses else np.zeros((2, 0)),
            )

        return self._once_made("rest", (task, at, recompute), make)

    def _two_lowest(self, waiting: Array) -> Array:
        """By shape: the two lowest figures over its stages but the last, infinite where there are fewer."""
        lowest = np.full((2, self.size), np.inf)
        for i in range(PARTS[0] * PARTS[1] - 1):
            at = divmod(i, PARTS[1])
            figure, twice = waiting[at] + self.parts.absent[at], self.parts.count[at] > 1
            np.minimum(lowest[1], np.maximum(lowest[0], figure), out=lowest[1])
            np.minimum(lowest[0], figure, out=lowest[0])
            np.minimum(lowest[1], figure + np.array([np.inf, 0.0]).take(twice), out=lowest[1])
        return lowest

    def _cross_s(self, ctx: Context, rounds: Ints, link: Link | Hop) -> Array:
        """Seconds of a micro-batch's activations over a link, once."""
        size = ctx.batch_tokens / rounds * ctx.model.hidden * ctx.model.dtype_bytes
        seconds: Array = link.latency_s + size / (link.bytes_per_s * ctx.a.link_efficiency)
        return seconds

    def _spanned_s(self, task: Task, most: Array, rounds: Ints, sync: Array, rows: Ints) -> Array:
        """Seconds more, at least, where the DP ranks of one stage lie at both ends of the hop, of some shapes; infinite without
        any."""
        ring = self._span_s(task)[rows]
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
                return np.where(may.any(axis=(0, 1)), 0.0, np.inf)
            link = (self.hop.latency_s, self.hop.bytes_per_s)
            two: Ints = np.full_like(self.dp, 2)
            size = self._stage_params(task) * self.ctx.of(task).model.dtype_bytes
            ring: Array = self._ring(link, size, two, 1 if fsdp else 2) * (3 if fsdp and trains else 1)
            found: Array = np.where(may, ring, np.inf).min(axis=(0, 1))
            return found

        return self._once_made("span", task, make)
