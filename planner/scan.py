"""The plan space as a scan: trainers against what the other devices can generate, best period first.

Cells of trainers (`planner.trainers`) are paired with a knapsack over replica shapes (`planner.pairing`). Where devices
lie is relaxed in favour of the plan, but for the regions: stages on the best number of machines, the fastest link
wherever there is a choice, replicas packed without regard to machines. So the period of a cell is a lower bound for every plan
with that trainer, and the cells in ascending order are both the proof of a bound and the order in which to look for plans.

The frontier is a set of boxes that always cover the whole space, each with a lower bound of its periods; the lowest are
looked at more closely until the lowest is a single trainer, costed whole. It can be stopped at any moment: the lowest
bound in it holds.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.columns import Columns
from planner.cost.model import CostModel
from planner.ideal import IdealTrainer
from planner.lanes import Table
from planner.pairing import Pairing
from planner.pools import Pools
from planner.record import record
from planner.sides import few_shapes
from planner.sidescan import SideScan
from planner.space import BlockShape, DeviceClass, device_classes
from planner.trainers import ANY, FIRST, HIGH, HIGH2, LOW, LOW2, NONE, SECOND, SITES, TrainerBoxes

# Boxes looked at together: those near to the lowest, but not fewer or more than so many.
_FEW, _BATCH, _NEAR = 48, 512, 1.01
_COARSE, _FINE = 12, 48  # halvings: relative precision of the period of a box, and of a trainer
_EQUAL = 1 + 1e-12
_TIGHTENED, _COSTED = 64, 8  # trainers bounded more tightly, and costed whole, at a time
# What the bound of a box is of: training only; the pairing; its one trainer costed whole; the pairing of that.
_BOUNDED, _PAIRED, _COSTED_WHOLE, _SETTLED = range(4)


@record
class Cell:
    """A trainer and where it lies: the set of sites, each one region or several taken for one."""

    used: tuple[int, ...]  # devices by kind
    train_s: float
    blocks: tuple[BlockShape, ...]
    sites: tuple[tuple[str, ...], ...]


class Scan:
    """All cells of one problem, in ascending order. Remembers how far it has come."""

    def __init__(
        self,
        cost: CostModel,
        classes: Sequence[DeviceClass],
        *,
        columns: Columns | None = None,
        tables: dict[tuple[str, int], Table] | None = None,
    ) -> None:
        self.cost, self.classes = cost, tuple(classes)
        self.columns = columns or Columns(cost)
        self.tables: dict[tuple[str, int], Table] = {} if tables is None else tables
        self.pools = Pools(cost.problem.cluster, classes)
        self.kinds = self.pools.kinds
        self.count = [int(n) for n in self.pools.count.sum(axis=1)]
        self.boxes = TrainerBoxes(cost, self.pools, self.columns, self.tables)
        self.pairing = Pairing(cost, self.pools, self.boxes.combinations)
        self.ideal = IdealTrainer(self.columns, self.pools, self.boxes.lanes)
        self.steps = 0
        self._out: list[tuple[float, Cell]] = []
        self._low = np.zeros(0)  # [c] lower bound of the period
        self._train = np.zeros(0)  # [c] of the trainer
        self._state = np.zeros(0, dtype=np.int64)
        self._box = np.zeros((0, 8), dtype=np.int64)
        self._free = np.zeros(0, dtype=np.int64)  # rows of no box
        first = self.boxes.first()
        self._add(first, np.zeros(len(first)))

    def rescan(self, classes: Sequence[DeviceClass]) -> "Scan":
        """The scan of the same problem on other devices (a machine more, one lost): what blocks cost is kept."""
        return Scan(self.cost, classes, columns=self.columns, tables=self.tables)

    def ascending(
        self, below_s: Callable[[], float] = lambda: float("inf"), *, steps: int | None = None
    ) -> Iterator[tuple[float, Cell]]:
        """(period in seconds, cell), shortest period first, as long as it is less than `below_s()` is by then, and for at most
        `steps` looks at the frontier.

        Lazy: a cell is costed no further than its turn demands.
        """
        at, first = 0, self.steps
        while True:
            while at >= len(self._out):
                if self.lowest_s() >= below_s() or (steps is not None and self.steps - first >= steps):
                    return
                self._advance()
            if self._out[at][0] >= below_s():
                return
            yield self._out[at]
            at += 1

    def likely(self, count: int) -> Iterator[Cell]:
        """Cells from the lowest boxes of the frontier, one each: where to look when it takes too long to prove an order."""
        for i in np.argsort(self._low, kind="stable")[:count]:
            box = self._box[i].copy()
            if np.isinf(self._low[i]) or box[SECOND] == ANY:
                continue
            box[LOW] = box[HIGH] = (box[LOW] + box[HIGH]) // 2
            box[LOW2] = box[HIGH2] = (box[LOW2] + box[HIGH2]) // 2
            yield self._cell(box, float(self._train[i]))

    def lowest_s(self) -> float:
        """No cell still to come has a shorter period; infinite when none is to come."""
        return float(self._low.min(initial=np.inf))

    def bound_s(self, steps: int, should_stop: Callable[[], bool] = lambda: False) -> tuple[float, bool] | None:
        """A lower bound of all periods after at most `steps` more looks at the frontier, and whether a cell attains it.

        None where there is no cell at all.
        """
        for _ in range(steps):
            if self._out or self.lowest_s() == np.inf or should_stop():
                break
            self._advance()
        if self._out:
            return self._out[0][0], True
        return (self.lowest_s(), False) if self.lowest_s() < np.inf else None

    def _add(self, boxes: NDArray[np.int64], low_s: NDArray[np.float64]) -> None:
        """Put boxes on the frontier whose periods are at least `low_s` [c]."""
        cells = self.boxes.cells(boxes)
        keep = np.isfinite(cells.train_s)
        keep[keep] &= ~self.pairing.hopeless(cells.at(keep))
        boxes, train = boxes[keep], cells.train_s[keep]
        low = np.maximum(train, low_s[keep])
        # Rows of dropped boxes are used again: the frontier is long and changes in few places.
        reused, self._free = self._free[: len(low)], self._free[len(low) :]
        n = len(reused)
        self._low[reused], self._train[reused], self._state[reused], self._box[reused] = (
            low[:n],
            train[:n],
            _BOUNDED,
            boxes[:n],
        )
        self._low = np.concatenate([self._low, low[n:]])
        self._train = np.concatenate([self._train, train[n:]])
        self._state = np.concatenate([self._state, np.full(len(low) - n, _BOUNDED)])
        self._box = np.concatenate([self._box, boxes[n:]])

    def _drop(self, rows: Sequence[int] | NDArray[np.int64]) -> None:
        gone = np.asarray(rows, dtype=np.int64)
        self._low[gone] = np.inf
        self._free = np.concatenate([self._free, gone])

    def _advance(self) -> None:
        """Look more closely at the lowest boxes."""
        self.steps += 1
        lowest = float(self._low.min())
        at_least = min(_FEW, len(self._low)) - 1
        limit = max(lowest * _NEAR, float(np.partition(self._low, at_least)[at_least]))
        near = np.flatnonzero((self._low <= limit) & (self._low < np.inf))
        near = near[np.argsort(self._low[near], kind="stable")][:_BATCH]
        # Of equals, as on a plateau that the staleness bound makes, the one that is known whole comes first.
        ready = near[(self._state[near] == _SETTLED) & (self._low[near] <= lowest * _EQUAL)]
        if len(ready):
            first = ready[0]
            self._out.append((float(self._low[first]), self._cell(self._box[first], float(self._train[first]))))
            self._drop([first])
            return
        state = self._state[near]
        single = self.boxes.single(self._box[near])
        rows = near[(state == _BOUNDED) | (state == _COSTED_WHOLE)]
        self._pair(rows)
        unfit = self._cost(near[(state == _PAIRED) & single][:_TIGHTENED])
        wide = near[(state == _PAIRED) & ~single]
        boxes, low_s = self._box[wide], self._low[wide]
        if len(wide) or unfit:
            self._drop([*wide, *unfit])
        if len(wide):
            halves, parent = self.boxes.halves(boxes)
            self._add(halves, low_s[parent])

    def _pair(self, rows: NDArray[np.int64]) -> None:
        """Bounds of the period in place of bounds of the training time."""
        whole = self._state[rows] == _COSTED_WHOLE
        for some, halvings, state in ((rows[~whole], _COARSE, _PAIRED), (rows[whole], _FINE, _SETTLED)):
            if len(some):
                cells = self.boxes.cells(self._box[some])
                cells = cells.with_train_s(self._train[some])
                found, settled = self.pairing.closer_s(cells, self._low[some], halvings)
                self._low[some] = found
                self._state[some[settled]] = state

    def _cost(self, rows: NDArray[np.int64]) -> list[int]:
        """Bound single trainers by how their layers are divided, or cost them whole; those that do not fit are returned."""
        unfit, costed = [], 0
        for i in rows:
            box = self._box[i]
            lanes = [int(box[FIRST])] + ([] if box[SECOND] == NONE else [int(box[SECOND])])
            blocks = self.boxes.blocks(box)
            mixed = self.boxes.is_mixed(box)
            seconds = float(self._train[i]) if mixed else self.ideal.least_s(int(box[SITES]), lanes, blocks)
            if seconds is not None and seconds <= self._low[i]:
                if costed == _COSTED:
                    continue
                costed += 1
                seconds = self.boxes.mixed.seconds(box) if mixed else self.ideal.seconds(int(box[SITES]), lanes, blocks)
                self._state[i] = _COSTED_WHOLE
            else:
                self._state[i] = _BOUNDED
            if seconds is None:
                unfit.append(int(i))
                continue
            self._train[i] = max(seconds, self._train[i])
            self._low[i] = max(self._low[i], seconds)
        return unfit

    def _cell(self, box: NDArray[np.int64], train_s: float) -> Cell:
        used = self.boxes.cells(box[None, :]).used[0]
        member = self.pools.member[box[SITES]]
        return Cell(
            used=tuple(int(n) for n in used),
            train_s=train_s,
            blocks=self.boxes.blocks(box),
            sites=tuple(g for g, here in zip(self.pools.sites, member, strict=True) if here),
        )


def scan_of(cost: CostModel) -> Scan | SideScan:
    """The scan of a problem, made once for its cost model: the bound and the scheduler share what each has found."""
    memory = vars(cost)
    if "_scan" not in memory:
        classes = device_classes(cost.problem)
        several = len(cost.side_tasks) > 1 or cost.shares_devices
        memory["_scan"] = SideScan(cost, classes) if several and few_shapes(cost, classes) else Scan(cost, classes)
    found = memory["_scan"]
    assert isinstance(found, Scan | SideScan)
    return found
