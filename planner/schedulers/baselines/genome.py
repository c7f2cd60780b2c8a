"""A whole plan as a list of whole numbers, for searchers that know nothing of the problem.

Genes, each from 0 to its entry of `highest`: how the tasks are grouped; for each group two blocks (kind or none, TP, stages);
for each class of devices how many each group may take and how many stay idle; for each kind the replica's shape and, where
generation may share devices, whether it does. What is left of a class generates. Decoding trims counts to whole chunks;
it does not look for good plans, and the judge has the last word.
"""

from collections.abc import Sequence

from planner.columns import Columns
from planner.placing import GroupLayout, ReplicaLayout, StageLayout, materialise_groups
from planner.plan import Plan, Task
from planner.schedulers.baselines.uniform import chunks_of
from planner.search import Search
from planner.space import BlockShape, device_classes, replica_shapes, tp_degrees
from planner.workflow import groupings

_BLOCKS = 2  # kind-blocks of a group
_BLOCK_GENES = 3  # kind, TP, stages


class Genome:
    """The genes of one problem's plans and what they mean."""

    def __init__(self, search: Search) -> None:
        self.cost, self.problem = search.cost, search.problem
        caps = self.problem.capabilities
        self.columns = Columns(search.cost)
        self.classes = device_classes(self.problem)
        self.kinds = tuple(dict.fromkeys(c.place.kind for c in self.classes))
        self.shapes = {k: replica_shapes(self.cost, self.classes, k) for k in self.kinds}
        self.degrees = tp_degrees(self.problem, caps.train_max_tp)
        self.ways = groupings(self.cost.side_tasks, max(1, caps.task_groups))
        self.groups = max(len(w) for w in self.ways)
        self.blocks = min(_BLOCKS, caps.train_max_kinds)
        stages = min(caps.train_max_pp, self.problem.model.layers)
        block = (len(self.kinds), len(self.degrees) - 1, stages - 1)
        counts = [n for c in self.classes for n in (*[c.size] * self.groups, len(c.free))]
        shared = int(self.cost.shares_devices)
        self.highest: tuple[int, ...] = (
            len(self.ways) - 1,
            *(block * (self.blocks * self.groups)),
            *counts,
            *(g for k in self.kinds for g in (max(0, len(self.shapes[k]) - 1), shared)),
        )

    def decode(self, genes: Sequence[int]) -> Plan | None:
        """The plan of these genes; None where a group has no device or more stages than layers, a device that must
        train does not, or nothing generates."""
        way = self.ways[genes[0]]
        at = 1 + _BLOCK_GENES * self.blocks * self.groups
        each = self.groups + 1
        left = [c.size - len(c.must_roll) for c in self.classes]
        groups: list[GroupLayout] = []
        used = [0] * len(self.classes)
        for g, tasks in enumerate(way):
            limits = [min(genes[at + i * each + g], n) for i, n in enumerate(left)]
            if g == 0:
                limits = [min(n, max(m, len(c.must_train))) for m, n, c in zip(limits, left, self.classes, strict=True)]
            start = 1 + g * self.blocks * _BLOCK_GENES
            layout = self._group(
                genes[start : start + self.blocks * _BLOCK_GENES], limits, tasks if len(way) > 1 else ()
            )
            if layout is None:
                return None
            groups.append(layout)
            for s in layout.stages:
                for i in s.chunks:
                    left[i] -= s.tp
                    used[i] += s.tp
        if any(u < len(c.must_train) for u, c in zip(used, self.classes, strict=True)):
            return None
        idle = [genes[at + i * each + self.groups] for i in range(len(self.classes))]
        rest = [max(len(c.must_roll), c.size - u - n) for c, u, n in zip(self.classes, used, idle, strict=True)]
        replicas = self._replicas(genes[at + each * len(self.classes) :], rest, used, len(groups))
        return materialise_groups(self.classes, groups, replicas, self.problem.in_force) if replicas else None

    def _group(self, genes: Sequence[int], limits: Sequence[int], tasks: tuple[Task, ...]) -> GroupLayout | None:
        """One group on at most `limits` devices of each class."""
        caps = self.problem.capabilities
        room = sum(limits) if caps.train_max_devices is None else caps.train_max_devices
        blocks: list[BlockShape] = []
        chunks: list[list[int]] = []
        for b in range(self.blocks):
            kind, tp, stages = genes[b * _BLOCK_GENES : (b + 1) * _BLOCK_GENES]
            if kind == len(self.kinds) or any(x.kind == self.kinds[kind] for x in blocks):
                continue
            tp = self.degrees[tp]
            mine = [i for i, c in enumerate(self.classes) if c.place.kind == self.kinds[kind]]
            some = chunks_of(limits, tp, sorted(mine, key=lambda i: not self.classes[i].must_train))[: room // tp]
            if some:
                pp = min(stages + 1, len(some))
                dp = min(len(some) // pp, self.problem.workload.samples_per_step)
                blocks.append(BlockShape(kind=self.kinds[kind], tp=tp, dp=dp, pp=pp))
                chunks.append(some)
                room -= tp * dp * pp
        layers = self.columns.split(blocks, tasks) if blocks else None
        if layers is None:
            return None
        out: list[StageLayout] = []
        for block, some in zip(blocks, chunks, strict=True):
            for s in range(block.pp):
                mine_here = tuple(some[s * block.dp : (s + 1) * block.dp])
                out.append(StageLayout(kind=block.kind, tp=block.tp, layers=layers[len(out)], chunks=mine_here))
        return GroupLayout(tasks=tasks, stages=tuple(out))

    def _replicas(
        self, genes: Sequence[int], rest: Sequence[int], used: Sequence[int], groups: int
    ) -> tuple[ReplicaLayout, ...]:
        out: list[ReplicaLayout] = []
        for k, kind in enumerate(self.kinds):
            which, shares = genes[2 * k], genes[2 * k + 1]
            if not self.shapes[kind]:
                continue
            shape = self.shapes[kind][which]
            counts = [n + (u if shares else 0) for n, u in zip(rest, used, strict=True)]
            mine = [i for i, c in enumerate(self.classes) if c.place.kind == kind]
            chunks = chunks_of(counts, shape.tp, mine)
            for at in range(0, len(chunks) - shape.pp + 1, shape.pp):
                here = tuple(chunks[at : at + shape.pp])
                out.append(ReplicaLayout(shape=shape, chunks=here, level=groups if shares else 0))
        return tuple(out)
