"""Cells: ways to give devices to training, as arrays; and what they leave to replicas.

The seam between the two halves of the scan. Whoever enumerates trainers hands over `Cells`: for each cell the devices by
kind that train at least, the seconds a step takes to train at least, the set of sites where that happens and which kinds
take part. From these alone `planner.pairing` says the shortest period of every cell. A coarse cell stands for many: with
the least use of any of them and the least seconds of any of them its period bounds them all.
"""

import numpy as np
from numpy.typing import NDArray

from planner.knapsack import chain_counts, chain_value, is_chain, most_value
from planner.record import record

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@record
class Cells:
    """Axis c: cells. `used` [c, k] devices by kind that train, `train_s` [c]; both are the least where a cell is coarse."""

    used: Ints
    train_s: Floats
    sites: Ints  # [c] the set of sites the trainer lies in, a row of `Pools.member`
    trained: Ints  # [c] the kinds it takes, an index of the `combinations` the pairing was made with

    def at(self, rows: Ints | Flags) -> "Cells":
        """Some of the cells."""
        return Cells(
            used=self.used[rows], train_s=self.train_s[rows], sites=self.sites[rows], trained=self.trained[rows]
        )

    def with_train_s(self, train_s: Floats) -> "Cells":
        """The same cells with other training times."""
        return Cells(used=self.used, train_s=train_s, sites=self.sites, trained=self.trained)


@record
class Asked:
    """What replicas ask of the period of cells, whatever it is. [c, o]; in sync modes the transfer alone, [c, k]."""

    pause_s: Floats
    need_s: Floats  # the least period in which a replica may run

    def at(self, rows: Ints) -> "Asked":
        """Of some of the cells."""
        return Asked(pause_s=self.pause_s[rows], need_s=self.need_s[rows])


@record
class Room:
    """Devices of some kinds that cells leave to replicas of some sizes. Axes: c, k."""

    sizes: tuple[int, ...]
    devices: Ints
    counts: Ints  # [z, c, k] replicas of each size, of sizes that are a chain

    @classmethod
    def of(cls, sizes: tuple[int, ...], devices: Ints) -> "Room":
        """The room of so many devices [c, k]."""
        counts = (
            chain_counts(sizes, devices.ravel()) if is_chain(sizes) else np.zeros((0, devices.size), dtype=np.int64)
        )
        return cls(sizes=sizes, devices=devices, counts=counts.reshape(len(counts), *devices.shape))

    def at(self, rows: Ints) -> "Room":
        """Of some of the cells."""
        return Room(sizes=self.sizes, devices=self.devices[rows], counts=self.counts[:, rows])

    def tokens(self, values: Floats) -> Floats:
        """[c] the most that replicas worth `values` [c, k, z] give."""
        flat = values.reshape(-1, len(self.sizes))
        if len(self.counts):
            each = chain_value(self.sizes, flat, self.counts.reshape(len(self.sizes), -1))
        else:
            each = most_value(self.sizes, flat, self.devices.ravel())
        found: Floats = each.reshape(self.devices.shape).sum(axis=1)
        return found


@record
class Away:
    """What some cells leave of a kind outside their own sites. Axis n: a cell and a site."""

    kind: int
    cell: Ints  # [n] ascending
    room: Room
    asked: Asked

    def at(self, rows: Ints, cells: int) -> "Away":
        """Of some of so many cells, which are then numbered anew."""
        number = np.full(cells, -1)
        number[rows] = np.arange(len(rows))
        mine = np.flatnonzero(number[self.cell] >= 0)
        cell = number[self.cell[mine]]
        return Away(kind=self.kind, cell=cell, room=self.room.at(mine), asked=self.asked.at(mine))


@record
class Left:
    """What cells leave, and what it asks of their periods."""

    cells: Cells
    room: tuple[Room, ...]  # in their own sites, by sizes of replicas
    asked: Asked
    away: tuple[Away, ...]

    def at(self, rows: Ints) -> "Left":
        """Of some of the cells, ascending."""
        return Left(
            cells=self.cells.at(rows),
            room=tuple(r.at(rows) for r in self.room),
            asked=self.asked.at(rows),
            away=tuple(a.at(rows, len(self.cells.train_s)) for a in self.away),
        )
