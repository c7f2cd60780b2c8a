"""Many shapes of groups of tasks: their blocks, parts and micro-batches, and what they move over which links.

The common ground of memory (`planner.cost.batch`) and time (`planner.cost.batch_times`). Axes of arrays are block, part and
shape (`planner.cost.parts`).
"""

import copy
from collections.abc import Callable, Hashable, Sequence
from typing import Self, TypeVar

import numpy as np

from planner.cluster import Link
from planner.cost.batch_rates import alike
from planner.cost.context import Context
from planner.cost.memory import activation_bytes_per_token
from planner.cost.parts import Array, Block, Hop, Ints, divided, front, parts_of
from planner.cost.training import micro_sequences
from planner.plan import Task
from planner.record import record

T = TypeVar("T")


@record
class Step:
    """One micro-batch size: what does not depend on a task. By block and shape, but for `rounds`."""

    sequences: int
    rounds: Ints
    tokens: Array  # of a micro-batch, by DP rank
    held: Array  # the same for memory: the longest sequence may come alone


class Shapes:
    """One block or two of every shape; every model has the same number of layers."""

    def __init__(
        self,
        ctx: Context,
        first: Block | None,
        second: Block,
        link: Link | None,
        head_layers: float,
        *,
        hop: Hop | None,
    ) -> None:
        self.ctx, self.hop = ctx, hop
        self.first, self.second, self.link = first, second, link
        self.size = len(second.pp)
        split = divided(first, second, ctx.model.layers, head_layers)
        self.possible = split[4] > 0
        self.parts = parts_of(first, second, split)
        self.stages = second.pp + (0 if first is None else first.pp)
        self.dp, self.tp = self._by_block("dp"), self._by_block("tp")
        widest = self.dp.max(axis=(0, 1))
        self.kinds = [ctx.kind(b.kind) for b in self.blocks]
        distinct = [alike(ctx.kind(b.kind), b, widest) for b in self.blocks]
        self.alike, self.which = [a for a, _ in distinct], [which for _, which in distinct]
        self.steps: list[Step] = []
        for sequences in micro_sequences(ctx):
            self.steps.append(self._step(sequences, widest))
            if (self.steps[-1].rounds == 1).all():
                break
        # Of so many shapes, for all batches of their front.
        self._kept: dict[tuple[str, Hashable], tuple[int, object]] = {}

    @property
    def blocks(self) -> tuple[Block, Block]:
        """The second block twice where there is no first: it has no parts."""
        return (self.second if self.first is None else self.first), self.second

    def _step(self, sequences: int, widest: Ints) -> Step:
        rounds = self._rounds(sequences, widest)
        return Step(
            sequences=sequences,
            rounds=rounds,
            tokens=self._tokens(rounds, self.dp),
            held=np.maximum(self.ctx.m.longest, self.ctx.batch_tokens / (rounds * self.dp)),
        )

    def _rounds(self, sequences: int, widest: Ints) -> Ints:
        """Micro-batches of a step, by the highest DP degree of a shape."""
        return np.maximum(1, -(-self.ctx.workload.samples_per_step // (sequences * widest)))

    def _tokens(self, rounds: Ints, dp: Ints) -> Array:
        tokens: Array = self.ctx.workload.samples_per_step / rounds / dp * self.ctx.m.sequence
        return tokens

    def _front(self, size: int) -> Self:
        """The first `size` shapes alone."""
        if size == self.size:
            return self
        found = copy.copy(self)
        found.size = size
        for name in ("first", "second", "hop", "possible", "parts", "stages", "dp", "tp", "steps", "which"):
            setattr(found, name, front(getattr(self, name), size))
        return found

    def _once_made(self, name: str, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gives for the shapes here, made once for them and all that come before."""
        size, value = self._kept.get((name, key), (0, None))
        if size < self.size:
            self._kept[name, key] = self.size, (made := make())
            return made
        return front(value, self.size)  # type: ignore[return-value]

    def _by_block(self, name: str) -> Ints:
        return np.stack([getattr(b, name) for b in self.blocks])[:, None]

    def _of_blocks(self, distinct: Sequence[Array]) -> Array:
        """Figures by block of those of distinct blocks."""
        return np.stack([x.take(which) for x, which in zip(distinct, self.which, strict=True)])[:, None]

    def _column(self, values: Sequence[float]) -> Array:
        """Figures of the two blocks' kinds."""
        return np.array(values, dtype=float)[:, None, None]

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

    def _stage_params(self, task: Task) -> Array:
        """Parameters a step moves: `stage_params`, where only a critic in training has no projection."""
        model, p = self.ctx.of(task).model, self.parts
        table = float(model.vocab * model.hidden)
        last = p.last & (task != "critic_training")
        ends = table * p.first + table * (last & ~(p.first & model.tied)) + model.hidden * (last * 1.0)
        out: Array = p.layers * float(model.layer_params) + ends
        return out

    def _activation(self, task: Task) -> Array:
        """`activation_bytes_per_token` by part."""
        model = self.ctx.of(task).model

        def make() -> Array:
            whole = activation_bytes_per_token(model, 1)
            split = 2 * (whole - activation_bytes_per_token(model, 2))  # the part that TP divides
            out: Array = (whole - split) + split / self.tp
            return out

        return self._once_made("activation", model, make)

    def _links(self, name: str) -> tuple[Array, Array]:
        """(latency, bytes/s) of a link of each part's block; no link costs nothing."""
        rows: list[tuple[float, float]] = []
        for block in self.blocks:
            link: Link | None = getattr(block, name)
            rows.append((0.0, np.inf) if link is None else (link.latency_s, link.bytes_per_s))
        return self._column([r[0] for r in rows]), self._column([r[1] for r in rows])

    def _ring(self, link: tuple[Array, Array], size: Array, ranks: Ints, times: int) -> Array:
        """`ring_s`; nothing for a single rank."""
        latency, rate = link
        return times * (ranks - 1) * latency + times * size * (ranks - 1) / ranks / (rate * self.ctx.a.link_efficiency)

    def _collective(self, size: Array, times: int) -> Array:
        """`spread_collective_s` over the DP ranks of a stage: a single rank, or machine, takes nothing."""
        nodes = self._by_block("nodes")
        inside = self._ring(self._links("local"), size / self.tp, -(-self.dp // nodes), times)
        return inside + self._ring(self._links("remote"), size, nodes, times)

    def _border_counts(self) -> Array:
        na = np.zeros(self.size) if self.first is None else self.first.pp
        return np.stack([np.maximum(na - 1, 0), (na > 0) * 1.0, self.second.pp - 1]).astype(float)
