"""Blocks of a trainer, pre-costed: what one can do at best, so that most pairs of blocks never need to be costed whole."""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.cost.flops import head_flops, layer_flops, train_rate
from planner.cost.memory import stage_fits, task_state_bytes, task_working_bytes
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, crossing_s, head_s, layer_s, split_layers
from planner.plan import Task
from planner.record import record
from planner.space import BlockShape, is_mixed


@record
class Column:
    """A block with lower bounds for any trainer it is part of. Seconds are for a whole batch."""

    plain_s: float  # one layer of one stage, without recomputation
    recompute_s: float  # the same with it
    head_s: float  # the vocabulary projection, on the last stage
    plain_layers: int  # more layers than this a stage cannot hold without recomputation
    most_layers: int  # nor with it
    weight: float  # FLOP/s of one stage, for dividing the layers


FIELDS = ("plain_s", "recompute_s", "head_s", "plain_layers", "most_layers", "weight")
Figures = NDArray[np.float64]


class Columns:
    """The columns of one problem, made once each."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        m, model = cost.moments, cost.problem.model
        # The vocabulary projection in units of one layer's work.
        # Tasks of one group run one after the other, so their seconds add up stage by stage; where models differ in shape a
        # stage does not hold the same layers of each, and the actor's alone are a bound.
        alike = all(cost.context.of(t).model == model for t in cost.side_tasks)
        self.tasks: tuple[Task, ...] = cost.side_tasks if alike else ("actor_training",)
        self.head_layers = head_flops(model, m.sequence) / layer_flops(model, m.sequence, m.sequence2)
        self._made: dict[tuple[str, int, int], Column] = {}  # by kind, TP and DP
        self._splits: dict[tuple[tuple[BlockShape, ...], Task], tuple[int, ...] | None] = {}
        self._held: dict[tuple[str, int, int, bool], int] = {}
        self._bounds: dict[tuple[tuple[BlockShape, ...], tuple[Link, ...]], float] = {}

    def column(self, block: BlockShape) -> Column:
        """The column of a block."""
        key = (block.kind, block.tp, block.dp)
        if key not in self._made:
            self._made[key] = self._make(block)
        return self._made[key]

    def split(self, blocks: Sequence[BlockShape], tasks: Sequence[Task] = ()) -> tuple[int, ...] | None:
        """Layers of every stage, in proportion to compute, of the model that a group's plan lists: the actor's where the
        group trains it or names no task, else its first task's. None when there are more stages than layers. Blocks that are
        ranks of one stage each hold all of them."""
        lead: Task = tasks[0] if tasks and "actor_training" not in tasks else "actor_training"
        if is_mixed(blocks):
            return (self.cost.context.of(lead).model.layers,) * len(blocks)
        key = (tuple(blocks), lead)
        if key not in self._splits:
            weights = [c.weight for b in blocks if (c := self.column(b)) for _ in range(b.pp)]
            head_layers = self.head_layers if lead in ("actor_training", "reference") else 0.0
            self._splits[key] = split_layers(self.cost.context.of(lead).model.layers, weights, head_layers)
        return self._splits[key]

    def crossing_s(self, link: Link) -> float:
        """Seconds a border blocks the stages beside it for all tasks of a batch."""
        return sum(crossing_s(self.cost.context, link, share=1.0, task=t) for t in self.tasks)

    def pair_bounds_s(self, left: Sequence[BlockShape], right: Sequence[BlockShape], link: Link) -> NDArray[np.float64]:
        """[i, j] seconds that a trainer of blocks left[i] -> right[j] takes at least, activations crossing `link`."""
        ca, cb = (self._table(x).transpose(1, 0) for x in (left, right))
        crossing = self.crossing_s(link)
        return self.pair_seconds(tuple(ca[:, :, None]), tuple(cb[:, None, :]), crossing)

    def pair_seconds(
        self,
        a: Sequence[Figures],
        b: Sequence[Figures],
        crossing_s: Figures | float,
        *,
        exact: NDArray[np.bool_] | bool = True,
        skew: tuple[Figures | float, Figures | float] = (1.0, 1.0),
    ) -> Figures:
        """Seconds that trainers of two blocks take at least: perfect balance without bubbles; and at the border the fewest
        layers that `split_layers` may give, and the activations in `crossing_s`.

        `a` and `b` are arrays that broadcast: stages and the fields of `FIELDS`. Where not `exact` they are the best of
        several blocks, and at the border there is one layer. `skew`: how much longer the slowest DP worker takes.
        """
        layers = self.cost.problem.model.layers
        pa, plain_a, again_a, _, holds_a, most_a, wa = a
        pb, plain_b, again_b, head, holds_b, most_b, wb = b
        # Every layer lies in some stage: where that takes more than stages hold without recomputation, all recompute.
        plain = pa * holds_a + pb * holds_b >= layers
        fa, fb = np.where(plain, plain_a, again_a) * skew[0], np.where(plain, plain_b, again_b) * skew[1]
        balanced = (layers + head * skew[1] / fb) / (pa / fa + pb / fb)
        # Shares are rounded down; then stages below one layer take theirs from others, one each at most.
        units = (layers + self.head_layers) / (pa * wa + pb * wb)
        share_a, share_b = units * wa, units * wb - np.where(pb == 1, self.head_layers, 0.0)
        last_b = units * wb - self.head_layers
        short = np.where(share_a < 1, pa, 0) + np.where(share_b < 1, pb, 0) + np.where(last_b < 1, 1 - last_b, 0)
        fewest_a = np.where(exact, np.maximum(1, np.floor(share_a - 1e-6) - np.ceil(short)), 1)
        fewest_b = np.where(exact, np.maximum(1, np.floor(share_b - 1e-6) - np.ceil(short)), 1)
        bounds: Figures = np.maximum(balanced, crossing_s + np.maximum(fewest_a * fa, fewest_b * fb))
        bounds[pa * most_a + pb * most_b < layers] = np.inf
        return bounds

    def _table(self, blocks: Sequence[BlockShape]) -> Figures:
        """One row a block: stages and the fields of its column."""
        return np.array([(b.pp, *(getattr(self.column(b), f) for f in FIELDS)) for b in blocks], dtype=float)

    def bound_s(self, blocks: Sequence[BlockShape], links: Sequence[Link]) -> float:
        """A tighter lower bound: the layers as they would be divided, recomputation where memory forces it.

        `links` are those between blocks. Infinite where the blocks cannot hold the model.
        """
        key = (tuple(blocks), tuple(links))
        if key not in self._bounds:
            self._bounds[key] = self._bound_s(blocks, links)
        return self._bounds[key]

    def _bound_s(self, blocks: Sequence[BlockShape], links: Sequence[Link]) -> float:
        layers = self.split(blocks)
        if layers is None:
            return float("inf")
        columns = [self.column(b) for b in blocks for _ in range(b.pp)]
        if any(n > c.most_layers for n, c in zip(layers, columns, strict=True)):
            return float("inf")
        recompute = any(n > c.plain_layers for n, c in zip(layers, columns, strict=True))
        times = [n * (c.recompute_s if recompute else c.plain_s) for n, c in zip(layers, columns, strict=True)]
        times[-1] += columns[-1].head_s
        worst = max(times)
        ends = list(itertools.accumulate(b.pp for b in blocks))
        for end, link in zip(ends, links, strict=False):
            crossing = self.crossing_s(link)
            worst = max(worst, crossing + max(times[end - 1], times[end]))
        return worst

    def _make(self, block: BlockShape) -> Column:
        ctx = self.cost.context
        kind = ctx.kind(block.kind)
        local = local_link(ctx.cluster, kind)
        stage = StageShape(kind=block.kind, dp=block.dp, tp=block.tp, layers=1, spread=Spread(nodes=1, local=local))
        rate = train_rate(ctx, kind, ctx.m.longest, block.tp)
        return Column(
            weight=rate * block.tp * block.dp,
            plain_s=sum(layer_s(ctx, stage, share=1.0, recompute=False, task=t) for t in self.tasks),
            recompute_s=sum(layer_s(ctx, stage, share=1.0, recompute=True, task=t) for t in self.tasks),
            head_s=sum(head_s(ctx, stage, share=1.0, task=t) for t in self.tasks),
            plain_layers=self._holds(block, recompute=False),
            most_layers=self._holds(block, recompute=True),
        )

    def _holds(self, block: BlockShape, *, recompute: bool) -> int:
        """Most layers a middle stage of the block holds (bisection: memory grows with layers)."""
        ctx = self.cost.context
        # Only sharded states depend on DP: the longest sequence must fit whatever the batch.
        key = (block.kind, block.tp, block.dp if ctx.trainer == "fsdp" else 0, recompute)
        if key in self._held:
            return self._held[key]

        def fits(layers: int) -> bool:
            where = {"layers": layers, "tp": block.tp}
            held = sum(
                task_state_bytes(ctx, t, self.tasks, **where, dp=block.dp, first=False, last=False) for t in self.tasks
            )
            work = task_working_bytes(
                ctx, "actor_training", **where, last=False, in_flight=1, tokens=ctx.m.longest, recompute=recompute
            )
            return stage_fits(ctx, block.kind, held + work)

        low, high = 0, ctx.model.layers
        while low < high:
            middle = (low + high + 1) // 2
            if fits(middle):
                low = middle
            else:
                high = middle - 1
        self._held[key] = low
        return low
