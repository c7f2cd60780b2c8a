"""Uniform layouts, as systems make them that take every GPU for the same: one TP for all replicas, one (TP, PP) for training.

All tasks but generation are one group. Where its devices are of several kinds, the judge wants stages of one kind each, so
data parallelism over all of them with equal shares becomes a pipeline of kind-blocks whose layers are in proportion to
DEVICES, not to speed: every device has the same work, and the slowest kind paces, as there. At most as many kinds train as
the problem's trainer may have; the kinds with most devices do.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.columns import Columns
from planner.cost.model import Scored, side_s
from planner.cost.training import split_layers
from planner.judge import violations
from planner.placing import GroupLayout, ReplicaLayout, StageLayout, materialise_groups
from planner.plan import Plan
from planner.record import record, replace
from planner.search import Search
from planner.space import BlockShape, device_classes, replica_shapes, role_limits, tp_degrees

Counts = tuple[int, ...]  # devices by class


@record
class Pools:
    """Devices by class: those for training and every other task, and those that may generate."""

    train: Counts
    rollout: Counts


class Uniform:
    """The uniform plans of one problem; `even`: every replica gets an equal part of the samples."""

    def __init__(self, search: Search, *, even: bool = False) -> None:
        self.search, self.cost, self.even = search, search.cost, even
        self.problem = search.problem
        self.classes = device_classes(self.problem)
        self.columns = Columns(search.cost)
        owner = {d: i for i, c in enumerate(self.classes) for d in c.free}
        nodes = {n: i for i, n in enumerate(dict.fromkeys(d.node for d in self.problem.cluster.devices))}
        listed = sorted((d for d in self.problem.cluster.devices if d.id in owner), key=lambda d: nodes[d.node])
        self.order: Counts = tuple(owner[d.id] for d in listed)  # the class of each device without a pin, as listed
        self.pinned = sum(len(c.must_train) for c in self.classes)
        self.size = sum(c.size for c in self.classes)

    def cut(self, order: Sequence[int], train: int) -> Pools:
        """The first `train` devices train, pinned ones counted; the rest of `order` generates. Pins are always kept."""
        free = max(0, min(len(order), train - self.pinned))
        given = [len(c.must_train) for c in self.classes]
        rest = [len(c.must_roll) for c in self.classes]
        for at, i in enumerate(order):
            (given if at < free else rest)[i] += 1
        return Pools(train=tuple(given), rollout=tuple(rest))

    def offer_best(self, pools: Pools, *, apart: bool = False) -> Scored | None:
        """Offer the fastest uniform trainer of the pool beside replicas of each TP in turn; the best of these plans.

        What the trainer cannot use, by its limits or as a remainder, generates too unless the pools are `apart`.
        """
        fastest: tuple[float, GroupLayout] | None = None
        for group in self.trainers(pools.train):
            if self.search.halted():
                return None
            seconds = self._seconds(group)
            if seconds is not None and (fastest is None or seconds < fastest[0]):
                fastest = (seconds, group)
        if fastest is None:
            self.search.evaluations += 1
            return None
        group = fastest[1]
        left = pools.rollout
        if not apart:
            left = tuple(t + r - u for t, r, u in zip(pools.train, left, self.used(group), strict=True))
        return self.offer_each(left, group)

    def offer_each(self, counts: Sequence[int], group: GroupLayout, level: int = 0) -> Scored | None:
        """Offer a plan for each TP that replicas on `counts` devices by class may have; the best of them."""
        best: Scored | None = None
        for tp in tp_degrees(self.problem, self.problem.capabilities.rollout_max_tp):
            if self.search.halted():
                return best
            replicas = self.replicas(counts, tp, level)
            found = self.offer(group, replicas) if replicas else None
            if found is not None and (best is None or self.search.better(found, best)):
                best = found
        return best

    def offer(self, group: GroupLayout, replicas: Sequence[ReplicaLayout]) -> Scored | None:
        """Offer that plan if the judge accepts it."""
        plan = materialise_groups(self.classes, (group,), replicas, self.problem.in_force)
        return offer_valid(self.search, replace(plan, even_shares=self.even))

    def trainers(self, counts: Sequence[int]) -> Iterator[GroupLayout]:
        """Every uniform way to train on those devices: all kinds that may train together, else fewer where none fits."""
        caps = self.problem.capabilities
        kinds: dict[str, tuple[int, int]] = {}  # devices that must train, devices
        for c, n in zip(self.classes, counts, strict=True):
            if n:
                must, every = kinds.get(c.place.kind, (0, 0))
                kinds[c.place.kind] = (must + len(c.must_train), every + n)
        most = sorted(kinds, key=kinds.__getitem__, reverse=True)[: min(2, caps.train_max_kinds)]
        for chosen in (most[:n] for n in range(len(most), 0, -1)):
            found = False
            for group in self._on_kinds(counts, [k for k in kinds if k in chosen]):
                if any(u < len(c.must_train) for u, c in zip(self.used(group), self.classes, strict=True)):
                    continue
                found = found or self._seconds(group) is not None
                yield group
            if found:
                return

    def _on_kinds(self, counts: Sequence[int], kinds: Sequence[str]) -> Iterator[GroupLayout]:
        caps, workload = self.problem.capabilities, self.problem.workload
        for tp in tp_degrees(self.problem, caps.train_max_tp):
            chunks = {k: [i for i in self._training_order(k) for _ in range(counts[i] // tp)] for k in kinds}
            for pp in range(1, min(caps.train_max_pp, self.problem.model.layers // len(kinds)) + 1):
                room = caps.train_max_devices if caps.train_max_devices is not None else self.size
                blocks: list[BlockShape] = []
                for k in kinds:
                    dp = min(len(chunks[k]) // pp, room // (tp * pp), workload.samples_per_step)
                    room -= dp * tp * pp
                    if dp:
                        blocks.append(BlockShape(kind=k, tp=tp, dp=dp, pp=pp))
                layers = self._layers(blocks)
                if layers is not None:
                    yield _group(blocks, layers, chunks)

    def _training_order(self, kind: str) -> list[int]:
        """The classes of a kind, those with devices that must train first."""
        mine = [i for i, c in enumerate(self.classes) if c.place.kind == kind]
        return sorted(mine, key=lambda i: not self.classes[i].must_train)

    def _layers(self, blocks: Sequence[BlockShape]) -> tuple[int, ...] | None:
        """Layers by stage: in proportion to devices where kinds are mixed, else those of the plan space (even, less the
        vocabulary projection)."""
        if len(blocks) < 2:
            return self.columns.split(blocks) if blocks else None
        weights = [float(b.dp * b.tp) for b in blocks for _ in range(b.pp)]
        return split_layers(self.problem.model.layers, weights)

    def _seconds(self, group: GroupLayout) -> float | None:
        """Seconds of all tasks but generation; None where they do not fit."""
        plan = materialise_groups(self.classes, (group,), (), None)
        found = self.cost.trainer(self.cost.trainer_shape(plan.sides[0], self.cost.side_tasks))
        return None if found is None else side_s((found,))

    def used(self, group: GroupLayout) -> Counts:
        """Devices by class that a trainer takes."""
        out = [0] * len(self.classes)
        for s in group.stages:
            for i in s.chunks:
                out[i] += s.tp
        return tuple(out)

    def replicas(self, counts: Sequence[int], tp: int, level: int = 0) -> tuple[ReplicaLayout, ...]:
        """As many replicas of that TP as fit on the devices; a kind on which none fits stays idle."""
        out: list[ReplicaLayout] = []
        for kind in dict.fromkeys(c.place.kind for c in self.classes):
            shapes = [s for s in replica_shapes(self.cost, self.classes, kind) if s.tp == tp]
            if shapes:
                shape = min(shapes, key=lambda s: s.pp)
                chunks = chunks_of(counts, tp, [i for i, c in enumerate(self.classes) if c.place.kind == kind])
                for at in range(0, len(chunks) - shape.pp + 1, shape.pp):
                    out.append(ReplicaLayout(shape=shape, chunks=tuple(chunks[at : at + shape.pp]), level=level))
        return tuple(out)


def offer_valid(search: Search, plan: Plan) -> Scored | None:
    """Score a plan and offer it if it is better than the incumbent and the judge accepts it; None where it is refused.

    Every call counts as one evaluation. The judge is asked last because it takes longer than the cost model; what others do
    not improve on is only held against the overrides.
    """
    limits = role_limits(search.problem.overrides)
    if any(plan.role_of(d) != role for d, role in limits.items()):
        search.evaluations += 1
        return None
    scored = search.cost.evaluate(plan)
    if scored is not None and (search.best is None or search.better(scored, search.best)):
        if not violations(plan, search.problem):
            return search.offer(plan)
        scored = None
    search.evaluations += 1
    return scored


def chunks_of(counts: Sequence[int], tp: int, classes: Sequence[int]) -> list[int]:
    """The class of each group of `tp` devices that those classes hold."""
    return [i for i in classes for _ in range(counts[i] // tp)]


def _group(blocks: Sequence[BlockShape], layers: Sequence[int], chunks: Mapping[str, Sequence[int]]) -> GroupLayout:
    stages: list[StageLayout] = []
    for b in blocks:
        for s in range(b.pp):
            mine = tuple(chunks[b.kind][s * b.dp : (s + 1) * b.dp])
            stages.append(StageLayout(kind=b.kind, tp=b.tp, layers=layers[len(stages)], chunks=mine))
    return GroupLayout(tasks=(), stages=tuple(stages))


def balanced_cut(low: int, high: int, plan: Callable[[int], Scored | None]) -> None:
    """Bisection on the number of training devices until the two sides take equally long; a few beside the last are tried.

    `plan(n)` offers the plan of n training devices. Where none fits, more are tried.
    """
    tried: set[int] = set()

    def visit(n: int) -> Scored | None:
        tried.add(n)
        return plan(n)

    first, last, at = low, high, (low + high) // 2
    while first <= last:
        at = (first + last) // 2
        found = visit(at)
        if found is None or found.prediction.train_s > found.prediction.rollout_s:
            first = at + 1
        else:
            last = at - 1
    for n in (at - 2, at - 1, at + 1, at + 2):
        if low <= n <= high and n not in tried:
            visit(n)
