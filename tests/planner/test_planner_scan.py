"""The scan against oracles: brute force on small fleets with regions, a plain scan on middle ones, and what it promises
where neither can go."""

import itertools

import numpy as np
import pytest
from fleets import LINK, SLOW, cluster, kind, kinds, problem, workloads
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import Budget, Feasible, Problem, solve, violations
from planner.bound import COARSE, upper_bound
from planner.cluster import Link
from planner.columns import Columns
from planner.cost import CostModel
from planner.cost.network import Spread, best_link, local_link
from planner.cost.training import StageShape, TrainerShape
from planner.knapsack import fill, most_value
from planner.pools import MOST_SITES, Pools
from planner.problem import Capabilities
from planner.record import replace
from planner.scan import Scan, scan_of
from planner.space import BlockShape, block_shapes, device_classes, replica_shapes

SLACK = 1 + 1e-6
EVERYTHING = Budget(evaluations=10**9)


# Brute force, with regions.


@st.composite
def spread_problems(draw: st.DrawFn, *, most: int = 5) -> Problem:
    """Up to `most` devices of two kinds on up to four machines in up to three regions."""
    chosen = (draw(kinds("k0")), draw(kinds("k1")))
    places = st.tuples(st.sampled_from(["k0", "k1"]), st.sampled_from(["a", "b", "c", "d"]))
    devices = draw(st.lists(places, min_size=2, max_size=most))
    region = {node: draw(st.sampled_from(["x", "y", "z"])) for node in "abcd"}
    fleet = cluster(*devices, kinds=chosen, cross=draw(st.sampled_from([SLOW, LINK])))
    links = {
        pair: Link(
            latency_s=draw(st.sampled_from([0.005, 0.1])), bytes_per_s=draw(st.sampled_from([1e7, 1e8, 6e8, 1e10]))
        )
        for pair in itertools.combinations("xyz", 2)
    }
    fleet = replace(fleet, devices=tuple(replace(d, region=region[d.node]) for d in fleet.devices), regions=links)
    return problem(
        fleet,
        workload=draw(workloads()),
        capabilities=Capabilities(trainer=draw(st.sampled_from(["replicated", "fsdp"]))),
    )


def _like_brute_force(p: Problem) -> None:
    best, found = solve(p, scheduler="exhaustive", budget=EVERYTHING), solve(p, scheduler="hex")
    assert isinstance(best, Feasible) == isinstance(found, Feasible)
    if isinstance(best, Feasible) and isinstance(found, Feasible):
        assert violations(found.plan, p) == ()
        assert best.prediction.tokens_per_s <= found.bound_tokens_per_s * SLACK
        bound = upper_bound(CostModel(p))
        assert bound is not None
        assert bound.step_s <= best.prediction.step_s * SLACK
        assert found.prediction.step_s == pytest.approx(best.prediction.step_s, rel=1e-6)


@settings(max_examples=20)
@given(spread_problems(most=4))
def test_hex_finds_the_optimum_over_regions(p: Problem) -> None:
    _like_brute_force(p)


@pytest.mark.accept
@settings(max_examples=500)
@given(spread_problems(most=5))
def test_hex_finds_the_optimum_of_500_fleets(p: Problem) -> None:
    _like_brute_force(p)


# A plain scan: all trainers one by one, lying as well as they could in one region, against plain tables.


class PlainScan:
    """The shortest period of any trainer; machines all in one region."""

    def __init__(self, p: Problem) -> None:
        self.p, self.cost, classes = p, CostModel(p), device_classes(p)
        self.columns = Columns(self.cost)
        names = dict.fromkeys(c.place.kind for c in classes)
        self.places = {k: tuple(c.place for c in classes if c.place.kind == k) for k in names}
        self.sizes = {k: tuple(c.size for c in classes if c.place.kind == k) for k in names}
        self.shapes = {k: replica_shapes(self.cost, classes, k) for k in names}

    def shortest_s(self) -> float | None:
        options = {k: block_shapes(self.p, k, n, sum(n)) for k, n in self.sizes.items()}
        every: list[tuple[BlockShape, ...]] = [(b,) for blocks in options.values() for b in blocks]
        every += [xy for a, b in itertools.permutations(options, 2) for xy in itertools.product(options[a], options[b])]
        best = float("inf")
        for low_s, blocks in sorted(((self.bound_s(b), b) for b in every), key=lambda x: x[0]):
            if low_s >= best:
                break
            train_s = self.train_s(blocks)
            if train_s is not None and train_s < best:
                best = min(best, self.period_s(blocks, train_s))
        return best if best < float("inf") else None

    def bound_s(self, blocks: tuple[BlockShape, ...]) -> float:
        return self.columns.bound_s(blocks, [self.link(a.kind, b.kind) for a, b in itertools.pairwise(blocks)])

    def link(self, a: str, b: str) -> Link:
        return best_link(self.p.cluster, self.places[a], self.places[b])

    def train_s(self, blocks: tuple[BlockShape, ...]) -> float | None:
        layers, stages = self.columns.split(blocks), list[StageShape]()
        for b in itertools.chain.from_iterable([b] * b.pp for b in blocks):
            if layers is None:
                return None
            local, left, nodes = local_link(self.p.cluster, self.p.cluster.kinds[b.kind]), b.dp, 0
            for size in sorted(self.sizes[b.kind], reverse=True):
                if left > 0:
                    left, nodes = left - size // b.tp, nodes + 1
            spread = Spread(nodes=nodes, local=local, remote=self.p.cluster.same_kind if nodes > 1 else None)
            stages.append(StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=layers[len(stages)], spread=spread))
        links = tuple(self.link(a.kind, b.kind) for a, b in itertools.pairwise(stages))
        found = self.cost.trainer(TrainerShape(stages=tuple(stages), links=links))
        return None if found is None else found.train_s

    def period_s(self, blocks: tuple[BlockShape, ...], train_s: float) -> float:
        rules, parts = self.cost.rules, []
        for k, shapes in self.shapes.items():
            link = max((self.link(b.kind, k) for b in blocks), key=lambda x: (x.bytes_per_s, -x.latency_s))
            room = sum(self.sizes[k]) - sum(b.devices for b in blocks if b.kind == k)
            parts.append((room, [(s.devices, self.cost.offers(s, link)) for s in shapes if s.devices <= room]))

        def work(period_s: float) -> float:
            total = 0.0
            for room, shapes in parts:
                values = [
                    (n, rules.given_tokens(o, period_s, train_s))
                    for n, offers in shapes
                    if (o := rules.best(offers, period_s, train_s)) is not None
                ]
                table = [0.0]
                for n in range(1, room + 1):
                    table.append(max([table[n - 1], *(table[n - s] + v for s, v in values if s <= n)]))
                total += table[room]
            return total

        if not any(shapes for _, shapes in parts):
            return float("inf")
        if work(train_s) >= rules.work_tokens:
            return train_s
        low, high = train_s, 2 * train_s
        while work(high) < rules.work_tokens:
            low, high = high, 2 * high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if work(middle) >= rules.work_tokens else (middle, high)
        return high


@st.composite
def middle_problems(draw: st.DrawFn, *, most: int) -> Problem:
    """Three kinds on machines of 2, 4 or 8 devices, any speed of link between kinds."""
    chosen = tuple(draw(kinds(f"k{i}")) for i in range(3))
    machines = draw(st.lists(st.tuples(st.integers(0, 2), st.sampled_from([2, 4, 8])), min_size=3, max_size=most))
    devices = [(f"k{k}", f"n{m}") for m, (k, size) in enumerate(machines) for _ in range(size)][:most]
    cross = draw(st.sampled_from([SLOW, LINK, Link(latency_s=1e-5, bytes_per_s=1e10)]))
    return problem(
        cluster(*devices, kinds=chosen, cross=cross),
        workload=draw(workloads()),
        capabilities=Capabilities(trainer=draw(st.sampled_from(["replicated", "fsdp"]))),
    )


def _like_plain_scan(p: Problem) -> None:
    expected, first = PlainScan(p).shortest_s(), next(Scan(CostModel(p), device_classes(p)).ascending(), None)
    assert (expected is None) == (first is None)
    if expected is not None and first is not None:
        # A stage on more machines may take less time than on the fewest, if links between them are the faster ones.
        assert first[0] <= expected * SLACK
        assert first[0] == pytest.approx(expected, rel=1e-3)


@settings(max_examples=8, deadline=None)
@given(middle_problems(most=12))
def test_the_first_cell_is_that_of_a_plain_scan(p: Problem) -> None:
    _like_plain_scan(p)


@pytest.mark.accept
@settings(max_examples=100, deadline=None)
@given(middle_problems(most=40))
def test_the_first_cell_is_that_of_a_plain_scan_up_to_40_devices(p: Problem) -> None:
    _like_plain_scan(p)


# What boxes and stops promise.


@settings(max_examples=5, deadline=None)
@given(middle_problems(most=20), st.integers(1, 12))
def test_a_bound_holds_however_early_it_is_taken(p: Problem, steps: int) -> None:
    scan = Scan(CostModel(p), device_classes(p))
    bounds = [b[0] for _ in range(steps) if (b := scan.bound_s(1)) is not None]
    assert all(a <= b * SLACK for a, b in itertools.pairwise(bounds))
    first = next(scan.ascending(steps=100), None)
    if first is not None and bounds:
        assert bounds[-1] <= first[0] * SLACK


@settings(max_examples=5, deadline=None)
@given(middle_problems(most=20), st.integers(0, 4))
def test_a_rescan_is_the_scan_of_the_other_devices(p: Problem, lost: int) -> None:
    cost, classes = CostModel(p), device_classes(p)
    scan = Scan(cost, classes)
    scan.bound_s(10)
    others = [c for i, c in enumerate(classes) if i != lost % len(classes)]
    again, fresh = scan.rescan(others), Scan(CostModel(p), others)
    assert list(itertools.islice(again.ascending(steps=30), 3)) == list(itertools.islice(fresh.ascending(steps=30), 3))
    # Fewer devices are never better.
    whole, part = scan.bound_s(50), again.bound_s(50)
    if part is not None and part[1]:
        assert whole is not None
        assert whole[0] <= part[0] * SLACK


def test_the_bound_and_the_scheduler_share_a_scan() -> None:
    cost = CostModel(problem())
    assert scan_of(cost) is scan_of(cost)
    first = next(scan_of(cost).ascending())
    assert next(scan_of(cost).ascending()) == first


def test_a_bound_that_stops_early_says_so() -> None:
    devices = [("compute", "c0")] * 8 + [("bandwidth", "b0")] * 8
    named = (kind("compute", tflops=800, hbm=1e12), kind("bandwidth", tflops=100, hbm=4e12))
    early = upper_bound(CostModel(problem(cluster(*devices, kinds=named))), steps=1)
    late = upper_bound(CostModel(problem(cluster(*devices, kinds=named))))
    assert early is not None
    assert late is not None
    assert early.scope == COARSE != late.scope
    assert early.step_s <= late.step_s


# Knapsacks.

VALUES = st.floats(0, 100, allow_nan=False)


def _every_value(sizes: list[int], values: list[float], devices: int, at_least: int = 0) -> float | None:
    """By trying all numbers of each size."""
    found = []
    for ns in itertools.product(*(range(devices // s + 1) for s in sizes)):
        if at_least <= sum(n * s for n, s in zip(ns, sizes, strict=True)) <= devices:
            found.append(sum(n * v for n, v in zip(ns, values, strict=True)))
    return max(found, default=None)


@given(st.sampled_from([[1, 2, 4, 8], [2, 4], [1], [2, 3, 4], [4, 6, 16]]), st.data(), st.integers(0, 14))
def test_knapsacks_are_exact(sizes: list[int], data: st.DataObject, devices: int) -> None:
    values = [data.draw(VALUES) for _ in sizes]
    best = _every_value(sizes, values, devices)
    found = most_value(sizes, np.array([values, values]), np.array([devices, 0]))
    assert found[0] == pytest.approx(best)
    assert found[1] == 0


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 2), st.sampled_from([1, 2, 3, 4]), VALUES), min_size=1, max_size=5),
    st.lists(st.integers(0, 4), min_size=1, max_size=3),
    st.integers(0, 3),
)
def test_a_machine_is_filled_as_well_as_it_can_be(
    items: list[tuple[int, int, float]], more: list[int], at_least: int
) -> None:
    """Devices that items of each level and below may cover: all combinations, level by level."""
    devices = list(itertools.accumulate(more))
    items = [(min(level, len(devices) - 1), size, value) for level, size, value in items]

    def fits(ns: tuple[int, ...]) -> bool:
        covered = [
            sum(n * size for n, (level, size, _) in zip(ns, items, strict=True) if level <= top)
            for top in range(len(devices))
        ]
        return all(c <= d for c, d in zip(covered, devices, strict=True)) and covered[-1] >= at_least

    every = itertools.product(*(range(devices[-1] // size + 1) for _, size, _ in items))
    worth = [sum(n * v for n, (_, _, v) in zip(ns, items, strict=True)) for ns in every if fits(ns)]
    found = fill(items, devices, at_least)
    assert (not worth) == (found is None)
    if found is not None:
        assert fits(tuple(found))
        assert sum(n * v for n, (_, _, v) in zip(found, items, strict=True)) == pytest.approx(max(worth))


def test_beyond_its_table_a_knapsack_is_bounded_by_its_density() -> None:
    found = most_value([2, 3], np.array([[2.0, 3.3]]), np.array([1000]))
    assert found[0] == pytest.approx(1100)


# Regions.


def test_the_slowest_link_and_the_bridge_of_a_set_of_regions() -> None:
    """A triangle of 0.5, 0.3 and 0.1 GB/s: its sites are joined without the slowest link."""
    links = {
        ("x", "y"): Link(latency_s=0.01, bytes_per_s=5e8),
        ("y", "z"): Link(latency_s=0.02, bytes_per_s=3e8),
        ("x", "z"): Link(latency_s=0.09, bytes_per_s=1e8),
    }
    fleet = cluster(("k", "a"), ("k", "b"), ("k", "c"), kinds=(kind("k"),))
    where = {"a": "x", "b": "y", "c": "z"}
    fleet = replace(fleet, devices=tuple(replace(d, region=where[d.node]) for d in fleet.devices), regions=links)
    pools = Pools(fleet, device_classes(problem(fleet)))
    whole = int(np.flatnonzero(pools.size == 3)[0])
    assert pools.sites == (("x",), ("y",), ("z",))
    assert pools.narrow[whole] == Link(latency_s=0.09, bytes_per_s=1e8)
    assert pools.bridge[whole] == Link(latency_s=0.02, bytes_per_s=3e8)
    assert [pools.narrow[i] for i in np.flatnonzero(pools.size == 1)] == [None] * 3


def test_more_regions_than_sites_are_merged_along_their_best_links() -> None:
    names = [f"r{i:02}" for i in range(MOST_SITES + 2)]
    links = {pair: Link(latency_s=0.01, bytes_per_s=1e8) for pair in itertools.combinations(names, 2)}
    links["r03", "r07"] = Link(latency_s=0.01, bytes_per_s=6e8)
    links["r00", "r01"] = Link(latency_s=0.01, bytes_per_s=5e8)
    fleet = cluster(*[("k", n) for n in names for _ in range(2)], kinds=(kind("k"),))
    fleet = replace(fleet, devices=tuple(replace(d, region=d.node) for d in fleet.devices), regions=links)
    p = problem(fleet)
    pools = Pools(fleet, device_classes(p))
    assert {g for g in pools.sites if len(g) > 1} == {("r03", "r07"), ("r00", "r01")}
    found = solve(p, scheduler="hex")
    assert isinstance(found, Feasible)
    assert violations(found.plan, p) == ()
