"""When weights arrive: paths over stops against plain searches over places, and the bounds against every part of a fleet."""

import itertools
from collections.abc import Mapping, Sequence

import pytest
from fleets import SMALL, kind, problem
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Budget, Feasible, Problem, solve
from planner.cluster import Cluster, Device, Link
from planner.cost.arrivals import Arrival, stops_of, weight_arrivals, widest, widest_links
from planner.cost.model import CostModel
from planner.cost.network import Place, best_link, link_between
from planner.cost.traffic import bytes_between_regions
from planner.cost.update import update_s
from planner.override import Override
from planner.plan import Placement, Plan, Stage
from planner.record import replace
from planner.workload import UpdateMode

KINDS = {"fast": kind("fast", link=2e11), "slow": kind("slow", link=2e10)}
INSIDE, BORDERS = [1.5e9, 5e9], [1e7, 1e8, 6e8]  # bytes/s


def links_of(rates: Sequence[float]) -> st.SearchStrategy[Link]:
    return st.builds(Link, latency_s=st.sampled_from([1e-5, 5e-3, 0.04]), bytes_per_s=st.sampled_from(rates))


def clusters(inside: Sequence[float], borders: Sequence[float]) -> st.SearchStrategy[Cluster]:
    def made(within: tuple[Link, Link], between: tuple[Link, ...]) -> Cluster:
        return Cluster(
            kinds=KINDS,
            devices=(Device(id="d0", kind="fast", node="x0", region="x"),),
            same_kind=within[0],
            cross_kind=within[1],
            cross_region=between[0],
            regions=dict(zip((("x", "y"), ("x", "z"), ("y", "z")), between[1:], strict=True)),
        )

    border = links_of(borders)
    return st.builds(made, st.tuples(links_of(inside), links_of(inside)), st.tuples(*[border] * 4))


usual = clusters(INSIDE, BORDERS)  # machines of a region are joined by links faster than those between regions
odd = clusters([*INSIDE, *BORDERS], [*INSIDE, *BORDERS])


def places(nodes: int = 2) -> st.SearchStrategy[Place]:
    """Machines that may hold devices of both kinds."""
    return st.builds(
        lambda number, kind, region: Place(node=f"{region}{number}", kind=kind, region=region),
        st.integers(0, nodes - 1), st.sampled_from(["fast", "slow"]), st.sampled_from("wxyz"),
    )  # fmt: skip


trainers = st.lists(places(), min_size=1, max_size=3, unique=True)
replicas = st.lists(places(3), min_size=1, max_size=7, unique=True)


def arrivals(cluster: Cluster, trainer: Sequence[Place], at: Sequence[Place]) -> Mapping[Place, Arrival]:
    stops, stands = stops_of(trainer, at)
    found = weight_arrivals(cluster, stops)[1]
    return {p: found[stop] for p, stop in stands.items()}


def widest_rate(cluster: Cluster, trainer: Sequence[Place], over: Sequence[Place], to: Place) -> float:
    """Of all paths from the trainer over other places the one whose slowest link is fastest, by trying rates."""
    at_home = {p.node for p in trainer}

    def takes(a: Place, b: Place, rate: float) -> bool:
        """What is in a machine of the trainer gets weights from the trainer."""
        return (a in trainer or b.node not in at_home) and link_between(cluster, a, b).bytes_per_s >= rate

    rates = {link_between(cluster, a, b).bytes_per_s for a in (*trainer, *over) for b in (*trainer, *over)}
    for rate in sorted(rates, reverse=True):
        reached = set(trainer)
        while more := {b for b in over if b not in reached and any(takes(a, b, rate) for a in reached)}:
            reached |= more
        if to in reached:
            return rate
    raise AssertionError("every place has a link to every other")


@given(odd, trainers, replicas)
def test_a_relay_is_never_slower_than_the_direct_link(cluster: Cluster, trainer: list[Place], at: list[Place]) -> None:
    """Nor is a path ever wider than the widest."""
    found = arrivals(cluster, trainer, at)
    assert set(found) == set(at)
    for p in at:
        got = found[p].link.bytes_per_s
        if p in trainer:
            assert found[p].link == link_between(cluster, p, p)
            continue
        assert got >= best_link(cluster, tuple(trainer), (p,)).bytes_per_s
        assert got <= widest_rate(cluster, trainer, at, p)
        assert found[p].over.link.bytes_per_s == got


@given(usual, st.data())
def test_paths_are_as_wide_as_any_where_a_machine_has_one_kind(cluster: Cluster, data: st.DataObject) -> None:
    def of_one_kind(p: Place) -> Place:
        return replace(p, kind="fast" if p.node.endswith("0") else "slow")

    trainer = [*dict.fromkeys(of_one_kind(p) for p in data.draw(trainers))]
    at = [*dict.fromkeys(of_one_kind(p) for p in data.draw(replicas))]
    found = arrivals(cluster, trainer, at)
    for p in at:
        if p not in trainer:
            assert found[p].link.bytes_per_s == widest_rate(cluster, trainer, at, p)


@given(odd, trainers, replicas, st.sampled_from(["same_kind", "cross_kind", "cross_region", "xy", "xz", "yz"]))
def test_a_wider_link_never_narrows_a_path(cluster: Cluster, trainer: list[Place], at: list[Place], which: str) -> None:
    def wider(link: Link) -> Link:
        return replace(link, streams=4)

    if len(which) == 2:
        pair = (which[0], which[1])
        better = replace(cluster, regions={**cluster.regions, pair: wider(cluster.regions[pair])})
    else:
        better = replace(cluster, **{which: wider(getattr(cluster, which))})
    before, after = arrivals(cluster, trainer, at), arrivals(better, trainer, at)
    for p in at:
        assert after[p].link.bytes_per_s >= before[p].link.bytes_per_s


@given(odd, trainers, replicas, st.data())
def test_no_part_of_the_replicas_is_faster_than_the_widest_links(
    cluster: Cluster, trainer: list[Place], at: list[Place], data: st.DataObject
) -> None:
    some = data.draw(st.lists(st.sampled_from(at), min_size=1, unique=True))
    stops, stands = stops_of(trainer, at)
    best = widest_links(cluster, stops)
    for p, arrival in arrivals(cluster, trainer, some).items():
        assert arrival.link.bytes_per_s <= best[stands[p]].bytes_per_s
        assert arrival.link.latency_s >= best[stands[p]].latency_s * (1 - 1e-12)


@given(odd, trainers, replicas, st.permutations("0123"))
def test_names_of_machines_do_not_matter(
    cluster: Cluster, trainer: list[Place], at: list[Place], names: list[str]
) -> None:
    def renamed(p: Place) -> Place:
        return replace(p, node=f"{p.region}-{names[int(p.node[1:])]}")

    before = arrivals(cluster, trainer, at)
    after = arrivals(cluster, [renamed(p) for p in reversed(trainer)], [renamed(p) for p in reversed(at)])
    assert {renamed(p): a.link for p, a in before.items()} == {p: a.link for p, a in after.items()}


def test_shortest_and_widest_paths_over_three_places() -> None:
    import numpy as np

    latency = np.array([[0.0, 1.0, 5.0], [1.0, 0.0, 1.0], [5.0, 1.0, 0.0]])
    rate = np.array([[9.0, 3.0, 1.0], [3.0, 9.0, 2.0], [1.0, 2.0, 9.0]])
    shortest, widths = widest(latency, rate)
    assert shortest[0, 2] == 2.0
    assert widths[0, 2] == 2.0
    assert widths[0, 1] == 3.0


def test_weights_go_round_a_poor_link() -> None:
    """2 GB from x to two machines in y and one in z. The link from x to z carries 10 MB/s; over y it is 100 MB/s."""
    fast = Link(latency_s=1e-4, bytes_per_s=5e9)
    cluster = Cluster(
        kinds=KINDS, devices=(), same_kind=fast, cross_kind=fast,
        regions={
            ("x", "y"): Link(latency_s=0.01, bytes_per_s=2e8, egress_usd_per_gb=0.02),
            ("y", "z"): Link(latency_s=0.02, bytes_per_s=1e8, egress_usd_per_gb=0.01),
            ("x", "z"): Link(latency_s=0.005, bytes_per_s=1e7, egress_usd_per_gb=0.09),
        },
    )  # fmt: skip
    x, y0, y1, z = (Place(node=n, kind="fast", region=n[0]) for n in ("x0", "y0", "y1", "z0"))
    found = arrivals(cluster, [x], [y0, y1, z])
    assert found[y0] == found[y1]
    assert (found[y0].link.latency_s, found[y0].link.bytes_per_s) == pytest.approx((0.01, 2e8))
    assert (found[z].link.latency_s, found[z].link.bytes_per_s) == pytest.approx((0.03, 1e8))
    assert (found[z].over.source.region, found[z].over.target.region) == ("y", "z")
    # Nobody in y: the poor link is all there is.
    assert arrivals(cluster, [x], [z])[z].link.bytes_per_s == 1e7


@given(st.lists(links_of([1e7, 1e8, 6e8, 5e9]), min_size=1, max_size=5))
def test_chunks_over_relays_take_the_latencies_and_the_slowest_hop(chain: list[Link]) -> None:
    """Chunk by chunk: each hop sends one at a time and begins when the chunk is there."""
    size, chunks = 2e9, 400
    at = [Place(node=f"r{i}", kind="fast", region=f"r{i}") for i in range(len(chain) + 1)]
    regions = {(a.region, b.region): link for a, b, link in zip(at, at[1:], chain, strict=False)}
    cluster = Cluster(
        kinds=KINDS, devices=(), same_kind=chain[0], cross_kind=chain[0], regions=regions,
        cross_region=Link(latency_s=1.0, bytes_per_s=1e3),
    )  # fmt: skip
    there, free = [0.0] * chunks, [0.0] * len(chain)
    for hop, link in enumerate(chain):
        for c in range(chunks):
            free[hop] = max(free[hop], there[c]) + size / chunks / link.bytes_per_s
            there[c] = free[hop] + link.latency_s
    found = arrivals(cluster, at[:1], at[1:])[at[-1]].link
    modelled = found.latency_s + size / found.bytes_per_s
    assert modelled <= there[-1] * (1 + 1e-9)
    assert there[-1] <= modelled * (1 + len(chain) / chunks)


def test_a_replica_beside_the_trainer_passes_weights_on_to_its_kind() -> None:
    """Between kinds 0.1 GB/s, inside the trainer's machine 20 GB/s, between machines of a kind 5 GB/s."""
    cluster = Cluster(
        kinds=KINDS, devices=(), same_kind=Link(latency_s=1e-5, bytes_per_s=5e9),
        cross_kind=Link(latency_s=1e-5, bytes_per_s=1e8),
    )  # fmt: skip
    root = Place(node="a", kind="fast", region="x")
    beside, apart = Place(node="a", kind="slow", region="x"), Place(node="b", kind="slow", region="x")
    assert arrivals(cluster, [root], [apart])[apart].link.bytes_per_s == 1e8
    found = arrivals(cluster, [root], [beside, apart])
    assert (found[beside].link.bytes_per_s, found[apart].link.bytes_per_s) == (2e10, 5e9)


def poor_direct(*nodes: tuple[str, str], xz: float = 1e7, **changes: object) -> Problem:
    """One device a machine, of (kind, region); x and z are joined poorly, both are joined well to y."""
    fast = Link(latency_s=1e-5, bytes_per_s=5e9)
    cluster = Cluster(
        kinds={
            "compute": kind("compute", tflops=800, hbm=1e12), "bandwidth": kind("bandwidth", tflops=100, hbm=4e12),
        },
        devices=tuple(Device(id=f"d{i}", kind=k, node=f"n{i}", region=r) for i, (k, r) in enumerate(nodes)),
        same_kind=fast, cross_kind=fast,
        regions={
            ("x", "y"): Link(latency_s=0.01, bytes_per_s=5e8, egress_usd_per_gb=0.02),
            ("y", "z"): Link(latency_s=0.01, bytes_per_s=5e8, egress_usd_per_gb=0.01),
            ("x", "z"): Link(latency_s=0.01, bytes_per_s=xz, egress_usd_per_gb=0.09),
        },
    )  # fmt: skip
    return problem(cluster, **changes)


def test_the_update_of_a_plan_is_that_of_the_tree_that_is_told() -> None:
    p = poor_direct(("compute", "x"), ("bandwidth", "y"), ("bandwidth", "z"))
    cost = CostModel(p)
    stage = Stage(devices=("d0",), kind="compute", dp=1, tp=1, layers=SMALL.layers)
    train = Placement(role="train", kind="compute", devices=("d0",), stages=(stage,))
    rolls = tuple(Placement(role="rollout", kind="bandwidth", devices=(d,), share=0.5) for d in ("d1", "d2"))
    plan = Plan(placements=(train, *rolls))
    scored = cost.evaluate(plan)
    assert scored is not None
    relayed = update_s(cost.context, "bandwidth", Link(latency_s=0.02, bytes_per_s=5e8))
    assert scored.prediction.update_s == pytest.approx(relayed)
    places_of = [cost.places[d] for d in ("d1", "d2")]
    hops = cost.weight_tree([cost.places["d0"]], places_of)
    assert [(h.source.region, h.target.region) for h in hops if h.crosses] == [("x", "y"), ("y", "z")]
    # The same tree is billed.
    moved = bytes_between_regions(p, plan)
    assert moved["y", "z"] == SMALL.weight_bytes
    assert moved["x", "z"] < 1e6
    alone = cost.evaluate(Plan(placements=(train, rolls[1])))
    assert alone is not None
    assert alone.prediction.update_s == pytest.approx(
        update_s(cost.context, "bandwidth", Link(latency_s=0.01, bytes_per_s=1e7))
    )


def test_the_explanation_tells_the_slowest_hop() -> None:
    pins = (
        Override(device="d0", kind="pin", role="train"),
        *(Override(device=d, kind="pin", role="rollout") for d in ("d1", "d2")),
    )
    found = solve(poor_direct(("compute", "x"), ("bandwidth", "y"), ("bandwidth", "z"), overrides=pins))
    assert isinstance(found, Feasible)
    told = "\n".join(found.explanation.lines)
    assert "weights cross x -> y, y -> z once an update" in told
    assert f"the last replica has them after {found.prediction.update_s:.3g} s" in told


@settings(max_examples=12)
@given(
    st.lists(st.tuples(st.sampled_from(["compute", "bandwidth"]), st.sampled_from("xyz")), min_size=2, max_size=4),
    st.sampled_from([1e6, 1e7, 1e9]),
    st.sampled_from(["rolling", "pause", "overlapped"]),
    st.sampled_from([0, 1, 4]),
)
def test_no_plan_beats_the_bound_where_direct_links_are_poor(
    nodes: list[tuple[str, str]], xz: float, mode: UpdateMode, eta: int
) -> None:
    base = poor_direct(*nodes, xz=xz)
    p = replace(base, workload=replace(base.workload, update_mode=mode, eta=eta))
    best = solve(p, scheduler="exhaustive", budget=Budget(evaluations=10**9))
    found = solve(p)
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * (1 + 1e-6)
        assert found.prediction.tokens_per_s == pytest.approx(best.prediction.tokens_per_s, rel=1e-6)


def test_every_order_of_the_replicas_has_the_same_tree() -> None:
    p = poor_direct(("compute", "x"), ("bandwidth", "y"), ("compute", "y"), ("bandwidth", "z"))
    cost = CostModel(p)
    at = [cost.places[f"d{i}"] for i in (1, 2, 3)]
    links = [cost.arrivals([cost.places["d0"]], order) for order in itertools.permutations(at)]
    assert all(found == links[0] for found in links)
