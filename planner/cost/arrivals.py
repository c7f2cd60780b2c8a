"""When new weights reach each replica of a plan: the tree of `planner.cost.routes` over *stops*, and the time of each path.

A stop is a class of machines that a tree need not tell apart: all machines of a region without a part of the trainer, by
kind; machines with a part of it, by the kinds that train and that generate there. Machines of one stop pass weights on along
a chain; its latencies (tens of microseconds each, beside seconds) are left out. A fleet of thousands of devices has a few dozen
stops.

Relays pass on what they receive, so a path takes the latencies of its hops and one transfer over its slowest link. The tree
enters a region once, so no link between regions carries the weights twice and nothing is divided; inside a region any two
machines have a link of their own, as everywhere in this cost model. Only where links inside a region are slower than the one
into it, each stop takes the weights over the border itself, and they are taken not to contend: so a replica more never slows another.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Cluster, Link
from planner.cost.network import Place, link_between
from planner.cost.routes import Hop, weight_tree
from planner.record import record, replace

Floats = NDArray[np.float64]
_AT_TRAINER, _ELSEWHERE = "\0trainer", "\0elsewhere"  # no machine is called so


@record
class Arrival:
    """The path by which weights reach a place: `link` has the latencies of all hops and the rate of the slowest, `over`."""

    link: Link
    over: Hop


@record
class Machines:
    """Machines alike: their region, the kinds that train there and those that generate on devices of their own."""

    region: str
    trains: tuple[str, ...]
    generates: tuple[str, ...]


@record
class Stops:
    """What the tree depends on. Names of machines are not part of it, so that plans alike share an answer."""

    trainer: tuple[tuple[Machines, int], ...]  # machines alike with a part of the trainer: one, or 2 for several
    elsewhere: tuple[tuple[str, str], ...]  # region, kind; a region's relay first: of most machines


def stops_of(trainer: Iterable[Place], replicas: Iterable[Place]) -> tuple[Stops, Mapping[Place, Place]]:
    """The stops, and for each place of the replicas the place that stands for it in `weight_arrivals`."""
    roots, targets = dict.fromkeys(trainer), dict.fromkeys(replicas)
    trains: dict[tuple[str, str], set[str]] = {}
    generates: dict[tuple[str, str], set[str]] = {}
    for p in roots:
        trains.setdefault((p.node, p.region), set()).add(p.kind)
    elsewhere: Counter[tuple[str, str]] = Counter()
    for p in targets:
        if (p.node, p.region) not in trains:
            elsewhere[p.region, p.kind] += 1
        elif p not in roots:
            generates.setdefault((p.node, p.region), set()).add(p.kind)
    of_node = {
        at: Machines(region=at[1], trains=tuple(sorted(kinds)), generates=tuple(sorted(generates.get(at, ()))))
        for at, kinds in trains.items()
    }
    alike = Counter(of_node.values())
    stops = Stops(
        trainer=tuple((m, min(alike[m], 2)) for m in sorted(alike, key=_order)),
        elsewhere=tuple(sorted(elsewhere, key=lambda x: (x[0], -elsewhere[x], x[1]))),
    )

    def stands_for(p: Place) -> Place:
        machines = of_node.get((p.node, p.region))
        return elsewhere_place(p.region, p.kind) if machines is None else _trainer_place(machines, p.kind, 0)

    return stops, {p: stands_for(p) for p in targets}


def weight_arrivals(cluster: Cluster, stops: Stops) -> tuple[tuple[Hop, ...], Mapping[Place, Arrival]]:
    """The tree over the stops, and the path to the last machine of each."""
    roots, wanting = _ends(stops)
    hops = list(weight_tree(cluster, roots, wanting))
    found: dict[Place, Arrival] = {}
    entered: dict[str, Hop] = {}
    for i, hop in enumerate(hops):
        found[hop.target] = _after(None if hop.source in roots else found[hop.source], hop)
        if hop.crosses:
            entered[hop.target.region] = hop
        elif hop.target not in roots:
            over = _over_a_border(cluster, hop, roots, entered, found)
            if over is not None and over[1].link.bytes_per_s > found[hop.target].link.bytes_per_s:
                hops[i], found[hop.target] = over
    for machines, n in stops.trainer:
        for kind in machines.generates if n > 1 else ():
            both = [found[_trainer_place(machines, kind, i)] for i in range(2)]
            found[_trainer_place(machines, kind, 0)] = min(both, key=lambda a: (a.link.bytes_per_s, -a.link.latency_s))
    return tuple(hops), found


def _over_a_border(
    cluster: Cluster, hop: Hop, roots: Sequence[Place], entered: Mapping[str, Hop], found: Mapping[Place, Arrival]
) -> tuple[Hop, Arrival] | None:
    """The way to the target of a hop inside a region over the border itself: as the region's relay, or from a part of the trainer in
    another region."""
    border = entered.get(hop.target.region)
    if border is not None:
        return replace(border, target=hop.target), found[border.target]
    apart = [p for p in roots if p.region != hop.target.region]
    hops = [Hop(source=p, target=hop.target, link=link_between(cluster, p, hop.target)) for p in apart]
    best = max(hops, key=lambda h: (h.link.bytes_per_s, -h.link.latency_s), default=None)
    return None if best is None else (best, _after(None, best))


def widest_links(cluster: Cluster, stops: Stops) -> Mapping[Place, Link]:
    """For each stop a link as good as any path to it: the highest rate and the lowest latency, each for itself, whatever part of
    the stops generates and however often a region is entered. No tree over some of the stops is faster."""
    roots, wanting = _ends(stops)
    every = tuple(dict.fromkeys((*roots, *wanting)))
    links = [[link_between(cluster, a, b) for b in every] for a in every]
    latency = np.array([[x.latency_s for x in row] for row in links])
    rate = np.array([[x.bytes_per_s for x in row] for row in links])
    at_home, source = {p.node for p in roots}, [every.index(p) for p in roots]
    for i, p in enumerate(every):
        if p.node in at_home and i not in source:  # as the tree has it: from the trainer itself
            others = [j for j in range(len(every)) if j not in (i, *source)]
            latency[others, i], rate[others, i] = np.inf, 0.0
    latency_s, bytes_per_s = widest(latency, rate)
    return {
        p: Link(latency_s=float(latency_s[source, i].min()), bytes_per_s=float(bytes_per_s[source, i].max()))
        for i, p in enumerate(every)
    }


def widest(latency_s: Floats, bytes_per_s: Floats) -> tuple[Floats, Floats]:
    """Of links from n places to each other ([n, n], the diagonal being the link inside a place): latencies of the shortest paths
    and rates of the widest ones, after Floyd and Warshall."""
    latency_s, bytes_per_s = latency_s.copy(), bytes_per_s.copy()
    for via in range(len(latency_s)):
        latency_s = np.minimum(latency_s, latency_s[:, via, None] + latency_s[None, via, :])
        bytes_per_s = np.maximum(bytes_per_s, np.minimum(bytes_per_s[:, via, None], bytes_per_s[None, via, :]))
    return latency_s, bytes_per_s


def elsewhere_place(region: str, kind: str) -> Place:
    """The stop of machines of a kind in a region that the trainer is not on."""
    return Place(node=f"{_ELSEWHERE}/{region}/{kind}", kind=kind, region=region)


def _trainer_place(machines: Machines, kind: str, number: int) -> Place:
    name = "/".join(
        (_AT_TRAINER, machines.region, "+".join(machines.trains), "+".join(machines.generates), str(number))
    )
    return Place(node=name, kind=kind, region=machines.region)


def _ends(stops: Stops) -> tuple[list[Place], list[Place]]:
    """Places that have the weights, places that want them."""
    some = [(m, i) for m, n in stops.trainer for i in range(n)]
    roots = [_trainer_place(m, kind, i) for m, i in some for kind in m.trains]
    own = [_trainer_place(m, kind, i) for m, i in some for kind in m.generates]
    return roots, [*roots, *own, *(elsewhere_place(region, kind) for region, kind in stops.elsewhere)]


def _order(machines: Machines) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return machines.region, machines.trains, machines.generates


def _after(before: Arrival | None, hop: Hop) -> Arrival:
    """The path that goes on over a hop."""
    link = hop.link.bulk()
    if before is None:
        return Arrival(link=link, over=hop)
    slower = link.bytes_per_s < before.link.bytes_per_s
    return Arrival(link=_narrowed(before.link, link, latency_s=link.latency_s), over=hop if slower else before.over)


def _narrowed(path: Link, link: Link, *, latency_s: float) -> Link:
    return Link(latency_s=path.latency_s + latency_s, bytes_per_s=min(path.bytes_per_s, link.bytes_per_s))


def slowest_of(arrivals: Sequence[Arrival]) -> Arrival:
    """Of the places of one replica the one that the widest path reaches last."""
    return min(arrivals, key=lambda a: (a.link.bytes_per_s, -a.link.latency_s))
