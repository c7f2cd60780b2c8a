"""Graph partition: which devices train (D_T) and which roll out (D_I).

The graph has one vertex a (machine, kind) class and an edge between any two, with bandwidth. Links inside a machine are
no edges: TP stays inside machines anyway, so what a cut may waste is bandwidth between them. It is cut to maximise

    (bandwidth inside D_T / all bandwidth) + (HBM bandwidth in D_I / all HBM bandwidth)

with D_T's share of compute in a band around gamma. Devices of a class are interchangeable, and classes of a kind and
region are filled one after the other (which keeps most bandwidth inside), so a partition is a count for each pool.
"""

from collections.abc import Iterator, Sequence

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster
from planner.cost.network import link_between
from planner.plan import Plan
from planner.record import record
from planner.space import DeviceClass

_GRID = 20_000  # most partitions looked at in one cut
_FEW_CLASSES = 10  # up to here each class is a pool of its own

Counts = tuple[int, ...]


def class_graph(cluster: Cluster, classes: Sequence[DeviceClass]) -> "nx.Graph[int]":
    """Vertices: index of the class, with `devices`, `compute` (FLOP/s), `hbm` (bytes/s) and `memory` (bytes) of one
    device. Edges: `bandwidth` (bytes/s) of a pair of devices."""
    graph: nx.Graph[int] = nx.Graph()
    for i, c in enumerate(classes):
        kind = cluster.kinds[c.place.kind]
        graph.add_node(i, devices=c.size, compute=kind.peak_flops, hbm=kind.hbm_bytes_per_s, memory=kind.memory_bytes)
    for i, a in enumerate(classes):
        for j in range(i):
            graph.add_edge(i, j, bandwidth=link_between(cluster, a.place, classes[j].place).bytes_per_s)
    return graph


@record
class Pool:
    """Classes filled in this order when devices of them go to training."""

    classes: tuple[int, ...]
    low: int  # devices that must train
    high: int  # devices that may


class Partitioner:
    """All partitions of a cluster with their compute share and their value, ready to be cut at any gamma."""

    def __init__(
        self, cluster: Cluster, classes: Sequence[DeviceClass], *, max_train: int | None, in_force: Plan | None
    ) -> None:
        self.classes = tuple(classes)
        self.graph = class_graph(cluster, classes)
        self.pools = _pools(classes, max_train, in_force)
        total = sum(c.size for c in classes)
        grid = np.array(
            np.meshgrid(*[_steps(p, self.classes, len(self.pools)) for p in self.pools], indexing="ij")
        ).reshape(len(self.pools), -1)
        trained = grid.sum(axis=0)
        allowed = (trained >= 1) & (trained < total)
        if max_train is not None:
            allowed &= trained <= max_train
        self.grid = grid[:, allowed].T
        self.share, self.value = self._figures()
        step = max((d["compute"] for _, d in self.graph.nodes(data=True)), default=0.0)
        whole = sum(d["devices"] * d["compute"] for _, d in self.graph.nodes(data=True))
        self.half_band = max(0.005, step / whole / 2 * (1 + 1e-9)) if whole else 0.0

    def cut(self, gamma: float) -> Counts | None:
        """The most valuable partition with a compute share within the band around gamma; the nearest where there is
        none; None when the cluster has no partition at all. Devices of each pool that train."""
        if not len(self.grid):
            return None
        distance = np.abs(self.share - gamma)
        inside = distance <= self.half_band
        if not inside.any():
            inside = distance <= distance.min() + 1e-12
        best = int(np.argmax(np.where(inside, self.value, -np.inf)))
        return tuple(int(x) for x in self.grid[best])

    def all(self) -> Iterator[Counts]:
        """Every partition of the grid, most valuable first."""
        for i in np.argsort(-self.value, kind="stable"):
            yield tuple(int(x) for x in self.grid[i])

    def neighbours(self, counts: Counts) -> Iterator[Counts]:
        """Partitions one device, or one machine's worth of devices, away."""
        for p, pool in enumerate(self.pools):
            sizes = {1, *(self.classes[i].size for i in pool.classes)}
            for step in sorted({s for size in sizes for s in (size, -size)}):
                moved = counts[p] + step
                if pool.low <= moved <= pool.high:
                    yield (*counts[:p], moved, *counts[p + 1 :])

    def allot(self, counts: Counts) -> tuple[int, ...]:
        """Devices of each class that train."""
        out = [0] * len(self.classes)
        for pool, count in zip(self.pools, counts, strict=True):
            for i, n in zip(pool.classes, _fill(pool, self.classes, count), strict=True):
                out[i] = n
        return tuple(out)

    def _figures(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Compute share of D_T and the objective, for every row of the grid."""
        if not len(self.grid):
            return np.zeros(0), np.zeros(0)
        node = self.graph.nodes
        n = len(self.grid)
        compute, hbm, inside = np.zeros(n), np.zeros(n), np.zeros(n)
        # Of each pool: devices by class for each count that the grid has, and which of those counts a row of the grid is.
        rows, at = [], []
        for p, pool in enumerate(self.pools):
            counts, where = np.unique(self.grid[:, p], return_inverse=True)
            rows.append(np.array([_fill(pool, self.classes, int(t)) for t in counts], dtype=float))
            at.append(where)
        for p, pool in enumerate(self.pools):
            ix = pool.classes
            compute += (rows[p] @ np.array([node[i]["compute"] for i in ix]))[at[p]]
            hbm += (rows[p] @ np.array([node[i]["hbm"] for i in ix]))[at[p]]
            inside += (((rows[p] @ self._bandwidth(ix, ix)) * rows[p]).sum(axis=1) / 2)[at[p]]
            for q in range(p):
                cross = self._bandwidth(ix, self.pools[q].classes)
                inside += (rows[p] @ cross @ rows[q].T)[at[p], at[q]]
        all_compute = sum(d["devices"] * d["compute"] for _, d in node(data=True))
        all_hbm = sum(d["devices"] * d["hbm"] for _, d in node(data=True))
        all_links = sum(
            d["bandwidth"] * node[i]["devices"] * node[j]["devices"] for i, j, d in self.graph.edges(data=True)
        )
        value = (inside / all_links if all_links else 0.0) + (all_hbm - hbm) / all_hbm
        return compute / all_compute, value

    def _bandwidth(self, left: Counts, right: Counts) -> NDArray[np.float64]:
        """Bytes/s between any device of the one and the other class; 0 inside a class."""
        return np.array(
            [[self.graph.edges[i, j]["bandwidth"] if i != j else 0.0 for j in right] for i in left], dtype=float
        )


def _pools(classes: Sequence[DeviceClass], max_train: int | None, in_force: Plan | None) -> tuple[Pool, ...]:
    apart = len(classes) <= _FEW_CLASSES and max_train == 1
    found: dict[tuple[object, ...], list[int]] = {}
    for i, c in enumerate(classes):
        key = (i,) if apart else (c.place.kind, c.place.region)
        found.setdefault(key, []).append(i)

    def order(i: int) -> tuple[int, int, int, int]:
        c = classes[i]
        training = sum(in_force.role_of(d) == "train" for d in c.free) if in_force else 0
        return (-len(c.must_train), -(c.size - len(c.must_roll)), -training, i)

    out = []
    for ix in found.values():
        high = sum(classes[i].size - len(classes[i].must_roll) for i in ix)
        out.append(
            Pool(
                classes=tuple(sorted(ix, key=order)),
                low=sum(len(classes[i].must_train) for i in ix),
                high=high if max_train is None else min(high, max_train),
            )
        )
    return tuple(p for p in out if p.high >= p.low)


def _fill(pool: Pool, classes: Sequence[DeviceClass], count: int) -> list[int]:
    """Devices by class of the pool when `count` of it train: pinned ones, then class after class."""
    out = [len(classes[i].must_train) for i in pool.classes]
    rest = count - sum(out)
    for k, i in enumerate(pool.classes):
        more = max(0, min(rest, classes[i].size - len(classes[i].must_roll) - out[k]))
        out[k] += more
        rest -= more
    return out


def _steps(pool: Pool, classes: Sequence[DeviceClass], pools: int) -> list[int]:
    """Counts of a pool to look at: all of them while the grid stays small, else machine by machine."""
    most = max(2, int(_GRID ** (1 / pools)))
    values = range(pool.low, pool.high + 1)
    if len(values) <= most:
        return list(values)
    borders, at = {pool.low, pool.high}, 0
    for i in pool.classes:
        at += classes[i].size
        borders.add(min(max(at, pool.low), pool.high))
    if len(borders) <= most:
        return sorted(borders)
    return sorted({round(x) for x in np.linspace(pool.low, pool.high, most)})
