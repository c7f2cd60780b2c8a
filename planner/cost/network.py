"""Transfers and collectives over the links of a cluster."""

import itertools
from collections.abc import Iterable, Iterator

from planner.cluster import Cluster, DeviceKind, Link
from planner.cost.assumptions import Assumptions
from planner.record import record


@record
class Spread:
    """How the devices of one training stage lie in the cluster."""

    nodes: int  # machines the stage spans
    local: Link  # between devices of one machine
    remote: Link | None = None  # the slowest link between two of its machines; None on one machine


@record
class Place:
    """A class of interchangeable devices: what a link depends on."""

    node: str
    kind: str
    region: str


def link_between(cluster: Cluster, a: Place, b: Place) -> Link:
    """The link between a device of `a` and another one of `b`, as a bulk transfer sees it (`Link.bulk`)."""
    if a.node == b.node:
        rate = min(cluster.kinds[a.kind].link_bytes_per_s, cluster.kinds[b.kind].link_bytes_per_s)
        return Link(latency_s=cluster.intra_node_latency_s, bytes_per_s=rate)
    if a.region == b.region:
        return cluster.inside_region(a.kind, b.kind).bulk()
    pair = (a.region, b.region) if a.region <= b.region else (b.region, a.region)
    return cluster.regions.get(pair, cluster.cross_region).bulk()


def local_link(cluster: Cluster, kind: DeviceKind) -> Link:
    """The link between two devices of a kind in one machine."""
    return Link(latency_s=cluster.intra_node_latency_s, bytes_per_s=kind.link_bytes_per_s)


def spread_of(cluster: Cluster, places: tuple[Place, ...]) -> Spread:
    """The spread of a stage whose chunks lie at `places` (one kind)."""
    local = local_link(cluster, cluster.kinds[places[0].kind])
    sets = _alike(places)
    links = [link_between(cluster, *itertools.islice(a.values(), 2)) for a in sets if len(a) > 1]
    links += [link for a, b in itertools.combinations(sets, 2) for link in _links(cluster, a, b)]
    return Spread(nodes=sum(map(len, sets)), local=local, remote=worst_of(links) if links else None)


def best_link(cluster: Cluster, left: tuple[Place, ...], right: tuple[Place, ...]) -> Link:
    """A link as good as any between two groups of devices."""
    return best_of(link for a in _alike(left) for b in _alike(right) for link in _links(cluster, a, b))


def _alike(places: Iterable[Place]) -> list[dict[str, Place]]:
    """Places by kind and region, each set by machine."""
    found: dict[tuple[str, str], dict[str, Place]] = {}
    for p in places:
        found.setdefault((p.kind, p.region), {})[p.node] = p
    return list(found.values())


def _links(cluster: Cluster, left: dict[str, Place], right: dict[str, Place]) -> Iterator[Link]:
    """Every link there is between two sets of alike places. It depends on whether the machine is the same: two machines of a
    set, and one that is in both, are as good as all."""
    both = next((node for node in left if node in right), None)
    few = [[*itertools.islice(of.values(), 2), *([of[both]] if both is not None else ())] for of in (left, right)]
    for a, b in itertools.product(*few):
        yield link_between(cluster, a, b)


def best_of(links: Iterable[Link]) -> Link:
    """The lowest latency, the highest rate and the lowest price among some links, each for itself.

    So more links never make it worse, which a proven bound needs: the link of the highest rate may be the longer one.
    """
    distinct = set(links)
    if len(distinct) == 1:
        return distinct.pop().bulk()
    return Link(
        latency_s=min(link.latency_s for link in distinct),
        bytes_per_s=max(link.bytes_per_s * link.streams for link in distinct),
        egress_usd_per_gb=min(link.egress_usd_per_gb for link in distinct),
    )


def worst_of(links: Iterable[Link]) -> Link:
    """The highest latency, the lowest rate and the highest price among some links: what a collective over all pays."""
    distinct = set(links)
    if len(distinct) == 1:
        return distinct.pop().bulk()
    return Link(
        latency_s=max(link.latency_s for link in distinct),
        bytes_per_s=min(link.bytes_per_s * link.streams for link in distinct),
        egress_usd_per_gb=max(link.egress_usd_per_gb for link in distinct),
    )


def send_s(link: Link, size_bytes: float, a: Assumptions) -> float:
    """Seconds to send `size_bytes` point to point."""
    return link.latency_s + size_bytes / (link.bytes_per_s * a.link_efficiency)


def ring_s(link: Link, size_bytes: float, ranks: int, passes: int, a: Assumptions) -> float:
    """Seconds of a ring collective over `ranks`: all-gather or reduce-scatter is one pass, all-reduce two."""
    if ranks <= 1:
        return 0.0
    moved = passes * size_bytes * (ranks - 1) / ranks
    return passes * (ranks - 1) * link.latency_s + moved / (link.bytes_per_s * a.link_efficiency)


def spread_collective_s(
    spread: Spread, stage_size_bytes: float, *, dp: int, tp: int, passes: int, a: Assumptions
) -> float:
    """Seconds of a collective over the DP ranks of a stage: inside machines first, then between them.

    Every TP rank reduces its own shard; between machines the shards share the machine's link.
    """
    if dp <= 1:
        return 0.0
    per_node = -(-dp // spread.nodes)
    inside = ring_s(spread.local, stage_size_bytes / tp, per_node, passes, a)
    if spread.nodes == 1 or spread.remote is None:
        return inside
    return inside + ring_s(spread.remote, stage_size_bytes, spread.nodes, passes, a)
