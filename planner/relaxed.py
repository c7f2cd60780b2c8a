"""Where groups of tasks lie, relaxed in their favour: stages on as few machines as possible, the fastest link wherever there
is a choice. What a group costs so is a lower bound of what it costs on real machines."""

import itertools
from collections.abc import Sequence

from planner.cluster import Cluster, Link
from planner.columns import Columns
from planner.cost.network import Spread, best_link, best_of, link_between, local_link
from planner.cost.ranks import MixedShape, RankShape, shares_by_compute
from planner.cost.training import StageShape, TrainerCost, TrainerShape
from planner.mixed_ranks import Machines, best_rings
from planner.plan import Task
from planner.pools import region_link
from planner.record import replace
from planner.space import BlockShape, DeviceClass, is_mixed


class Relaxed:
    """The relaxed costs of blocks on the classes of one problem."""

    def __init__(self, columns: Columns, classes: Sequence[DeviceClass]) -> None:
        self.columns = columns
        self.cluster: Cluster = columns.cost.problem.cluster
        self.kinds = tuple(dict.fromkeys(c.place.kind for c in classes))
        self.of_kind = {k: tuple(c for c in classes if c.place.kind == k) for k in self.kinds}
        regions = tuple(dict.fromkeys(c.place.region for c in classes))
        # Devices by kind that each region has, and a link that none between regions is better than (None in one region).
        self.room_by_region = [
            [sum(c.size for c in self.of_kind[k] if c.place.region == r) for k in self.kinds] for r in regions
        ]
        pairs = [region_link(self.cluster, a, b) for a, b in itertools.combinations(sorted(regions), 2)]
        self.bridge = best_of(pairs) if pairs else None
        self._links: dict[tuple[str, str], Link] = {}
        self._hops: dict[tuple[str, ...], Link | None] = {}
        nodes = dict.fromkeys(c.place.node for c in classes)
        # Devices by kind of each machine.
        self.room_by_machine = [
            [sum(c.size for c in self.of_kind[k] if c.place.node == n) for k in self.kinds] for n in nodes
        ]
        self._remotes: dict[str, Link] = {}
        self._spreads: dict[BlockShape, Spread | None] = {}

    def group(
        self,
        blocks: Sequence[BlockShape],
        tasks: tuple[Task, ...],
        beside_bytes: Sequence[float] = (),
        *,
        first_bytes: float = 0.0,
    ) -> TrainerCost | None:
        """What a group of tasks takes on these blocks at best, beside replicas that hold `beside_bytes` by stage (of ranks of two
        kinds: by block), and on the first stage of a pipeline at least `first_bytes`; None where it does not fit."""
        layers = self.columns.split(blocks, tasks)
        if layers is None:
            return None
        if is_mixed(blocks):
            return self._mixed(blocks, tasks, beside_bytes, layers[0])
        stages: list[StageShape] = []
        held = beside_bytes or (0.0,) * len(layers)
        for b in blocks:
            spread = self.spread(b)
            if spread is None:
                return None
            one = StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=0, spread=spread)
            mine = range(len(stages), len(stages) + b.pp)
            stages += [replace(one, layers=layers[i], beside_bytes=held[i]) for i in mine]
        stages[0] = replace(stages[0], beside_bytes=max(first_bytes, stages[0].beside_bytes))
        links = tuple(self.link(a.kind, b.kind) for a, b in itertools.pairwise(stages))
        return self.columns.cost.trainer(TrainerShape(stages=tuple(stages), links=links, tasks=tasks))

    def _mixed(
        self, blocks: Sequence[BlockShape], tasks: tuple[Task, ...], beside_bytes: Sequence[float], layers: int
    ) -> TrainerCost | None:
        """The same of ranks of two kinds."""
        cost, (a, b), tp = self.columns.cost, blocks, blocks[0].tp
        kinds = [m for x in blocks if (m := self.machines(x)) is not None]
        if len(kinds) < len(blocks):
            return None
        remote = self.between(a.kind, b.kind)
        rings, nodes = best_rings(
            kinds,
            shared=self.share_machines(a.kind, b.kind),
            least=1,
            remote=remote,
            size_bytes=float(cost.problem.model.weight_bytes),
            tp=tp,
            passes=1 if cost.context.trainer == "fsdp" else 2,
            a=cost.context.a,
        )
        shares = shares_by_compute(cost.context, [(x.kind, x.dp) for x in blocks], tp)
        held = beside_bytes or (0.0,) * len(blocks)
        ranks = tuple(
            RankShape(kind=x.kind, dp=x.dp, share=s, beside_bytes=h)
            for x, s, h in zip(blocks, shares, held, strict=True)
        )
        shape = MixedShape(
            ranks=ranks,
            tp=tp,
            layers=layers,
            rings=rings,
            nodes=nodes,
            remote=remote if nodes > 1 else None,
            tasks=tasks,
        )
        return cost.trainer(shape)

    def spread(self, block: BlockShape) -> Spread | None:
        """One stage of the block on the fewest machines; None where there are not enough."""
        if block not in self._spreads:
            self._spreads[block] = self._spread(block)
        return self._spreads[block]

    def _spread(self, block: BlockShape) -> Spread | None:
        left, nodes = block.dp, 0
        for size in sorted((c.size for c in self.of_kind[block.kind]), reverse=True):
            if left <= 0:
                break
            left -= size // block.tp
            nodes += 1
        if left > 0:
            return None
        local = local_link(self.cluster, self.cluster.kinds[block.kind])
        return Spread(nodes=nodes, local=local, remote=self.remote(block.kind) if nodes > 1 else None)

    def machines(self, block: BlockShape) -> Machines | None:
        """On how many machines the ranks of a block may lie; None where there are not enough."""
        spread = self.spread(block)
        if spread is None:
            return None
        holding = sum(c.size >= block.tp for c in self.of_kind[block.kind])
        return Machines(link=spread.local, dp=block.dp, fewest=spread.nodes, most=min(block.dp, holding))

    def share_machines(self, a: str, b: str) -> bool:
        """Whether some machine holds devices of both kinds."""
        return bool({c.place.node for c in self.of_kind[a]} & {c.place.node for c in self.of_kind[b]})

    def between(self, a: str, b: str) -> Link:
        """The fastest link between machines of two kinds."""
        pairs = {
            (x.place.region, y.place.region): (x.place, y.place)
            for x, y in itertools.product(self.of_kind[a], self.of_kind[b])
            if x.place.node != y.place.node
        }
        links = [link_between(self.cluster, x, y) for x, y in pairs.values()]
        return best_of(links) if links else self.cluster.cross_kind.bulk()

    def remote(self, kind: str) -> Link:
        """The fastest link between two machines of a kind."""
        if kind not in self._remotes:
            pairs = itertools.combinations(self.of_kind[kind], 2)
            links = [link_between(self.cluster, a.place, b.place) for a, b in pairs if a.place.node != b.place.node]
            self._remotes[kind] = best_of(links) if links else self.cluster.same_kind.bulk()
        return self._remotes[kind]

    def hop(self, kinds: Sequence[str]) -> Link | None:
        """The fastest link between two machines that hold devices of some kinds; None where there is only one."""
        if tuple(kinds) not in self._hops:
            places = [c.place for k in kinds for c in self.of_kind[k]]
            pairs = itertools.combinations(dict.fromkeys(places), 2)
            links = [link_between(self.cluster, a, b) for a, b in pairs if a.node != b.node]
            self._hops[tuple(kinds)] = best_of(links) if links else None
        return self._hops[tuple(kinds)]

    def link(self, a: str, b: str) -> Link:
        """The fastest link between devices of two kinds."""
        if (a, b) not in self._links:
            places = [tuple(c.place for c in self.of_kind[k]) for k in (a, b)]
            self._links[a, b] = best_link(self.cluster, *places)
        return self._links[a, b]
