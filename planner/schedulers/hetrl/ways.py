"""Level 4: the TP/PP/DP of a group of tasks, enumerated and ranked once for each set of device counts.

In our plan space all tasks of a group share one parallel layout. The paper gives each task of a group its own.
"""

import itertools
import math
from collections.abc import Sequence

from planner.columns import Columns
from planner.cost.model import CostModel
from planner.cost.network import Place, best_link, spread_of
from planner.cost.training import StageShape, TrainerCost, TrainerShape
from planner.placing import StageLayout
from planner.plan import Task
from planner.schedulers.hetrl.layout import GroupLayout
from planner.space import BlockShape, DeviceClass, block_shapes

_COSTED, _KEPT = 8, 4  # ways that are costed, best estimate first, and kept for each set of counts
_FEW, _FEW_COSTED, _FEW_KEPT = 8, 64, 32  # the same up to so many devices

Blocks = tuple[BlockShape, ...]
Chunks = tuple[tuple[int, ...], ...]  # for each block, the class of each of its dp * pp TP groups


class Ways:
    """The parallel layouts of one problem's groups."""

    def __init__(self, cost: CostModel, classes: Sequence[DeviceClass]) -> None:
        self.cost, self.classes = cost, classes
        self.columns = Columns(cost)
        self._found: dict[tuple[tuple[Task, ...], tuple[int, ...]], tuple[Blocks, ...]] = {}

    def of(self, tasks: tuple[Task, ...], counts: tuple[int, ...]) -> tuple[Blocks, ...]:
        """Block shapes for a group on `counts` devices by class that use all of them, fastest first by what they cost on
        whole machines; where none fits, those that leave some idle."""
        key = (tasks, counts)
        if key not in self._found:
            self._found[key] = self._ranked(tasks, counts, exactly=True) or self._ranked(tasks, counts, exactly=False)
        return self._found[key]

    def _ranked(self, tasks: tuple[Task, ...], counts: tuple[int, ...], *, exactly: bool) -> tuple[Blocks, ...]:
        caps = self.cost.problem.capabilities
        limit = caps.train_max_devices
        sizes: dict[str, list[int]] = {}
        for c, n in zip(self.classes, counts, strict=True):
            if n:
                sizes.setdefault(c.place.kind, []).append(n)
        options = {
            k: [
                b for b in block_shapes(self.cost.problem, k, tuple(ns), sum(ns)) if not exactly or b.devices == sum(ns)
            ]
            for k, ns in sizes.items()
        }
        found: list[Blocks] = []
        if len(options) == 1 or not exactly:
            found += [(b,) for bs in options.values() for b in bs]
        if caps.train_max_kinds >= 2 and (len(options) == 2 or (len(options) > 2 and not exactly)):
            for ka, kb in itertools.permutations(options, 2):
                found += itertools.product(options[ka], options[kb])
        found = [bs for bs in found if limit is None or sum(b.devices for b in bs) <= limit]
        estimated = sorted((self._estimate_s(tasks, bs), i) for i, bs in enumerate(found))
        few = sum(counts) <= _FEW
        costed: list[tuple[float, int]] = []
        for low_s, i in estimated:
            if len(costed) >= (_FEW_COSTED if few else _COSTED) or low_s == math.inf:
                break
            chunks = self.chunks(found[i], counts, range(len(self.classes)))
            group = self.lay_out(tasks, found[i], chunks) if chunks is not None else None
            seconds = self.cost_of(group) if group is not None else None
            if seconds is not None:
                costed.append((seconds.train_s, i))
        return tuple(found[i] for _, i in sorted(costed)[: _FEW_KEPT if few else _KEPT])

    def _estimate_s(self, tasks: tuple[Task, ...], blocks: Blocks) -> float:
        """The slowest stage's products, without communication; infinite where the actor cannot be held."""
        layers = self.columns.split(blocks, tasks)
        if layers is None:
            return math.inf
        columns = [self.columns.column(b) for b in blocks for _ in range(b.pp)]
        if "actor_training" in tasks and any(n > c.most_layers for n, c in zip(layers, columns, strict=True)):
            return math.inf
        times = [n * c.plain_s for n, c in zip(layers, columns, strict=True)]
        times[-1] += columns[-1].head_s
        return max(times)

    def chunks(self, blocks: Blocks, counts: Sequence[int], order: Sequence[int]) -> Chunks | None:
        """TP groups in the order of classes given, class after class; None where they do not fit into the counts."""
        out: list[tuple[int, ...]] = []
        for b in blocks:
            mine = [i for i in order if self.classes[i].place.kind == b.kind for _ in range(counts[i] // b.tp)]
            if len(mine) < b.dp * b.pp:
                return None
            out.append(tuple(mine[: b.dp * b.pp]))
        return tuple(out)

    def lay_out(self, tasks: tuple[Task, ...], blocks: Blocks, chunks: Chunks) -> GroupLayout | None:
        """A group on classes; None when it has more stages than layers."""
        layers = self.columns.split(blocks, tasks)
        if layers is None:
            return None
        stages: list[StageLayout] = []
        for b, mine in zip(blocks, chunks, strict=True):
            for s in range(b.pp):
                part = mine[s * b.dp : (s + 1) * b.dp]
                stages.append(StageLayout(kind=b.kind, tp=b.tp, layers=layers[len(stages)], chunks=part))
        return GroupLayout(tasks=tasks, stages=tuple(stages))

    def cost_of(self, group: GroupLayout, beside_bytes: Sequence[float] | None = None) -> TrainerCost | None:
        """What a group costs where it lies; `beside_bytes` by stage: what replicas hold there."""
        cluster = self.cost.problem.cluster
        places: list[tuple[Place, ...]] = [
            tuple(self.classes[i].place for i in dict.fromkeys(s.chunks)) for s in group.stages
        ]
        held = beside_bytes or [0.0] * len(places)
        shape = TrainerShape(
            stages=tuple(
                StageShape(
                    kind=s.kind, dp=len(s.chunks), tp=s.tp, layers=s.layers,
                    spread=spread_of(cluster, p), beside_bytes=h,
                )
                for s, p, h in zip(group.stages, places, held, strict=True)
            ),
            links=tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(places)),
            tasks=group.tasks,
        )  # fmt: skip
        return self.cost.trainer(shape)
