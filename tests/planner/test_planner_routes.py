"""The weight distribution tree against all trees there are."""

import itertools
from collections.abc import Iterator, Sequence

import pytest
from fleets import kind
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Cluster, Device, Link
from planner.cost.network import Place, link_between
from planner.cost.routes import Hop, egress_bytes, egress_usd, slowest_s, weight_tree
from planner.errors import InvalidInput

FAST, SLOW = kind("fast", link=2e11), kind("slow", link=3e9)
RATES = [1e8, 6e8, 1.5e9, 5e9]
links = st.builds(
    Link,
    latency_s=st.sampled_from([1e-5, 5e-3, 4e-2]),
    bytes_per_s=st.sampled_from(RATES),
    streams=st.sampled_from([1, 4]),
    egress_usd_per_gb=st.sampled_from([0.0, 0.02, 0.09]),
)
places = st.builds(
    lambda number, kind, region: Place(node=f"{region}{number}", kind=kind, region=region),
    st.integers(0, 1), st.sampled_from(["fast", "slow"]), st.sampled_from(["x", "y", "z"]),
)  # fmt: skip


def fleet(same: Link, cross: Link, far: Link, **pairs: Link) -> Cluster:
    return Cluster(
        kinds={"fast": FAST, "slow": SLOW},
        devices=(Device(id="d0", kind="fast", node="x0", region="x"),),
        same_kind=same,
        cross_kind=cross,
        cross_region=far,
        regions={(name[0], name[1]): link for name, link in pairs.items()},
    )


clusters = st.builds(fleet, links, links, links, xy=links, xz=links)


def all_trees(roots: Sequence[Place], targets: Sequence[Place]) -> Iterator[list[tuple[Place, Place]]]:
    """Every way to give each target a source: from the roots outwards, and into a region that has no root once."""
    home = {r.region for r in roots}
    for sources in itertools.product([*roots, *targets], repeat=len(targets)):
        parent = dict(zip(targets, sources, strict=True))
        crossings = [t.region for t, s in parent.items() if s.region != t.region]
        if len(set(crossings)) < len(crossings) or home & set(crossings):
            continue
        if any(t.node in {r.node for r in roots} and s not in roots for t, s in parent.items()):
            continue  # weights do not leave a machine to come back
        if all(reaches_a_root(t, parent, roots) for t in targets):
            yield list(zip(sources, targets, strict=True))


def reaches_a_root(place: Place, parent: dict[Place, Place], roots: Sequence[Place]) -> bool:
    for _ in range(len(parent) + 1):
        if place in roots:
            return True
        place = parent[place]
    return False


@given(
    clusters,
    st.lists(places, min_size=1, max_size=2, unique=True),
    st.lists(places, min_size=1, max_size=4, unique=True),
)
def test_no_tree_has_a_faster_slowest_hop(cluster: Cluster, roots: list[Place], replicas: list[Place]) -> None:
    hops = weight_tree(cluster, roots, replicas)
    assert {h.target for h in hops if h.source == h.target} == set(roots) & set(replicas)
    grown = [h for h in hops if h.source != h.target]
    targets = [p for p in replicas if p not in roots]
    trees = list(all_trees(roots, targets))
    assert {(h.source, h.target) for h in grown} in [set(t) for t in trees]
    if targets:
        best = max(min(link_between(cluster, s, t).bytes_per_s for s, t in tree) for tree in trees)
        assert min(h.link.bytes_per_s for h in grown) == best


@given(clusters, st.lists(places, min_size=1, max_size=2, unique=True), st.lists(places, max_size=9, unique=True))
def test_each_replica_once_and_each_region_once(cluster: Cluster, roots: list[Place], replicas: list[Place]) -> None:
    hops = weight_tree(cluster, roots, replicas)
    assert len(hops) == len(replicas)
    assert {h.target for h in hops} == set(replicas)
    entered = [h.target.region for h in hops if h.crosses]
    assert sorted(entered) == sorted({p.region for p in replicas} - {p.region for p in roots})
    reached = set(roots)
    for hop in hops:
        assert hop.source in reached, "sources come first"
        reached.add(hop.target)
    size = 16e9
    assert egress_bytes(hops, size) == size * len(entered)
    assert slowest_s(hops, size) >= max((h.seconds(size) for h in hops), default=0.0) * (1 - 1e-12)
    assert slowest_s(hops, size, efficiency=0.5) >= slowest_s(hops, size)


def test_a_region_is_reached_over_another_where_the_direct_link_is_slow() -> None:
    """16 GB from x to two machines in y and one in z, whose direct link to x is slow and dear."""
    cluster = fleet(
        Link(latency_s=0.001, bytes_per_s=5e9),
        Link(latency_s=0.001, bytes_per_s=1.5e9),
        Link(latency_s=0.05, bytes_per_s=1e8, egress_usd_per_gb=0.09),
        xy=Link(latency_s=0.005, bytes_per_s=1.25e8, streams=4, egress_usd_per_gb=0.02),
        yz=Link(latency_s=0.010, bytes_per_s=2.5e8, egress_usd_per_gb=0.01),
    )
    x, y0, y1, z = (Place(node=n, kind="fast", region=n[0]) for n in ("x0", "y0", "y1", "z0"))
    hops = weight_tree(cluster, [x], [y0, y1, z])
    assert [(h.source, h.target) for h in hops] == [(x, y0), (y0, z), (y0, y1)]
    assert [h.seconds(16e9) for h in hops] == pytest.approx([32.005, 64.010, 3.201])
    assert slowest_s(hops, 16e9) == pytest.approx(0.015 + 64)
    assert slowest_s(hops[:1], 16e9, efficiency=0.2) == pytest.approx(0.005 + 160)
    assert egress_bytes(hops, 16e9) == 32e9
    assert egress_usd(hops, 16e9) == pytest.approx(16 * 0.02 + 16 * 0.01)


def test_machines_alike_pass_the_weights_along() -> None:
    """A star would share the trainer's network card among all of them."""
    cluster = fleet(*(Link(latency_s=0.0, bytes_per_s=1e9) for _ in range(3)))
    at = [Place(node=f"n{i}", kind="fast", region="x") for i in range(9)]
    hops = weight_tree(cluster, at[:1], at[1:])
    leaving = [sum(h.source == p for h in hops) for p in at]
    assert max(leaving) == 1


def test_the_trainers_own_machine_is_a_hop_inside_it() -> None:
    cluster = fleet(*(Link(latency_s=0.0, bytes_per_s=1e9) for _ in range(3)))
    x = Place(node="x0", kind="fast", region="x")
    (hop,) = weight_tree(cluster, [x], [x, x])
    assert (hop.link.bytes_per_s, hop.crosses) == (2e11, False)
    assert weight_tree(cluster, [x], []) == weight_tree(cluster, [], []) == ()
    with pytest.raises(InvalidInput, match="need a trainer"):
        weight_tree(cluster, [], [x])


def test_a_hop_without_weights_costs_its_latency() -> None:
    x, y = Place(node="x0", kind="fast", region="x"), Place(node="y0", kind="fast", region="y")
    hop = Hop(source=x, target=y, link=Link(latency_s=0.04, bytes_per_s=1e9, egress_usd_per_gb=0.02))
    assert (hop.seconds(0), hop.egress_usd(0)) == (0.04, 0)
