"""Devices by kind and site, and what links between sites can do at best.

A site is a region, or several where there are more than `MOST_SITES` (the closest ones are taken for one, in favour of the
plan). A trainer lies in a set of sites; every set is a case of its own:
- what is in the set gets new weights over the links inside a region, what is not over the best link out of the set;
- one stage over the whole set talks over the slowest link between two of its sites (`narrow`);
- a pipeline over the set crosses, in one of its stages or at one of its borders, a link no faster than the bottleneck of
  the set's maximum spanning tree (`bridge`): split the set along the links above it and no part holds the trainer.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster, Link
from planner.cost.network import Place, best_of, link_between, local_link
from planner.space import DeviceClass

MOST_SITES = 10

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Pools:
    """Counts and links of one fleet. Axes: k kinds, r sites, s sets of sites."""

    def __init__(self, cluster: Cluster, classes: Sequence[DeviceClass]) -> None:
        self.cluster, self.classes = cluster, tuple(classes)
        self.kinds = tuple(dict.fromkeys(c.place.kind for c in classes))
        regions = tuple(sorted({c.place.region for c in classes}))
        self.sites, self.links = _merged(cluster, regions)
        self.region_links = tuple(region_link(cluster, *p) for p in itertools.combinations(regions, 2))
        site = {region: i for i, group in enumerate(self.sites) for region in group}
        shape = (len(self.kinds), len(self.sites))
        self.count, self.must_train, self.must_roll = (np.zeros(shape, dtype=np.int64) for _ in range(3))
        self.machines: list[list[list[int]]] = [[[] for _ in self.sites] for _ in self.kinds]
        for c in classes:
            k, r = self.kinds.index(c.place.kind), site[c.place.region]
            self.count[k, r] += c.size
            self.must_train[k, r] += len(c.must_train)
            self.must_roll[k, r] += len(c.must_roll)
            self.machines[k][r].append(c.size)
        self.member = _subsets(len(self.sites))  # [s, r]
        self.inside = self.member.astype(np.int64) @ self.count.T  # [s, k]
        self.rolling_inside = self.member.astype(np.int64) @ self.must_roll.T
        self.size = self.member.sum(axis=1)
        # A trainer lies in every site where a device must train.
        needed = self.must_train.sum(axis=0) > 0
        self.open = ~(needed & ~self.member).any(axis=1)
        ends = [_ends(self.links, np.flatnonzero(row)) for row in self.member]
        self.narrow = tuple(n for n, _ in ends)
        self.bridge = tuple(b for _, b in ends)
        self._shared = _shared(classes)
        regions_of = [{c.place.region for c in classes if c.place.kind == k} for k in self.kinds]
        self._together = np.array([[bool(a & b) for b in regions_of] for a in regions_of]).reshape(shape[0], shape[0])

    def chunks(self, tp: int) -> Ints:
        """Groups of `tp` devices inside machines, [k, r]."""
        return np.array([[sum(n // tp for n in at) for at in row] for row in self.machines], dtype=np.int64).reshape(
            len(self.kinds), len(self.sites)
        )

    def fewest(self, kind: int, tp: int, most_dp: int) -> Ints:
        """The fewest machines that hold 0, 1, ... `most_dp` groups of `tp` devices, wherever they are; beyond all, many."""
        sizes = sorted((n // tp for at in self.machines[kind] for n in at), reverse=True)
        return np.searchsorted(np.cumsum(sizes), np.arange(most_dp + 1), side="left") + 1

    def home_links(self, trained: int, other: int, *, several: bool) -> tuple[Link, ...]:
        """Links that may join devices of two kinds in the sites of a trainer; `several`: it lies in more than one."""
        a, b = self.kinds[trained], self.kinds[other]
        links: list[Link] = []
        if trained == other:
            links.append(local_link(self.cluster, self.cluster.kinds[a]))
        elif (a, b) in self._shared:
            here, there = (Place(node="", kind=k, region="") for k in (a, b))
            links.append(link_between(self.cluster, here, there))
        if trained == other:
            links.append(self.cluster.same_kind.bulk())
        elif self._together[trained, other]:
            links.append(self.cluster.inside_region(a, b).bulk())
        links += [x for g in self.sites if len(g) > 1 for x in self.pairs(g)]
        links += [x for x in self.links.values() if several]
        # Kinds that never share a region have no link inside one site; nothing is asked of it either.
        return tuple(links) or (self.cluster.cross_kind.bulk(),)

    def share_machines(self, a: int, b: int) -> bool:
        """Whether some machine holds devices of both kinds."""
        return (self.kinds[a], self.kinds[b]) in self._shared

    def pairs(self, regions: Sequence[str]) -> list[Link]:
        """The links between any two of some regions."""
        return [region_link(self.cluster, a, b) for a, b in itertools.combinations(regions, 2)]


def region_link(cluster: Cluster, a: str, b: str) -> Link:
    """The link between two different regions."""
    return cluster.regions.get((a, b) if a <= b else (b, a), cluster.cross_region).bulk()


def _merged(
    cluster: Cluster, regions: Sequence[str]
) -> tuple[tuple[tuple[str, ...], ...], dict[tuple[int, int], Link]]:
    """At most `MOST_SITES` groups of regions, the closest merged first, and the best links between groups."""
    groups: list[tuple[str, ...]] = [(r,) for r in regions]
    link = {p: region_link(cluster, *p) for p in itertools.combinations(regions, 2)}

    def between(a: Sequence[str], b: Sequence[str]) -> Link:
        return best_of([link[(x, y) if x <= y else (y, x)] for x in a for y in b])

    while len(groups) > MOST_SITES:
        a, b = max(itertools.combinations(groups, 2), key=lambda p: between(*p).bytes_per_s)
        groups = [g for g in groups if g not in (a, b)] + [a + b]
    found = {(i, j): between(groups[i], groups[j]) for i, j in itertools.combinations(range(len(groups)), 2)}
    return tuple(groups), found


def _subsets(sites: int) -> NDArray[np.bool_]:
    """Every non-empty set of sites, small ones first, as rows of membership."""
    numbers = np.arange(1, 2**sites)
    member = ((numbers[:, None] >> np.arange(sites)) & 1).astype(bool)
    rows: NDArray[np.bool_] = member[np.argsort(member.sum(axis=1), kind="stable")]
    return rows


def _ends(links: dict[tuple[int, int], Link], sites: Ints) -> tuple[Link | None, Link | None]:
    """(narrow, bridge) of a set; no link as slow has a lower latency. None for a single site."""
    if len(sites) < 2:
        return None, None
    pairs = sorted(
        ((links[int(a), int(b)], int(a), int(b)) for a, b in itertools.combinations(sites, 2)),
        key=lambda e: -e[0].bytes_per_s,
    )
    part = {int(r): int(r) for r in sites}
    bridge = pairs[0][0]
    for link, a, b in pairs:
        if part[a] != part[b]:
            bridge, old = link, part[a]
            part = {r: part[b] if p == old else p for r, p in part.items()}

    def as_slow(limit: float) -> Link:
        return Link(latency_s=min(x.latency_s for x, _, _ in pairs if x.bytes_per_s <= limit), bytes_per_s=limit)

    return as_slow(pairs[-1][0].bytes_per_s), as_slow(bridge.bytes_per_s)


def _shared(classes: Sequence[DeviceClass]) -> set[tuple[str, str]]:
    """Pairs of different kinds that share a machine somewhere."""
    nodes: dict[str, set[str]] = {}
    for c in classes:
        nodes.setdefault(c.place.node, set()).add(c.place.kind)
    return {p for kinds in nodes.values() for p in itertools.permutations(kinds, 2)}
