"""The generator of cells with one trainer: blocks of one or two kinds in every set of sites, as boxes of DP degrees.

A box is a lane or an ordered pair of lanes, each with a range of degrees. It uses devices as at the lower ends and takes as
long as at the upper ends, so its period bounds all trainers in it; halving the ranges makes it exact. For two kinds a box
may also stand for all lanes of both. Boxes of trainers with ranks of two kinds in one stage are of `planner.mixed_ranks`.
"""

import itertools

import numpy as np
from numpy.typing import NDArray

from planner.cells import Cells
from planner.cluster import Link
from planner.columns import Columns
from planner.cost.model import CostModel
from planner.cost.network import best_of
from planner.cost.training import crossing_s
from planner.lanes import Lanes, Table, ring_at_least_s, rounds_at_most
from planner.mixed_ranks import MixedRanks
from planner.pools import Pools
from planner.record import replace
from planner.space import BlockShape

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Columns of a box. ANY lane: all lanes of the kind; NONE: no second block.
SITES, FIRST, LOW, HIGH, SECOND, LOW2, HIGH2, TRAINED = range(8)
ANY, NONE = -2, -1


class TrainerBoxes:
    """Boxes [c, 8] of one problem: the first ones, their halves, their bounds."""

    def __init__(self, cost: CostModel, pools: Pools, columns: Columns, tables: dict[tuple[str, int], Table]) -> None:
        self.cost, self.pools, self.columns = cost, pools, columns
        self.lanes = Lanes(cost, columns, pools, tables)
        kinds = range(len(pools.kinds))
        alone = [(k,) for k in kinds]
        pairs = list(itertools.permutations(kinds, 2)) if cost.problem.capabilities.train_max_kinds > 1 else []
        self.mixed = MixedRanks(cost, pools, columns, self.lanes)
        self.first_mixed = len(alone) + len(pairs)
        self.combinations: tuple[tuple[int, ...], ...] = (*alone, *pairs, *self.mixed.pairs)
        self.of_kind = [np.flatnonzero(self.lanes.kind == k) for k in kinds]
        self.must = pools.must_train.sum(axis=1)
        self._pair_links()

    def _pair_links(self) -> None:
        """[several sites?, combination] the seconds of a border between the kinds at best; 0 for a single kind."""
        ctx, pools = self.cost.context, self.pools

        def border(c: tuple[int, ...], several: bool) -> float:
            if len(c) < 2:
                return 0.0
            return crossing_s(ctx, best_of(pools.home_links(*c, several=several)), share=1.0)

        self.border_s = np.array([[border(c, s) for c in self.combinations] for s in (False, True)])
        self.bridge_border_s = np.array([0.0 if x is None else crossing_s(ctx, x, share=1.0) for x in pools.bridge])
        rate = self.cost.context.a.link_efficiency

        def per_layer(links: tuple[Link | None, ...]) -> Floats:
            return np.array([0.0 if x is None else self.lanes.layer_bytes / (x.bytes_per_s * rate) for x in links])

        self.bridge_s, self.narrow_s = per_layer(pools.bridge), per_layer(pools.narrow)
        self.bridge_latency_s = np.array([0.0 if x is None else x.latency_s for x in pools.bridge])
        self.narrow_latency_s = np.array([0.0 if x is None else x.latency_s for x in pools.narrow])
        # Between two machines of a stage at best: inside a region, unless links between regions are faster.
        near = best_of([pools.cluster.same_kind.bulk(), *pools.region_links])
        self.near_s, self.near_latency_s = self.lanes.layer_bytes / (near.bytes_per_s * rate), near.latency_s

    # Boxes.

    def first(self) -> Ints:
        """Boxes that together hold every trainer."""
        if not self.lanes.keys:
            return np.zeros((0, 8), dtype=np.int64)
        found = [self._singles()]
        for i, c in enumerate(self.combinations[: self.first_mixed]):
            if len(c) == 2:
                found.append(self._coarse_pairs(i, c))
        if self.mixed.pairs:
            found.append(self.mixed.first(self.first_mixed, self.must))
        return np.concatenate(found)

    def _singles(self) -> Ints:
        lanes, pools = self.lanes, self.pools
        others = self.must.sum() - self.must  # devices of other kinds that must train
        lacks = pools.member[:, None, :] & (lanes.in_site[None, :, :] == 0)
        fits = ~lacks.any(axis=2) & pools.open[:, None] & (others[lanes.kind] == 0)[None, :]
        low = np.maximum(
            self._lowest(np.arange(len(lanes.keys)))[None, :], -(-pools.size[:, None] // lanes.pp[None, :])
        )
        s, n = np.nonzero(fits & (low <= lanes.highest))
        blank = np.full(len(s), NONE)
        one = np.ones(len(s), dtype=np.int64)
        return np.stack([s, n, low[s, n], lanes.highest[s, n], blank, one, one, lanes.kind[n]], axis=1)

    def _lowest(self, lane: Ints) -> Ints:
        """The lowest degree that takes every device that must train."""
        size = self.lanes.tp[lane] * self.lanes.pp[lane]
        found: Ints = np.maximum(1, -(-self.must[self.lanes.kind[lane]] // size))
        return found

    def _coarse_pairs(self, trained: int, kinds: tuple[int, ...]) -> Ints:
        a, b = kinds
        pools = self.pools
        if self.must.sum() > self.must[a] + self.must[b] or not len(self.of_kind[a]) or not len(self.of_kind[b]):
            return np.zeros((0, 8), dtype=np.int64)
        either = ~pools.member | ((pools.count[a] > 0) | (pools.count[b] > 0))[None, :]
        has = (pools.inside[:, a] > 0) & (pools.inside[:, b] > 0)
        s = np.flatnonzero(either.all(axis=1) & has & pools.open)
        one = np.ones(len(s), dtype=np.int64)
        return np.stack([s, a * one, one, one, np.full(len(s), ANY), one, one, trained * one], axis=1)

    def halves(self, boxes: Ints) -> tuple[Ints, Ints]:
        """What together makes up some boxes none of which is a single trainer yet, and the box each part comes from."""
        coarse = np.flatnonzero(boxes[:, SECOND] == ANY)
        parts = [self._expanded(boxes[i]) for i in coarse]
        origin = [np.full(len(p), i) for p, i in zip(parts, coarse, strict=True)]
        fine = np.flatnonzero(boxes[:, SECOND] != ANY)
        first = boxes[fine, HIGH] / boxes[fine, LOW] >= boxes[fine, HIGH2] / boxes[fine, LOW2]
        for rows, low, high in ((fine[first], LOW, HIGH), (fine[~first], LOW2, HIGH2)):
            middle = (boxes[rows, low] + boxes[rows, high]) // 2
            lower, upper = boxes[rows], boxes[rows]
            lower[:, high], upper[:, low] = middle, middle + 1
            parts += [lower, upper]
            origin += [rows, rows]
        return np.concatenate(parts), np.concatenate(origin)

    def _expanded(self, box: Ints) -> Ints:
        """All pairs of lanes of two kinds."""
        a, b = self.combinations[box[TRAINED]]
        high = self.lanes.highest[box[SITES]]
        left, right = (x[self._lowest(x) <= high[x]] for x in (self.of_kind[a], self.of_kind[b]))
        x, y = (g.ravel() for g in np.meshgrid(left, right, indexing="ij"))
        sites, trained = np.full(len(x), box[SITES]), np.full(len(x), box[TRAINED])
        return np.stack([sites, x, self._lowest(x), high[x], y, self._lowest(y), high[y], trained], axis=1)

    @staticmethod
    def single(boxes: Ints) -> NDArray[np.bool_]:
        """Whether a box holds one trainer only."""
        found: NDArray[np.bool_] = (
            (boxes[:, SECOND] != ANY) & (boxes[:, LOW] == boxes[:, HIGH]) & (boxes[:, LOW2] == boxes[:, HIGH2])
        )
        return found

    def blocks(self, box: Ints) -> tuple[BlockShape, ...]:
        """The trainer of a box that holds one only."""
        first = self.lanes.block(int(box[FIRST]), int(box[LOW]))
        if box[SECOND] == NONE:
            return (first,)
        return first, replace(self.lanes.block(int(box[SECOND]), int(box[LOW2])), joins=self.is_mixed(box))

    def is_mixed(self, box: Ints) -> bool:
        """Whether the trainers of a box are one stage with ranks of two kinds."""
        return bool(box[TRAINED] >= self.first_mixed)

    # Bounds.

    def cells(self, boxes: Ints) -> Cells:
        """The boxes as cells; `train_s` is infinite where no trainer of a box fits."""
        lanes = self.lanes
        used = np.zeros((len(boxes), len(self.pools.kinds)), dtype=np.int64)
        seconds = np.full(len(boxes), np.inf)
        if not len(boxes):
            return Cells(used=used, train_s=seconds, sites=boxes[:, SITES], trained=boxes[:, TRAINED])
        alone, coarse = boxes[:, SECOND] == NONE, boxes[:, SECOND] == ANY
        pair = ~alone & ~coarse
        for rows, lane, low in ((~coarse, FIRST, LOW), (pair, SECOND, LOW2)):
            n = boxes[rows, lane]
            used[np.flatnonzero(rows), lanes.kind[n]] += boxes[rows, low] * lanes.tp[n] * lanes.pp[n]
        if alone.any():
            seconds[alone] = self._single_s(boxes[alone])
        if coarse.any():
            seconds[coarse] = self._coarse_s(boxes[coarse])
        if pair.any():
            mixed = pair & (boxes[:, TRAINED] >= self.first_mixed)
            if mixed.any():
                seconds[mixed] = self.mixed.least_s(boxes[mixed])
            piped = pair & ~mixed
            seconds[piped] = self._pair_s(boxes[piped])
            limit = self.cost.problem.capabilities.train_max_devices
            if limit is not None:
                seconds[used.sum(axis=1) > limit] = np.inf
        return Cells(used=used, train_s=np.maximum(seconds, 1e-12), sites=boxes[:, SITES], trained=boxes[:, TRAINED])

    def _coarse_s(self, boxes: Ints) -> Floats:
        several = (self.pools.size[boxes[:, SITES]] > 1).astype(np.int64)
        found: Floats = self.border_s[several, boxes[:, TRAINED]]
        return found

    def _single_s(self, boxes: Ints) -> Floats:
        """Work of the fullest stage, bubbles, stragglers, a border, and the gradients or parameters over the network."""
        lanes, layers = self.lanes, self.cost.problem.model.layers
        n, low = boxes[:, FIRST], boxes[:, LOW]
        plain, again, head, holds, most, _ = lanes.of(n, boxes[:, HIGH])
        full, least = lanes.most_layers[n], lanes.least_layers[n]
        f = np.where(full <= holds, plain, again)
        straggler = lanes.straggler
        skew = np.where(low == boxes[:, HIGH], straggler.exactly(low), straggler.least(low))
        slow = np.maximum(np.where(lanes.pp[n] > 1, full, 0) * f, lanes.last_layers[n] * f + head)
        rounds = rounds_at_most(self.cost.problem.workload.samples_per_step, low)
        work = skew * ((1 - 1 / rounds) * slow + (layers * f + head) / rounds)
        work = (
            work + np.where(lanes.pp[n] > 1, lanes.border_s[n], 0.0) + lanes.update_s[n] * self._states(full, n, boxes)
        )
        work[full > most] = np.inf
        return self._with_network(boxes, work, full, least, least * f)

    def _states(self, full: Ints, n: Ints, boxes: Ints) -> Floats:
        """Layers of optimiser states one rank updates, at least."""
        return full / boxes[:, HIGH] if self.cost.context.trainer == "fsdp" else full.astype(float)

    def _with_network(self, boxes: Ints, work: Floats, full: Ints, least: Ints, least_s: Floats) -> Floats:
        """`work` with the collectives of one block; over several sites, with the cheapest crossing of the bridge."""
        lanes, pools = self.lanes, self.pools
        s, n, low = boxes[:, SITES], boxes[:, FIRST], boxes[:, LOW]
        fsdp = self.cost.context.trainer == "fsdp"
        passes, times = (1, 3) if fsdp else (2, 1)
        machines = lanes.machines(n, low)

        def ring(layers: Ints, at_least: Ints, between_s: Floats, latency_s: Floats) -> Floats:
            return times * ring_at_least_s(
                np.maximum(machines, at_least),
                np.maximum(low, at_least),
                inside_s=layers * lanes.local_s[n],
                between_s=layers * between_s,
                latency_s=latency_s,
                passes=passes,
            )

        def joined(collective: Floats) -> Floats:
            return np.maximum(work, collective) if fsdp else work + collective

        one, flat = np.ones(len(boxes), dtype=np.int64), np.ones(len(boxes))
        home = ring(full, one, self.near_s * flat, self.near_latency_s * flat)
        found = joined(home)
        many = pools.size[s] > 1
        if many.any():
            whole = ring(full, pools.size[s], self.narrow_s[s], self.narrow_latency_s[s])
            stage = ring(least, 2 * one, self.bridge_s[s], self.bridge_latency_s[s])
            border = np.maximum(found, least_s + self.bridge_border_s[s])
            crossed = np.where(
                lanes.pp[n] == 1, joined(np.maximum(home, whole)), np.minimum(border, joined(np.maximum(home, stage)))
            )
            found = np.where(many, crossed, found)
        return found

    def _pair_s(self, boxes: Ints) -> Floats:
        """`Columns.pair_seconds` at the upper ends; over several sites, with the cheapest crossing of the bridge."""
        lanes, pools = self.lanes, self.pools
        s, a, b = boxes[:, SITES], boxes[:, FIRST], boxes[:, SECOND]
        several = (pools.size[s] > 1).astype(np.int64)
        border = self.border_s[several, boxes[:, TRAINED]]
        found = self.columns.pair_seconds(
            (lanes.pp[a].astype(float), *lanes.of(a, boxes[:, HIGH])),
            (lanes.pp[b].astype(float), *lanes.of(b, boxes[:, HIGH2])),
            border,
            exact=self.single(boxes),
            skew=(lanes.straggler.least(boxes[:, LOW]), lanes.straggler.least(boxes[:, LOW2])),
        )
        if self.cost.context.trainer == "replicated":
            # Some stage or border crosses the bridge; a stage holds at least one layer and lies on two machines.
            ring = self.bridge_s[s] + 2 * self.bridge_latency_s[s]
            by_stage, by_border = found + ring, np.maximum(found, self.bridge_border_s[s])
            found = np.where(several == 1, np.minimum(by_stage, by_border), found)
        return found
