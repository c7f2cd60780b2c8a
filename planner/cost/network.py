"""Transfers and collectives over the links of a cluster."""

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
    """The link between a device of `a` and another one of `b`."""
    if a.node == b.node:
        rate = min(cluster.kinds[a.kind].link_bytes_per_s, cluster.kinds[b.kind].link_bytes_per_s)
        return Link(latency_s=cluster.intra_node_latency_s, bytes_per_s=rate)
    if a.region == b.region:
        return cluster.same_kind if a.kind == b.kind else cluster.cross_kind
    pair = (a.region, b.region) if a.region <= b.region else (b.region, a.region)
    return cluster.regions.get(pair, cluster.cross_region)


def local_link(cluster: Cluster, kind: DeviceKind) -> Link:
    """The link between two devices of a kind in one machine."""
    return Link(latency_s=cluster.intra_node_latency_s, bytes_per_s=kind.link_bytes_per_s)


def spread_of(cluster: Cluster, places: tuple[Place, ...]) -> Spread:
    """The spread of a stage whose chunks lie at `places` (one kind)."""
    distinct = tuple(dict.fromkeys(places))
    local = local_link(cluster, cluster.kinds[distinct[0].kind])
    worst: Link | None = None
    for i, a in enumerate(distinct):
        for b in distinct[i + 1 :]:
            link = link_between(cluster, a, b)
            if worst is None or link.bytes_per_s < worst.bytes_per_s:
                worst = link
    return Spread(nodes=len(distinct), local=local, remote=worst)


def best_link(cluster: Cluster, left: tuple[Place, ...], right: tuple[Place, ...]) -> Link:
    """The fastest link between two groups of devices."""
    links = [link_between(cluster, a, b) for a in dict.fromkeys(left) for b in dict.fromkeys(right)]
    return max(links, key=lambda link: (link.bytes_per_s, -link.latency_s))


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
