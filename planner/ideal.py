"""One trainer of given blocks in a given set of sites, costed as if it lay as well as it could."""

import itertools
from collections.abc import Iterator, Sequence

from planner.cluster import Link
from planner.columns import Columns
from planner.cost.network import Spread, best_of, local_link, spread_collective_s
from planner.cost.training import StageShape, TrainerShape
from planner.lanes import Lanes
from planner.pools import Pools
from planner.record import replace
from planner.space import BlockShape

_EVERY = 32  # with more choices of a number of machines than this only the ends are tried


class IdealTrainer:
    """Seconds of trainers; not less than any layout takes that uses every site of the set."""

    def __init__(self, columns: Columns, pools: Pools, lanes: Lanes) -> None:
        self.columns, self.pools, self.lanes = columns, pools, lanes
        self.cost = columns.cost
        self.near = best_of([pools.cluster.same_kind.bulk(), *pools.region_links])
        self._links: dict[tuple[int, int, bool], Link] = {}
        self._borders: dict[tuple[int, int, bool], float] = {}
        self._collectives: dict[tuple[int, int], float] = {}
        self._homes: dict[tuple[int, int], Spread] = {}
        self._spreads: dict[tuple[int, int, int, int, Link], Spread] = {}

    def seconds(self, sites: int, lanes: Sequence[int], blocks: Sequence[BlockShape]) -> float | None:
        """The least seconds of a step; None where the blocks do not fit."""
        layers = self.columns.split(blocks)
        if layers is None:
            return None
        owner = [i for i, b in enumerate(blocks) for _ in range(b.pp)]
        several = int(self.pools.size[sites]) > 1
        stages = []
        for n, i in zip(layers, owner, strict=True):
            b, lane = blocks[i], lanes[i]
            spread = self._at_home(lane, b)
            stages.append(StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=n, spread=spread))
        kinds = [self.lanes.keys[lane][0] for lane in lanes]
        links = tuple(self._link(kinds[i], kinds[j], several) for i, j in itertools.pairwise(owner))
        shape = TrainerShape(stages=tuple(stages), links=links)
        if not several:
            return self._seconds(shape)
        return min((s for s in self._crossings(sites, lanes, owner, shape) if s is not None), default=None)

    def least_s(self, sites: int, lanes: Sequence[int], blocks: Sequence[BlockShape]) -> float | None:
        """Quicker than `seconds` and not above it: layers as they are divided, bubbles of the most micro-batches there can
        be, one collective; None where the blocks cannot hold the model."""
        layers = self.columns.split(blocks)
        if layers is None:
            return None
        owner = [i for i, b in enumerate(blocks) for _ in range(b.pp)]
        held = [self.columns.column(blocks[i]) for i in owner]
        if any(n > c.most_layers for n, c in zip(layers, held, strict=True)):
            return None
        again = any(n > c.plain_layers for n, c in zip(layers, held, strict=True))
        times = [n * (c.recompute_s if again else c.plain_s) for n, c in zip(layers, held, strict=True)]
        times[-1] += held[-1].head_s
        times = [t * self.cost.skew(blocks[i].dp) for t, i in zip(times, owner, strict=True)]
        borders = [0.0, *(self._border_s(sites, lanes[i], lanes[j]) for i, j in itertools.pairwise(owner)), 0.0]
        slow = max(borders[i] + t + borders[i + 1] for i, t in enumerate(times))
        samples = self.cost.problem.workload.samples_per_step
        rounds = max(1, -(-samples // max(b.dp for b in blocks)))
        found = (1 - 1 / rounds) * slow + (sum(times) + sum(borders)) / rounds
        collective = max(n * self._collective_s(lanes[i], blocks[i]) for n, i in zip(layers, owner, strict=True))
        return max(found, 3 * collective) if self.cost.context.trainer == "fsdp" else found + collective

    def _border_s(self, sites: int, left: int, right: int) -> float:
        """Seconds of a border for a whole batch."""
        key = (left, right, int(self.pools.size[sites]) > 1)
        if key not in self._borders:
            link = self._link(self.lanes.keys[left][0], self.lanes.keys[right][0], key[2])
            self._borders[key] = self.columns.crossing_s(link)
        return self._borders[key]

    def _collective_s(self, lane: int, block: BlockShape) -> float:
        """Seconds of one layer's collective over the ranks of a stage."""
        key = (lane, block.dp)
        if key not in self._collectives:
            model, a = self.cost.problem.model, self.cost.context.a
            passes = 1 if self.cost.context.trainer == "fsdp" else 2
            size = model.layer_params * model.dtype_bytes
            spread = self._at_home(lane, block)
            whole = spread_collective_s(spread, size, dp=block.dp, tp=block.tp, passes=passes, a=a)
            # The latency is paid once, whatever the number of layers.
            none = spread_collective_s(spread, 0.0, dp=block.dp, tp=block.tp, passes=passes, a=a)
            self._collectives[key] = whole - none
        return self._collectives[key]

    def _at_home(self, lane: int, block: BlockShape) -> Spread:
        """The best spread of a stage: inside one site where it fits there."""
        key = (lane, block.dp)
        if key not in self._homes:
            crosses = len(self.pools.sites) > 1 and block.dp > self.lanes.one_site[lane]
            remote = self.lanes.widest(lane, block.dp) if crosses else self.near
            self._homes[key] = self._spread(lane, block, 1 + crosses, remote)
        return self._homes[key]

    def _seconds(self, shape: TrainerShape) -> float | None:
        found = self.cost.trainer(shape)
        return None if found is None else found.train_s

    def _crossings(
        self, sites: int, lanes: Sequence[int], owner: Sequence[int], shape: TrainerShape
    ) -> Iterator[float | None]:
        """The trainer with each of the ways to cross the bridge of its sites: in the smallest stage of a block, or at a
        border. A trainer of one stage has all sites in it."""
        pools, narrow, bridge = self.pools, self.pools.narrow[sites], self.pools.bridge[sites]
        assert narrow is not None
        assert bridge is not None
        alone = len(shape.stages) == 1
        for i in dict.fromkeys(owner):
            if shape.stages[owner.index(i)].dp < 2:
                continue
            at = min((j for j, o in enumerate(owner) if o == i), key=lambda j: shape.stages[j].layers)
            stage = shape.stages[at]
            link = narrow if alone else bridge
            b = BlockShape(kind=stage.kind, tp=stage.tp, dp=stage.dp, pp=1)
            remote = stage.spread.remote
            if remote is not None and remote.bytes_per_s < link.bytes_per_s:
                link = replace(link, bytes_per_s=remote.bytes_per_s)
            spread = self._spread(lanes[i], b, int(pools.size[sites]) if alone else 2, link)
            stages = (*shape.stages[:at], replace(stage, spread=spread), *shape.stages[at + 1 :])
            yield self._seconds(replace(shape, stages=stages))
        if not alone:
            inside = self._seconds(shape)
            yield None if inside is None else max(inside, self.columns.crossing_s(bridge))

    def _spread(self, lane: int, block: BlockShape, at_least: int, remote: Link) -> Spread:
        """The number of machines with the shortest collective of one stage, from the fewest to one a worker."""
        key = (lane, block.dp, at_least, block.tp, remote)
        if key in self._spreads:
            return self._spreads[key]
        cluster = self.pools.cluster
        local = local_link(cluster, cluster.kinds[block.kind])
        kind = self.lanes.keys[lane][0]
        holding = self.lanes.holding[kind, block.tp]
        fewest = max(at_least, int(self.lanes.fewest[self.lanes.start[lane] + block.dp]))
        most = max(fewest, min(block.dp, holding))
        choices: Sequence[int] = range(fewest, most + 1)
        if len(choices) > _EVERY:
            # Bandwidth is concave in the number of machines, hence best at an end; without latency inside nothing else counts.
            choices, local = (fewest, most), replace(local, latency_s=0.0)
        passes = 1 if self.cost.context.trainer == "fsdp" else 2
        size = self.cost.problem.model.layer_params * self.cost.problem.model.dtype_bytes
        every = [Spread(nodes=m, local=local, remote=remote if m > 1 else None) for m in choices]
        self._spreads[key] = min(
            every,
            key=lambda s: spread_collective_s(s, size, dp=block.dp, tp=block.tp, passes=passes, a=self.cost.context.a),
        )
        return self._spreads[key]

    def _link(self, a: int, b: int, several: bool) -> Link:
        """The link with the shortest border between stages of two kinds."""
        if (a, b, several) not in self._links:
            links = self.pools.home_links(a, b, several=several)
            self._links[a, b, several] = best_of(links)
        return self._links[a, b, several]
