"""What generation loses to groups of tasks on devices that both use in turn: an estimate that ranks ways, not a bound.

A group that leaves room for a replica's weights on its devices takes memory of the replica's KV cache and so lowers its
rate; a group that leaves none takes the devices. `planner.batch` knows room and models of every candidate; here a device's tokens in
a window are a table over the bytes held, and the loss of a group is a sum over its two blocks.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.cost.decode import ReplicaShape
from planner.cost.memory import replica_resident_bytes
from planner.cost.model import CostModel
from planner.plan import Task
from planner.record import record
from planner.sides import Sides, Way
from planner.space import DeviceClass, replica_shapes

Array = NDArray[np.float64]
_POINTS = 9  # bytes held for which a device's tokens are computed, from none to all of its memory
_SPLITS = 200  # divisions of a cell's devices that are looked at
_EACH = 4  # ways of each that are kept


@record
class HostedWay:
    """A way with an estimate of the period beside replicas, and what those may hold on each block without slowing a group."""

    period_s: float
    way: Way
    room_bytes: tuple[tuple[float, ...], ...]  # by group and block


class Hosting:
    """Estimates for one problem at one window of generation."""

    def __init__(
        self,
        cost: CostModel,
        sides: Sides,
        classes: Sequence[DeviceClass],
        links: Mapping[str, Link],
        window_s: float,
    ) -> None:
        """`links`: by kind, that over which new weights come."""
        self.sides, self.window_s = sides, window_s
        self._held = np.linspace(0.0, max(k.memory_bytes for k in cost.problem.cluster.kinds.values()), _POINTS)
        tables: list[list[Array]] = []
        self._levels: list[Array] = []  # by kind, what a replica of some shape holds, ascending
        for k in sides.kinds:
            shapes = [s for s in replica_shapes(cost, classes, k) if s.pp == 1]
            by_size = sorted((replica_resident_bytes(cost.context, s.tp, s.pp), s.tp, s) for s in shapes)
            least = np.zeros(_POINTS)
            rows = [least]
            for _, _, shape in by_size:  # a device with more room may also host what needs less
                rows.append(np.maximum(rows[-1], self._tokens(cost, shape, links[k], window_s)))
            self._levels.append(np.array([held for held, _, _ in by_size]))
            tables.append(rows)
        self._tables = tables
        count = {k: sum(c.size for c in classes if c.place.kind == k) for k in sides.kinds}
        self._alone = np.array([t[-1][0] for t in tables])
        self.total = float(sum(count[k] * a for k, a in zip(sides.kinds, self._alone, strict=True)))
        self._losses: dict[tuple[tuple[Task, ...], int], Array] = {}

    def _tokens(self, cost: CostModel, shape: ReplicaShape, link: Link, window_s: float) -> Array:
        """Tokens of one device of a replica in a window, beside `_held` bytes."""
        each = (cost.offers(shape, link, float(b)) for b in self._held)
        most = [max((cost.rules.tokens_in(o, window_s) for o in offers), default=0.0) for offers in each]
        return np.array(most) / shape.devices

    def losses(self, group: tuple[Task, ...], usage: int) -> Array:
        """The part of all tokens that each candidate of a group on those devices takes away."""
        key = (group, usage)
        if key not in self._losses:
            at = slice(self.sides.starts[usage], self.sides.starts[usage + 1])
            memory, kinds = self.sides.memory[group][:, at], self.sides.block_kinds[at]
            lost = np.zeros(memory.shape[1])
            for b in (0, 1):
                for k in set(kinds[:, b].tolist()) - {-1}:
                    rows = np.flatnonzero(kinds[:, b] == k)
                    level = np.searchsorted(self._levels[k], memory[b, rows], side="right")
                    hosted = np.zeros(len(rows))
                    for x in np.unique(level):
                        some = level == x
                        hosted[some] = np.interp(memory[2 + b, rows[some]], self._held, self._tables[k][x])
                    lost[rows] += self.sides.usage[usage, k] * (self._alone[k] - hosted)
            self._losses[key] = lost / self.total
        return self._losses[key]

    def ways(self, used: tuple[int, ...], actor: tuple[bool, ...], below_s: float) -> list[HostedWay]:
        """Ways on exactly these devices whose period is estimated below `below_s`, in no order: of each division of the
        devices the best few."""
        found: list[HostedWay] = []
        sides, window = self.sides, self.window_s
        for _, tasks, i, j in sides.splits(used, actor, below_s - window)[:_SPLITS]:
            at = [x for x in (i, j) if x >= 0]
            parts = [self._parts(g, x) for g, x in zip(tasks, at, strict=True)]
            if len(parts) == 1:
                side = (parts[0][0] + parts[0][1])[:, None]
                lost = parts[0][2][:, None]
            else:
                side = np.maximum.outer(parts[0][0], parts[1][0]) + np.maximum.outer(parts[0][1], parts[1][1])
                lost = np.add.outer(parts[0][2], parts[1][2])
            with np.errstate(divide="ignore"):
                period = side + np.where(lost < 1, window / np.maximum(1 - lost, 1e-9), np.inf)
            flat = np.argpartition(period, min(_EACH, period.size) - 1, axis=None)[:_EACH]
            for x, y in (divmod(int(f), period.shape[1]) for f in flat):
                if period[x, y] < below_s:
                    found.append(self._way(tasks, at, (x, y), float(side[x, y]), float(period[x, y])))
        return found

    def _parts(self, group: tuple[Task, ...], usage: int) -> tuple[Array, Array, Array]:
        at = slice(self.sides.starts[usage], self.sides.starts[usage + 1])
        score, train = self.sides.seconds[group]
        return score[at], train[at], self.losses(group, usage)

    def _way(
        self,
        tasks: tuple[tuple[Task, ...], ...],
        usages: Sequence[int],
        at: Sequence[int],
        side_s: float,
        period_s: float,
    ) -> HostedWay:
        positions = [int(self.sides.starts[u]) + x for u, x in zip(usages, at, strict=False)]
        blocks = tuple(self.sides.candidate(p) for p in positions)
        rooms = tuple(
            tuple(float(x) for x in self.sides.memory[g][2 - len(b) : 2, p])
            for g, b, p in zip(tasks, blocks, positions, strict=True)
        )
        return HostedWay(period_s=period_s, way=Way(side_s=side_s, tasks=tasks, blocks=blocks), room_bytes=rooms)
