"""The candidates of `hetrl-ilp`: groups of tasks with a parallel layout on device classes, and replicas beside them.

On fleets of up to `SMALL` devices every layout on classes is a candidate, so the optimum over them is that of the plan space.
On larger ones machines that look alike form a *pool*; candidates are counts of a pool's devices, whole machines first, with
the best layout found there, on one pool or, by whole machines, on two of different kinds: a coarser space, and said to be so.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

from planner.cost.memory import replica_resident_bytes
from planner.cost.training import TrainerCost
from planner.placing import StageLayout
from planner.plan import Task
from planner.record import record
from planner.schedulers.hetrl.layout import GroupLayout
from planner.schedulers.hetrl.ways import Ways
from planner.space import BlockShape, DeviceClass, block_shapes, replica_shapes
from planner.workflow import TRAINING, side_tasks

SMALL = 8  # devices

Pools = tuple[tuple[int, ...], ...]  # classes by pool


@record
class Slot:
    """What a device offers to a replica: a device of generation's own holds nothing and takes anything."""

    pool: int
    held_bytes: float = 0.0
    takes_bytes: float = float("inf")


@record
class Candidate:
    """A group of tasks on devices of pools, and its time. `hosts`: by stage, the largest replica it makes room for."""

    layout: GroupLayout
    used: tuple[int, ...]  # devices by pool
    score_s: float
    train_s: float  # without scoring
    slots: tuple[tuple[Slot, int, int], ...] = ()  # slot, stage, devices

    @property
    def seconds(self) -> float:
        """Both phases."""
        return self.score_s + self.train_s


def pools_of(classes: Sequence[DeviceClass]) -> tuple[Pools, bool]:
    """The pools, and whether they are exact: one class each."""
    if sum(c.size for c in classes) <= SMALL:
        return tuple((i,) for i in range(len(classes))), True
    found: dict[tuple[object, ...], list[int]] = {}
    for i, c in enumerate(classes):
        alone = i if c.must_train or c.must_roll else -1
        found.setdefault((c.place.kind, c.place.region, c.size, alone), []).append(i)
    return tuple(tuple(ix) for ix in found.values()), False


class Candidates:
    """All candidates of one problem, dominated ones dropped."""

    def __init__(self, ways: Ways) -> None:
        self.ways, self.classes = ways, ways.classes
        self.cost, self.problem = ways.cost, ways.cost.problem
        self.pools, self.exact = pools_of(self.classes)
        self.pool_of = {i: p for p, ix in enumerate(self.pools) for i in ix}
        self.shared = self.problem.capabilities.colocate and self.problem.workload.synchronous
        kinds = dict.fromkeys(c.place.kind for c in self.classes)
        self.shapes = {k: replica_shapes(self.cost, self.classes, k) for k in kinds}
        self.groups = tuple(self._subsets())
        self.found = tuple(c for g in self.groups for c in self._of(g))

    def _subsets(self) -> Iterator[tuple[Task, ...]]:
        """Every set of tasks that may be a group."""
        tasks = side_tasks(self.problem.workload)
        most = self.problem.capabilities.task_groups
        for n in range(1, len(tasks) + 1):
            if most > 1 or n == len(tasks):
                yield from itertools.combinations(tasks, n)

    def _of(self, tasks: tuple[Task, ...]) -> list[Candidate]:
        best: dict[tuple[object, ...], list[Candidate]] = {}
        for layout in self._every(tasks) if self.exact else self._coarse(tasks):
            for c in self._hosting(layout):
                key = (c.used, tuple(sorted(Counter({s: n for s, _, n in c.slots}).items(), key=repr)))
                rivals = best.setdefault(key, [])
                if not any(r.score_s <= c.score_s and r.train_s <= c.train_s for r in rivals):
                    rivals[:] = [r for r in rivals if r.score_s < c.score_s or r.train_s < c.train_s]
                    rivals.append(c)
        return [c for rivals in best.values() for c in rivals]

    def _room(self, i: int) -> int:
        return self.classes[i].size - len(self.classes[i].must_roll)

    def _most(self) -> int:
        most = sum(c.size for c in self.classes) - (0 if self.shared else 1)
        return min(most, self.problem.capabilities.train_max_devices or most)

    def _every(self, tasks: tuple[Task, ...]) -> Iterator[GroupLayout]:
        """Every block of one kind, every pair of two, in every arrangement on classes."""
        kinds = list(self.shapes)
        most = self._most()
        options = {}
        for k in kinds:
            sizes = tuple(self._room(i) for i, c in enumerate(self.classes) if c.place.kind == k)
            options[k] = block_shapes(self.problem, k, sizes, min(most, sum(sizes)))
        blocks: list[tuple[BlockShape, ...]] = [(b,) for bs in options.values() for b in bs]
        if self.problem.capabilities.train_max_kinds >= 2:
            for ka, kb in itertools.permutations(kinds, 2):
                pairs = itertools.product(options[ka], options[kb])
                blocks += [p for p in pairs if sum(b.devices for b in p) <= most]
        for bs in blocks:
            layers = self.ways.columns.split(bs, tasks)
            if layers is None:
                continue
            stages = [b for b in bs for _ in range(b.pp)]
            for chunks in self._arranged(stages, [self._room(i) for i in range(len(self.classes))]):
                yield GroupLayout(
                    tasks=tasks,
                    stages=tuple(
                        StageLayout(kind=b.kind, tp=b.tp, layers=n, chunks=at)
                        for b, n, at in zip(stages, layers, chunks, strict=True)
                    ),
                )

    def _arranged(self, stages: Sequence[BlockShape], left: list[int]) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The classes of the TP groups of every stage, in every way the devices left allow."""
        if not stages:
            yield ()
            return
        b = stages[0]
        mine = [i for i, c in enumerate(self.classes) if c.place.kind == b.kind and left[i] >= b.tp]
        for at in itertools.combinations_with_replacement(mine, b.dp):
            need = Counter(at)
            if all(left[i] >= n * b.tp for i, n in need.items()):
                rest = [n - need[i] * b.tp for i, n in enumerate(left)]
                for others in self._arranged(stages[1:], rest):
                    yield (at, *others)

    def _coarse(self, tasks: tuple[Task, ...]) -> Iterator[GroupLayout]:
        """The best layouts on counts of one pool; where the group trains, on whole machines of two pools too."""
        sizes = [self._steps(p) for p in range(len(self.pools))]
        wanted = [{p: n} for p in range(len(self.pools)) for n in sizes[p][0]]
        if set(tasks) & set(TRAINING) and self.problem.capabilities.train_max_kinds >= 2:
            for p, q in itertools.combinations(range(len(self.pools)), 2):
                if self.classes[self.pools[p][0]].place.kind != self.classes[self.pools[q][0]].place.kind:
                    wanted += [{p: n, q: m} for n in sizes[p][1] for m in sizes[q][1]]
        for by_pool in wanted:
            if sum(by_pool.values()) > self._most():
                continue
            counts = self.filled(by_pool, [self._room(i) for i in range(len(self.classes))])
            for blocks in self.ways.of(tasks, counts)[:2] if counts is not None else ():
                assert counts is not None
                chunks = self.ways.chunks(blocks, counts, range(len(counts)))
                layout = self.ways.lay_out(tasks, blocks, chunks) if chunks is not None else None
                if layout is not None:
                    yield layout

    def _steps(self, pool: int) -> tuple[list[int], list[int]]:
        """Counts of a pool to consider: powers of two inside a machine and whole machines; whole machines."""
        size = self.classes[self.pools[pool][0]].size
        total = sum(self._room(i) for i in self.pools[pool])
        whole = list(range(size, total + 1, size))
        parts = [n for n in (1, 2, 3, 4, 6) if n < min(size, total + 1)]
        extra = [total] if total not in whole and total > 0 else []
        return sorted({*parts, *whole, *extra}), sorted({*whole, *extra})

    def filled(self, by_pool: dict[int, int], left: Sequence[int]) -> tuple[int, ...] | None:
        """Devices by class for counts by pool: the fullest machines first; None where there are too few."""
        out = [0] * len(self.classes)
        for p, n in by_pool.items():
            for i in sorted(self.pools[p], key=lambda i: (-left[i], i)):
                out[i] = min(left[i], n - sum(out[j] for j in self.pools[p]))
            if sum(out[j] for j in self.pools[p]) < n:
                return None
        return tuple(out)

    def _hosting(self, layout: GroupLayout) -> Iterator[Candidate]:
        """The group alone; where replicas may share its devices, with room for every size of them on each stage too."""
        none = tuple(0.0 for _ in layout.stages)
        alone = self.ways.cost_of(layout)
        if alone is None:
            return
        if not self.shared:
            yield self._candidate(layout, alone, None)
            return
        sizes = [self._resident_bytes(s.kind) for s in layout.stages]
        largest = tuple(max(s, default=0.0) for s in sizes)
        full = self.ways.cost_of(layout, largest)
        if full is not None and full.train_s <= alone.train_s:
            yield self._candidate(layout, full, largest)
            return
        every = itertools.product(*([0.0, *s] for s in sizes)) if self.exact else (none, largest)
        for beside in every:
            cost = self.ways.cost_of(layout, beside)
            if cost is not None:
                yield self._candidate(layout, cost, tuple(beside))

    def _resident_bytes(self, kind: str) -> list[float]:
        ctx = self.cost.context
        return sorted({replica_resident_bytes(ctx, s.tp, s.pp) for s in self.shapes[kind]})

    def _candidate(self, layout: GroupLayout, cost: TrainerCost, hosts: tuple[float, ...] | None) -> Candidate:
        used = [0] * len(self.pools)
        slots: list[tuple[Slot, int, int]] = []
        for k, s in enumerate(layout.stages):
            for p, n in sorted(Counter(self.pool_of[i] for i in s.chunks).items()):
                used[p] += n * s.tp
                if hosts is not None and hosts[k] > 0:
                    slot = Slot(pool=p, held_bytes=cost.resident_bytes[k], takes_bytes=hosts[k])
                    slots.append((slot, k, n * s.tp))
        return Candidate(
            layout=layout,
            used=tuple(used),
            score_s=cost.score_s,
            train_s=cost.train_s - cost.score_s,
            slots=tuple(slots),
        )
