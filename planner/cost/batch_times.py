"""What tasks take on many shapes with one micro-batch size: the formulas of `planner.cost.training` for all shapes at once.

Axes of arrays are block, part and shape (`planner.cost.parts`). Tasks that run one model differ in the last stage alone, where
only the actor's shape has a vocabulary projection: all other parts are costed once for them.
"""

import numpy as np

from planner.cluster import Link
from planner.cost.batch_rates import Alike, attention_seconds, train_rates
from planner.cost.context import Context
from planner.cost.flops import hbm_rate, head_flops, layer_flops
from planner.cost.memory import state_bytes_per_param
from planner.cost.parts import LAST, PARTS, Array, Hop, Ints
from planner.cost.shapes import Shapes, Step
from planner.cost.training import attention_passes, passes
from planner.plan import Task
from planner.record import record
from planner.workflow import TRAINING


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


class TimedShapes(Shapes):
    """Seconds of every task on every shape, by the micro-batch size."""

    def _timed(self, task: Task, at: int, recompute: bool) -> Array:
        """Seconds of a task on every shape with one micro-batch size."""
        ctx, step = self.ctx.of(task), self.steps[at]
        speed, work = self._speed(ctx, at), self._last(task, recompute)
        rest = self._rest(self._bare(task), at, recompute)
        sync, update = self._once(task)
        busy = work.busy_s(speed.per_flop[LAST], step.tokens[LAST])
        waiting = busy + work.crossings * speed.waits[LAST]
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
            flops = layer_passes * self.parts.layers[LAST] * self._per_layer(task)[2][LAST]
            if head_passes:
                flops = flops + head_passes * head_flops(ctx.model, ctx.head_share)
            floor = work.floor_s
            if ctx.trainer == "fsdp":
                floor = self._floor_s(task, layer_passes)
            return _Work(
                flops=flops * self.second.skew,
                moved_s=work.moved_s[LAST],
                latency_s=work.latency_s[LAST],
                floor_s=floor[LAST],
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
