"""Groups of tasks on many shapes at once (`planner.cost.parts`): what fits beside what, and how long the fastest way takes.

The formulas of `planner.cost.training` and `planner.cost.memory` over arrays, whose axes are block, part and shape. Tests hold
every figure equal to the plain formulas.
"""

from collections.abc import Sequence

import numpy as np

from planner.cluster import Link
from planner.cost.batch_times import TimedShapes
from planner.cost.context import Context
from planner.cost.memory import logits_bytes, state_bytes_per_param
from planner.cost.micro_batches import Chain, Way, chain_of
from planner.cost.parts import LAST, PARTS, Array, Block, Bools, Hop, extent
from planner.plan import Task
from planner.workflow import TRAINING


class Batch(TimedShapes):
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
        kept, besides = (x[LAST] for x in self._once_made("token", (model, trains, recompute), of_token))
        logits = 1.0 / self.tp[LAST] * logits_bytes(ctx, 1.0, 1)
        held = step.held[LAST]
        needed = held * (kept * np.minimum(step.rounds, p.behind[LAST]) + besides)
        needed = needed + (held if ctx.row_tokens is None else 1.0) * logits
        limit = limit.copy()
        limit[LAST] = room[LAST] - (needed + bucket if trains else needed)
        return limit

    # Micro-batches.

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
