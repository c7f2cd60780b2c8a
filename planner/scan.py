"""The plan space as a scan: trainer columns T(u) on counts of devices by kind, against what the other devices can generate.

The counterpart of a trainer on `u` devices by kind is a knapsack over replica shapes for each kind. Where devices lie is
relaxed in favour of the plan: stages on as few machines as possible, the fastest link wherever there is a choice, replicas
packed without regard to machines. So the period of a cell is a lower bound for every plan whose trainer takes just these
devices, and the cells in ascending order are both the proof of a bound and the order in which to look for plans.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.cluster import Link
from planner.columns import Columns
from planner.cost.model import CostModel
from planner.cost.network import Spread, best_link, link_between, local_link
from planner.cost.step import Offer
from planner.cost.training import StageShape, TrainerShape
from planner.record import record
from planner.space import BlockShape, DeviceClass, block_shapes, replica_shapes

_STRIDE = 1.5  # a period is sought in steps of this factor, so that cells far from the optimum cost little
_HALVINGS = 48  # relative precision far below any margin


@record
class Cell:
    """Trainers on the same devices by kind."""

    used: tuple[int, ...]
    train_s: float
    blocks: tuple[tuple[BlockShape, ...], ...] = ()  # not yet costed: `train_s` is a lower bound


@dataclass(slots=True)
class _Entry:
    """A cell in the queue. `settled`: its key is the period for the trainer time known, not just a lower bound of it."""

    cell: Cell
    work: Callable[[float], float] | None = None
    settled: bool = False


class Scan:
    """All cells of one problem."""

    def __init__(self, cost: CostModel, classes: Sequence[DeviceClass]) -> None:
        self.cost, self.classes = cost, classes
        self.cluster = cost.problem.cluster
        self.kinds = tuple(dict.fromkeys(c.place.kind for c in classes))
        self.of_kind = {k: tuple(c for c in classes if c.place.kind == k) for k in self.kinds}
        self.count = [sum(c.size for c in self.of_kind[k]) for k in self.kinds]
        self.must_train = [sum(len(c.must_train) for c in self.of_kind[k]) for k in self.kinds]
        self.must_roll = [sum(len(c.must_roll) for c in self.of_kind[k]) for k in self.kinds]
        self.shapes = {k: replica_shapes(cost, classes, k) for k in self.kinds}
        self.columns = Columns(cost)
        self._links: dict[tuple[str, str], Link] = {}

    def ascending(self, below_s: Callable[[], float] = lambda: float("inf")) -> Iterator[tuple[float, Cell]]:
        """(period in seconds, cell), shortest period first, as long as it is less than `below_s()` is by then.

        Lazy: a cell is costed no further than its turn demands.
        """
        ticket = itertools.count()
        queue: list[tuple[float, int, _Entry]] = []

        def push(low_s: float, entry: _Entry) -> None:
            heapq.heappush(queue, (low_s, next(ticket), entry))

        for cell in self._cells():
            push(cell.train_s, _Entry(cell))
        while queue:
            low_s, _, entry = heapq.heappop(queue)
            if low_s >= below_s():
                return
            cell = entry.cell
            if entry.settled and not cell.blocks:
                yield low_s, cell
            elif entry.settled:
                train_s = self._cell_s(cell)
                if train_s is not None:
                    push(max(low_s, train_s), _Entry(Cell(used=cell.used, train_s=train_s)))
            else:
                work = entry.work or self._work_of(cell)
                if work is not None:
                    found, settled = self._closer_s(low_s, work)
                    push(found, _Entry(cell, work=work, settled=settled))

    def _closer_s(self, low_s: float, work: Callable[[float], float]) -> tuple[float, bool]:
        """A better lower bound of a period that is at least `low_s`, and whether it is the period itself."""
        need = self.cost.rules.work_tokens
        if work(low_s) >= need:
            return low_s, True
        high_s = _STRIDE * low_s
        if work(high_s) < need:
            return high_s, False
        for _ in range(_HALVINGS):
            middle = (low_s + high_s) / 2
            if work(middle) >= need:
                high_s = middle
            else:
                low_s = middle
        return low_s, True  # the lower end, to stay on the safe side

    def _cells(self) -> Iterator[Cell]:
        caps = self.cost.problem.capabilities
        options = {
            k: block_shapes(self.cost.problem, k, tuple(c.size for c in self.of_kind[k]), n)
            for k, n in zip(self.kinds, self.count, strict=True)
        }
        alone: dict[tuple[int, ...], float] = {}
        for i, k in enumerate(self.kinds):
            for b in options[k]:
                used = tuple(b.devices if j == i else 0 for j in range(len(self.kinds)))
                if self._allowed(used) and (t := self._train_s((b,))) is not None:
                    alone[used] = min(t, alone.get(used, t))
        yield from (Cell(used=u, train_s=t) for u, t in alone.items())
        if caps.train_max_kinds < 2:
            return
        for i, j in itertools.combinations(range(len(self.kinds)), 2):
            yield from self._pairs(i, j, options[self.kinds[i]], options[self.kinds[j]])

    def _pairs(self, i: int, j: int, left: Sequence[BlockShape], right: Sequence[BlockShape]) -> Iterator[Cell]:
        """Cells of two kinds, with the least of their lower bounds."""
        link = self._best_link(self.kinds[i], self.kinds[j])
        forth, back = self.columns.pair_bounds_s(left, right, link), self.columns.pair_bounds_s(right, left, link)
        bounds = np.minimum(forth, back.T)
        found: dict[tuple[int, int], tuple[float, list[tuple[BlockShape, BlockShape]]]] = {}
        for x, a in enumerate(left):
            for y, b in enumerate(right):
                key = (a.devices, b.devices)
                low, pairs = found.get(key, (float("inf"), []))
                pairs.append((a, b))
                found[key] = (min(low, float(bounds[x, y])), pairs)
        for (na, nb), (low, pairs) in found.items():
            used = tuple(na if k == i else nb if k == j else 0 for k in range(len(self.kinds)))
            if self._allowed(used):
                yield Cell(used=used, train_s=low, blocks=tuple(p for a, b in pairs for p in ((a, b), (b, a))))

    def _cell_s(self, cell: Cell) -> float | None:
        """The fastest trainer of a cell of pairs; None when none fits."""
        best = float("inf")
        for pair in cell.blocks:
            link = self._best_link(pair[0].kind, pair[1].kind)
            if self.columns.bound_s(pair, (link,)) < best and (t := self._train_s(pair)) is not None:
                best = min(best, t)
        return best if best < float("inf") else None

    def _allowed(self, used: tuple[int, ...]) -> bool:
        limit = self.cost.problem.capabilities.train_max_devices
        if limit is not None and sum(used) > limit:
            return False
        if sum(self.count) <= sum(used):
            return False
        return all(
            m <= u <= n - r for u, n, m, r in zip(used, self.count, self.must_train, self.must_roll, strict=True)
        )

    def _train_s(self, blocks: tuple[BlockShape, ...]) -> float | None:
        """Seconds of a trainer that lies as well as it could."""
        layers = self.columns.split(blocks)
        if layers is None:
            return None
        stages: list[StageShape] = []
        for b in blocks:
            spread = self._best_spread(b)
            if spread is None:
                return None
            for _ in range(b.pp):
                stages.append(StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=layers[len(stages)], spread=spread))
        links = tuple(self._best_link(a.kind, b.kind) for a, b in itertools.pairwise(stages))
        found = self.cost.trainer(TrainerShape(stages=tuple(stages), links=links))
        return None if found is None else found.train_s

    def _best_spread(self, block: BlockShape) -> Spread | None:
        """One stage of the block on the fewest machines."""
        left, nodes = block.dp, 0
        for size in sorted((c.size for c in self.of_kind[block.kind]), reverse=True):
            if left <= 0:
                break
            left -= size // block.tp
            nodes += 1
        if left > 0:
            return None
        local = local_link(self.cluster, self.cluster.kinds[block.kind])
        return Spread(nodes=nodes, local=local, remote=self._remote(block.kind) if nodes > 1 else None)

    def _remote(self, kind: str) -> Link:
        """The fastest link between two machines of a kind."""
        pairs = itertools.combinations(self.of_kind[kind], 2)
        links = [link_between(self.cluster, a.place, b.place) for a, b in pairs if a.place.node != b.place.node]
        return max(links, key=lambda link: (link.bytes_per_s, -link.latency_s), default=self.cluster.same_kind)

    def _best_link(self, a: str, b: str) -> Link:
        return best_link(self.cluster, tuple(c.place for c in self.of_kind[a]), tuple(c.place for c in self.of_kind[b]))

    def _offers(self, kind: str, used: tuple[int, ...]) -> list[tuple[int, tuple[Offer, ...]]]:
        """(devices, offers) of each replica shape of a kind, weights coming over the best link from the trainer."""
        links = [self._best_link(k, kind) for k, n in zip(self.kinds, used, strict=True) if n]
        link = max(links, key=lambda x: (x.bytes_per_s, -x.latency_s))
        return [(s.devices, self.cost.offers(s, link)) for s in self.shapes[kind]]

    def _work_of(self, cell: Cell) -> Callable[[float], float] | None:
        """Most tokens that what a cell leaves can give in a period; None when nothing can roll out."""
        columns = [self._offers(k, cell.used) for k in self.kinds]
        room = [n - max(u, m) for n, u, m in zip(self.count, cell.used, self.must_train, strict=True)]
        if not any(n >= size and offers for cols, n in zip(columns, room, strict=True) for size, offers in cols):
            return None
        return self._work(columns, room, cell.train_s)

    def _work(
        self, columns: list[list[tuple[int, tuple[Offer, ...]]]], room: list[int], train_s: float
    ) -> Callable[[float], float]:
        """Most tokens the devices left give in a period: an unbounded knapsack over shapes for each kind."""
        rules = self.cost.rules
        lost = rules.window_s(0.0, train_s)
        kinds = [
            (
                n,
                [
                    (
                        size,
                        [(rules.required_s(o, train_s), o.level.rate_tokens_per_s, o.pause_s - lost) for o in offers],
                    )
                    for size, offers in cols
                    if size <= n
                ],
            )
            for cols, n in zip(columns, room, strict=True)
            if n > 0
        ]

        def work(period: float) -> float:
            total, limit = 0.0, period * (1 + 1e-12)
            for devices, shapes in kinds:
                values = [
                    (size, max((rate * (period - pause) for need, rate, pause in rows if need <= limit), default=0.0))
                    for size, rows in shapes
                ]
                total += _knapsack([(s, v) for s, v in values if v > 0], devices)
            return total

        return work


def _knapsack(values: list[tuple[int, float]], devices: int) -> float:
    """The largest sum of values whose sizes add up to at most `devices`."""
    if len(values) <= 1:
        return devices // values[0][0] * values[0][1] if values else 0.0
    table = [0.0] * (devices + 1)
    for n in range(1, devices + 1):
        table[n] = max((table[n - s] + v for s, v in values if s <= n), default=0.0)
    return table[devices]
