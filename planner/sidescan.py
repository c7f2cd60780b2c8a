"""The scan of workflows of several tasks: divisions of tasks and devices against what the other devices generate.

Cells are totals of devices by kind that do anything but generate (`planner.sides`), paired as `planner.scan` pairs trainers.
Where devices lie is relaxed, regions included. In sync modes with co-location every device may generate, whatever else it
does; the memory that models of other tasks hold there is relaxed too at first, and of the lowest cells put in last
(`planner.turns`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.cells import Cells
from planner.columns import Columns
from planner.cost.model import CostModel
from planner.pairing import Pairing
from planner.pools import Pools
from planner.record import record
from planner.sides import Sides
from planner.space import DeviceClass
from planner.turns import Turns

_BATCH, _NEAR = 512, 1.01  # cells looked at together: the lowest, and those this near to it
_COSTED = 4  # cells whose ways are looked at together
_HALVINGS = 48
_HOSTED_CELLS = 32  # whose bound is made to know of what lies on shared devices
T = TypeVar("T")
# What the bound of a cell is of: its side alone; the pairing of that; its best way; the pairing of that.
# Where devices are shared also with what lies on them.
_BOUNDED, _PAIRED, _COSTED_WHOLE, _SETTLED, _HOSTED = range(5)


@record
class SideCell:
    """Devices by kind that do anything but generate, the kinds that train the actor, and the least seconds so."""

    used: tuple[int, ...]
    actor: tuple[bool, ...]
    side_s: float
    window_s: float  # generation takes at least so long, with the memory of all devices to itself where they are shared


class SideScan:
    """All cells of one problem, in ascending order of their periods. Remembers how far it has come."""

    def __init__(self, cost: CostModel, classes: Sequence[DeviceClass]) -> None:
        self.cost, self.classes = cost, tuple(classes)
        self.columns = Columns(cost)
        self.sides = Sides(self.columns, classes)
        self.pools = Pools(cost.problem.cluster, classes)
        self.kinds = self.pools.kinds
        self.shared = cost.shares_devices
        used, actor, low = self.sides.cells()
        at = [self.sides.kinds.index(k) for k in self.kinds]
        used, actor = used[:, at].astype(np.int64), actor[:, at]
        must = self.pools.must_train.sum(axis=1)
        keep = (used >= must).all(axis=1)
        if not self.shared:
            keep &= used.sum(axis=1) < self.pools.count.sum()
        used, actor, low = used[keep], actor[keep], low[keep]
        # Replicas get new weights from the devices that train the actor.
        trained, which = np.unique(actor, axis=0, return_inverse=True)
        combinations = tuple(tuple(int(k) for k in np.flatnonzero(row)) for row in trained)
        everywhere = int(np.flatnonzero(self.pools.member.all(axis=1))[0]) if len(self.pools.member) else 0
        cells = Cells(
            used=used,
            train_s=low,
            sites=np.full(len(low), everywhere, dtype=np.int64),
            trained=np.asarray(which, dtype=np.int64).reshape(-1),
        )
        self.pairing = Pairing(cost, self.pools, combinations, free=self.shared) if len(low) else None
        if self.pairing is not None:
            hopeless = self.pairing.hopeless(self._free(cells))
            cells = cells.at(~hopeless)
        self._cells, self._actors = cells, trained
        self._low = cells.train_s.copy()
        self._state = np.full(len(self._low), _BOUNDED)
        self._window_s = np.zeros(len(self._low))
        self._out: list[tuple[float, SideCell]] = []
        self.turns, self._looks = Turns(cost, self.sides, self.classes), _HOSTED_CELLS

    def ascending(self, below_s: Callable[[], float] = lambda: float("inf")) -> Iterator[tuple[float, SideCell]]:
        """(period in seconds, cell), shortest period first, as long as it is less than `below_s()` is by then."""
        at = 0
        while True:
            while at >= len(self._out):
                if self.lowest_s() >= below_s():
                    return
                self._advance()
            if self._out[at][0] >= below_s():
                return
            yield self._out[at]
            at += 1

    def lowest_s(self) -> float:
        """No cell still to come has a shorter period; infinite when none is to come."""
        return float(self._low.min(initial=np.inf))

    def bound_s(self, steps: int, should_stop: Callable[[], bool] = lambda: False) -> tuple[float, bool] | None:
        """A lower bound of all periods after at most `steps` more looks, and whether a cell attains it; None where there
        is no cell."""
        for _ in range(steps):
            if self._out or not np.isfinite(self.lowest_s()) or should_stop():
                break
            self._advance()
        if self._out:
            return self._out[0][0], True
        return (self.lowest_s(), False) if np.isfinite(self.lowest_s()) else None

    def _advance(self) -> None:
        lowest = self.lowest_s()
        near = np.flatnonzero(self._low <= lowest * _NEAR)
        near = near[np.argsort(self._low[near], kind="stable")][:_BATCH]
        first = int(near[0])
        if self._state[first] == _SETTLED and self.shared and self._looks > 0:
            self._looks -= 1
            self._host(first)
            return
        if self._state[first] >= _SETTLED:
            self._out.append((lowest, self._cell(first)))
            self._low[first] = np.inf
            return
        state = self._state[near]
        self._pair(near[(state == _BOUNDED) | (state == _COSTED_WHOLE)])
        for i in near[state == _PAIRED][:_COSTED]:
            cell = self._cell(int(i))
            way = self.sides.best(self.in_order(cell.used), self.in_order(cell.actor), float("inf"))
            self._low[i] = np.inf if way is None else max(self._low[i], way.side_s)
            if way is not None:
                self._cells.train_s[i] = max(way.side_s, self._cells.train_s[i])
                self._state[i] = _COSTED_WHOLE

    def _cell(self, row: int) -> SideCell:
        cells = self._cells
        return SideCell(
            used=tuple(int(n) for n in cells.used[row]),
            actor=tuple(bool(x) for x in self._actors[cells.trained[row]]),
            side_s=float(cells.train_s[row]),
            window_s=float(self._window_s[row]),
        )

    def _host(self, row: int) -> None:
        """A bound that knows what lies on shared devices, in place of one that does not."""
        cell = self._cell(row)
        assert self.pairing is not None, "there is a cell"
        trained = tuple(i for i, x in enumerate(cell.actor) if x)
        several = len({c.place.region for c in self.classes}) > 1
        links = {k: self.pairing.home_link(trained, i, several=several) for i, k in enumerate(self.kinds)}
        used, actor = self.in_order(cell.used), self.in_order(cell.actor)
        self._low[row] = self.turns.closer_s(used, actor, cell.window_s, float(self._low[row]), links)
        self._state[row] = _HOSTED

    def _pair(self, rows: NDArray[np.int64]) -> None:
        if len(rows) and self.pairing is not None:
            found, settled = self.pairing.closer_s(self._free(self._cells).at(rows), self._low[rows], _HALVINGS)
            self._low[rows] = found
            done = rows[settled]
            self._state[done] += 1
            self._window_s[done] = np.maximum(self._low[done] - self._cells.train_s[done], 0.0)

    def _free(self, cells: Cells) -> Cells:
        """The cells as the pairing sees them: with the devices that nothing may generate on."""
        if not self.shared:
            return cells
        return Cells(used=np.zeros_like(cells.used), train_s=cells.train_s, sites=cells.sites, trained=cells.trained)

    def in_order(self, by_kind: Sequence[T]) -> tuple[T, ...]:
        """Figures by kind in the order of `sides.kinds`."""
        figures = dict(zip(self.kinds, by_kind, strict=True))
        return tuple(figures[k] for k in self.sides.kinds)
