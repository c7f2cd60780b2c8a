"""How new weights get from the trainer to every replica: a tree of hops that enters each region once.

Weights that cross a border twice are paid for twice, and borders are the slow links: one relay a region takes them and
passes them on inside. Between regions and inside each of them the tree is the one whose slowest link is as fast as it can be
(widest paths after Prim and Dijkstra, grown from the places that have the weights). Among paths of one rate that with the
cheaper last hop goes first, then the one with the lowest latency, then the one from the place with the fewest hops, so that a place sends
about as much as it receives and a hop keeps the link it was promised. `planner.cost.arrivals` times the tree.

What is in one of the trainer's machines gets them from the trainer itself: they do not leave a machine to come back,
however slow the link inside. Every place of the trainer is taken to hold all published weights, and a place is as one
device: handing weights on among its own devices is not a hop. Nothing here knows how many bytes there are; `Hop` and
the functions below are asked with them.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from planner.cluster import Cluster, Link
from planner.cost.network import Place, link_between
from planner.errors import InvalidInput
from planner.record import record, replace


@record
class Hop:
    """One transfer of the weights."""

    source: Place
    target: Place
    link: Link

    @property
    def crosses(self) -> bool:
        """Whether it enters a region."""
        return self.source.region != self.target.region

    def seconds(self, size_bytes: float, efficiency: float = 1.0) -> float:
        """Seconds of this hop alone, at a share `efficiency` of the link's bandwidth."""
        link = self.link.bulk()
        return link.latency_s + size_bytes / (link.bytes_per_s * efficiency)

    def egress_usd(self, size_bytes: float) -> float:
        """What the provider bills for one transfer."""
        return self.link.egress_usd_per_gb * size_bytes / 1e9


def weight_tree(cluster: Cluster, trainer: Sequence[Place], replicas: Sequence[Place]) -> tuple[Hop, ...]:
    """One hop to each distinct place of `replicas`, sources first. A place the trainer is at too is a hop to itself, over the
    machine's own link. No replicas, no hops; replicas without a trainer are InvalidInput."""
    targets = tuple(dict.fromkeys(replicas))
    if not targets:
        return ()
    roots = tuple(dict.fromkeys(trainer))
    if not roots:
        raise InvalidInput("weights need a trainer to come from", where="weight_tree", got=(), expected="a place")
    has: dict[str, list[Place]] = {}
    for place in roots:
        has.setdefault(place.region, []).append(place)
    wanting: dict[str, list[Place]] = {}
    for place in targets:
        if place not in roots:
            wanting.setdefault(place.region, []).append(place)
    at_home = {p.node for p in roots}
    hops = [Hop(source=p, target=p, link=link_between(cluster, p, p)) for p in targets if p in roots]
    for hop in _borders(cluster, has, wanting):
        hops.append(hop)
        has[hop.target.region] = [hop.target]
    for region, places in wanting.items():
        hops += _grow(cluster, has[region], [p for p in places if p not in has[region]], at_home)
    return _sources_first(hops, roots)


def slowest_s(hops: Sequence[Hop], size_bytes: float, efficiency: float = 1.0) -> float:
    """Seconds until the last replica has the weights, 0 without hops. Relays pass on what they receive, so a path takes its
    latencies and one transfer over its slowest link."""
    reach: dict[Place, tuple[float, float]] = {}  # of each place that was sent to: latency so far and lowest rate
    worst = 0.0
    for hop in hops:
        link = hop.link.bulk()
        latency_s, rate = reach.get(hop.source, (0.0, float("inf")))
        latency_s, rate = latency_s + link.latency_s, min(rate, link.bytes_per_s)
        if hop.source != hop.target:
            reach[hop.target] = latency_s, rate
        worst = max(worst, latency_s + size_bytes / (rate * efficiency))
    return worst


def egress_bytes(hops: Iterable[Hop], size_bytes: float) -> float:
    """Bytes that cross a border in one update."""
    return size_bytes * sum(hop.crosses for hop in hops)


def egress_usd(hops: Iterable[Hop], size_bytes: float) -> float:
    """USD billed for one update."""
    return sum(hop.egress_usd(size_bytes) for hop in hops)


def _borders(cluster: Cluster, has: Mapping[str, Sequence[Place]], wanting: Mapping[str, Sequence[Place]]) -> list[Hop]:
    """A hop into each region that wants weights and has none. The link of two regions does not depend on the places, so a
    region is grown as its first place, which becomes the relay."""
    relays = [places[0] for region, places in wanting.items() if region not in has]
    return _grow(cluster, [places[0] for places in has.values()], relays)


def _grow(
    cluster: Cluster, sources: Sequence[Place], targets: Sequence[Place], at_home: Collection[str] = ()
) -> list[Hop]:
    """The tree of widest paths from any of `sources` over all `targets`; those in machines `at_home` only from `sources` themselves."""
    sent = {s: _Sent() for s in sources}
    best = {t: _better_of(cluster, t, None, sources, sent) for t in targets}
    hops: list[Hop] = []
    while best:
        target, hop = min(best.items(), key=lambda item: _rank(item[1], sent))
        del best[target]
        # A source may have gained hops since it was noted: among equal links an idle one is better.
        hop = _better_of(cluster, target, hop, sources if target.node in at_home else sent, sent)
        hops.append(hop)
        source = sent[hop.source]
        rate = min(source.bytes_per_s, hop.link.bytes_per_s)
        sent[target] = _Sent(latency_s=source.latency_s + hop.link.latency_s, bytes_per_s=rate)
        if hop.source.node != target.node:
            sent[hop.source] = replace(source, hops=source.hops + 1)
        for other, known in best.items():
            if other.node not in at_home:
                best[other] = _better_of(cluster, other, known, (target,), sent)
    return hops


@record
class _Sent:
    """Of a place that has the weights: how many hops to other machines leave it, and how long and wide the way to it is."""

    hops: int = 0
    latency_s: float = 0.0
    bytes_per_s: float = float("inf")


def _better_of(
    cluster: Cluster, target: Place, known: Hop | None, sources: Iterable[Place], sent: Mapping[Place, _Sent]
) -> Hop:
    """The best hop to `target`: the known one or one from `sources`."""
    offers = [Hop(source=s, target=target, link=link_between(cluster, s, target)) for s in sources]
    return min([*([known] if known else []), *offers], key=lambda hop: _rank(hop, sent))


def _rank(hop: Hop, sent: Mapping[Place, _Sent]) -> tuple[float, float, float, int]:
    """Lower is better."""
    link, source = hop.link, sent[hop.source]
    return (
        -min(source.bytes_per_s, link.bytes_per_s),
        link.egress_usd_per_gb,
        source.latency_s + link.latency_s,
        source.hops,
    )


def _sources_first(hops: Sequence[Hop], roots: Sequence[Place]) -> tuple[Hop, ...]:
    """The hops in an order in which each source has the weights before it sends them."""
    ordered = [hop for hop in hops if hop.source == hop.target]
    leaving: dict[Place, list[Hop]] = {}
    for hop in hops:
        if hop.source != hop.target:
            leaving.setdefault(hop.source, []).append(hop)
    waiting = list(roots)
    for place in waiting:
        for hop in leaving.get(place, ()):
            ordered.append(hop)
            waiting.append(hop.target)
    return tuple(ordered)
