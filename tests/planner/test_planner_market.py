"""What to rent, against brute force over every mix of small markets, and by hand."""

import itertools
import math
from collections.abc import Iterator

import pytest
from fleets import BANDWIDTH, COMPUTE, cluster, kind, problem, problems, workload
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from markets import CARDS, markets

from planner import Budget, Feasible, Infeasible, Problem, solve, violations
from planner.bound import upper_bound
from planner.cost import CostModel
from planner.cost.traffic import bytes_between_regions, linked_egress_usd
from planner.desk import RentalDesk, rent
from planner.egress import bill, egress_usd_per_step
from planner.errors import InvalidInput
from planner.fluid import Fluid, device_rates
from planner.frontier import frontier
from planner.market import Counts, Egress, Instance, Market, on_market, rented
from planner.objectives import Deadline, PerDollar, Reach, SpotRisk, WithinBudget
from planner.override import Override
from planner.record import replace
from planner.rental import Rental

EVERYTHING = Budget(evaluations=10**9)
SLACK = 1 + 1e-6
KINDS = ("k0", "k1")


def every_mix(market: Market) -> Iterator[Counts]:
    yield from itertools.product(*(range((i.available or 0) + 1) for i in market.instances))


def brute_force(p: Problem, market: Market) -> dict[Counts, Feasible]:
    """The proven best plan of every mix that has one."""
    empty = on_market(p, market, p.cluster.kinds)
    out = {}
    for counts in every_mix(market):
        found = solve(rented(empty, market, counts), scheduler="exhaustive", budget=EVERYTHING)
        if isinstance(found, Feasible):
            out[counts] = found
    return out


def check_rental(r: Rental, market: Market, *, spot: bool = False) -> None:
    """A valid plan on the machines told, priced as the market does, each of them used."""
    assert violations(r.plan.plan, r.problem) == ()
    number = dict(r.mix)
    counts = [number.get(market.title(i), 0) for i in range(len(market.instances))]
    assert all(n <= (i.available or 0) for n, i in zip(counts, market.instances, strict=True))
    assert r.plan.prediction.usd_per_h == pytest.approx(market.usd_per_h(counts, spot=spot))
    nodes = {d.id: d.node for d in r.problem.cluster.devices}
    assert {nodes[d] for p in r.plan.plan.placements for d in p.devices} == set(nodes.values())
    scored = CostModel(r.problem).evaluate(r.plan.plan)
    assert scored is not None
    assert scored.prediction.step_s == pytest.approx(r.plan.prediction.step_s, rel=1e-9)
    assert r.finished


@settings(max_examples=8)
@given(problems(most=2), st.data())
def test_every_objective_is_the_optimum_over_all_mixes(p: Problem, data: st.DataObject) -> None:
    market = data.draw(markets(KINDS, most_devices=4))
    every = brute_force(p, market)
    desk = RentalDesk(p, market, kinds=p.cluster.kinds)
    usd = {c: market.usd_per_h(c) for c in every_mix(market)}
    rate = {c: f.prediction.tokens_per_s for c, f in every.items()}
    budget = data.draw(st.sampled_from(sorted({u for u in usd.values() if u > 0})))
    found = desk.answer(WithinBudget(usd_per_h=budget))
    within = [c for c in every if usd[c] <= budget]
    assert isinstance(found, Rental) == bool(within)
    if isinstance(found, Rental):
        check_rental(found, market)
        most = max(rate[c] for c in within)
        assert found.achieved == pytest.approx(most, rel=1e-6)
        assert found.bound >= most / SLACK
        cheapest = min(usd[c] for c in within if rate[c] >= most * (1 - 0.9e-6))
        assert (found.plan.prediction.usd_per_h or 0) <= cheapest * SLACK
    assume(every)
    floor = data.draw(st.sampled_from([0.3, 0.9, 1 - 1e-6])) * max(rate.values())
    reached = desk.answer(Reach(tokens_per_s=floor))
    assert isinstance(reached, Rental)
    check_rental(reached, market)
    assert reached.plan.prediction.tokens_per_s >= floor / SLACK
    assert reached.achieved == pytest.approx(min(usd[c] for c in every if rate[c] >= floor), rel=1e-6)
    assert reached.bound <= reached.achieved * SLACK  # below where a ceiling promises what no plan keeps
    ratio = desk.answer(PerDollar(floor_tokens_per_s=floor))
    assert isinstance(ratio, Rental)
    check_rental(ratio, market)
    limit = 2 * reached.achieved * SLACK
    best = max(rate[c] / usd[c] for c in every if rate[c] >= floor and usd[c] <= limit)
    assert ratio.achieved / 3600 == pytest.approx(best, rel=1e-6)


@settings(max_examples=8)
@given(problems(most=2), st.data(), st.sampled_from([0.0, 0.05, 2.0]))
def test_a_deadline_costs_no_more_than_any_mix_and_the_bound_no_more_than_any_plan(
    p: Problem, data: st.DataObject, interruptions: float
) -> None:
    market = data.draw(markets(KINDS, most_devices=4))
    every = brute_force(p, market)
    assume(every)
    slowest = max(f.prediction.step_s for f in every.values())
    job = Deadline(
        steps=10,
        seconds=data.draw(st.sampled_from([0.5, 1.0, 3.0])) * 10 * slowest,
        spot=SpotRisk(interruptions_per_h=interruptions, restart_s=60.0),
    )
    found = rent(p, market, job, kinds=p.cluster.kinds)
    empty = on_market(p, market, p.cluster.kinds)
    least = math.inf
    for spot, (counts, f) in itertools.product((False, True), every.items()):
        leaving = egress_usd_per_step(rented(empty, market, counts), f.plan, market)
        assert leaving is not None
        b = bill(
            steps=10,
            step_s=f.prediction.step_s,
            usd_per_h=market.usd_per_h(counts, spot=spot),
            egress_usd_per_step=leaving,
            spot_instances=sum(n for n, i in zip(counts, market.instances, strict=True) if i.spot_usd_per_h) * spot,
            risk=job.spot,
        )
        if b is not None and b.seconds <= job.seconds:
            least = min(least, b.total_usd)
            if isinstance(found, Rental):
                assert found.bound <= b.total_usd * SLACK
    if isinstance(found, Rental):
        check_rental(found, market, spot=found.spot)
        assert found.bill is not None
        assert found.bill.seconds <= job.seconds * SLACK
        if len({i.region for i in market.instances}) == 1:  # plans of one speed may differ in what crosses regions
            assert found.achieved <= least * SLACK


@settings(max_examples=10)
@given(problems(most=2), st.data())
def test_less_money_never_helps_and_a_higher_reach_is_never_cheaper(p: Problem, data: st.DataObject) -> None:
    desk = RentalDesk(p, data.draw(markets(KINDS, most_devices=6)), kinds=p.cluster.kinds)
    budgets = sorted(data.draw(st.lists(st.floats(0.5, 40.0), min_size=2, max_size=3)))
    rates = []
    for b in budgets:
        found = desk.answer(WithinBudget(usd_per_h=b))
        rates.append(found.achieved if isinstance(found, Rental) else 0.0)
        assert not isinstance(found, Rental) or (found.plan.prediction.usd_per_h or 0) <= b * SLACK
    assert all(a <= b * SLACK for a, b in itertools.pairwise(rates))
    assume(rates[-1] > 0)
    prices = []
    for part in (0.2, 0.6, 1 - 1e-9):
        reached = desk.answer(Reach(tokens_per_s=part * rates[-1]))
        assert isinstance(reached, Rental)
        prices.append(reached.achieved)
    assert all(a <= b * SLACK for a, b in itertools.pairwise(prices))
    assert prices[-1] <= budgets[-1] * SLACK


@settings(max_examples=10)
@given(problems(most=2), st.data())
def test_the_frontier_is_the_pareto_set(p: Problem, data: st.DataObject) -> None:
    market = data.draw(markets(KINDS, most_devices=4))
    every = brute_force(p, market)
    found = frontier(RentalDesk(p, market, kinds=p.cluster.kinds), most_usd_per_h=1e6)
    points = [(f.plan.prediction.usd_per_h or 0, f.achieved) for f in found.points]
    assert points == sorted(points)
    assert found.finished
    for counts, f in every.items():
        usd, rate = market.usd_per_h(counts), f.prediction.tokens_per_s
        assert any(u <= usd * SLACK and r >= rate / (1 + 2e-6) for u, r in points)
    for (u0, r0), (u1, r1) in itertools.pairwise(points):
        assert u0 < u1
        assert r0 < r1


@given(problems(most=5), st.data())
def test_the_fluid_bounds_hold_above_the_bound_of_every_mix_of_a_box(p: Problem, data: st.DataObject) -> None:
    market = data.draw(markets(KINDS, most_devices=8))
    empty = on_market(p, market, p.cluster.kinds)
    holds = [{i.kind: i.gpus} for i in market.instances]
    fluid = Fluid(
        device_rates(CostModel(empty), KINDS),
        holds,
        [i.usd_per_h for i in market.instances],
        always={},
        always_usd_per_h=0.0,
    )
    high = tuple(i.available or 0 for i in market.instances)
    inside = data.draw(st.tuples(*(st.integers(0, n) for n in high)))
    low = data.draw(st.tuples(*(st.integers(0, n) for n in inside)))
    mix = rented(empty, market, inside)
    assume(len(mix.cluster.devices) > 1)
    bound = upper_bound(CostModel(mix))
    assume(bound is not None)
    assert bound is not None
    usd, rate = market.usd_per_h(inside), bound.tokens_per_s
    assert fluid.most_tokens_per_s(low, high, math.inf) >= rate / SLACK
    assert fluid.most_tokens_per_s(low, high, usd) >= rate / SLACK
    assert fluid.least_usd_per_h(low, high, rate) <= usd * SLACK
    assert fluid.most_per_usd(low, high) >= rate / usd / SLACK
    assert fluid.most_tokens_per_s(inside, inside, 0.0) == -math.inf


@settings(max_examples=10)
@given(problems(most=2), st.data(), st.integers(0, 3))
def test_a_stop_tells_the_best_so_far_and_a_bound_that_holds(p: Problem, data: st.DataObject, after: int) -> None:
    market = data.draw(markets(KINDS, most_devices=6))
    whole = rent(p, market, WithinBudget(usd_per_h=1e3), kinds=p.cluster.kinds)
    assume(isinstance(whole, Rental))
    assert isinstance(whole, Rental)
    asked = itertools.count()
    found = rent(
        p, market, WithinBudget(usd_per_h=1e3), kinds=p.cluster.kinds, should_stop=lambda: next(asked) >= after
    )
    if isinstance(found, Rental):
        assert violations(found.plan.plan, found.problem) == ()
        assert found.achieved <= whole.achieved * SLACK <= found.bound * SLACK**2
    else:
        assert "stopped" in found.message


def test_a_stopped_search_has_a_bound_that_holds_for_a_price_too() -> None:
    whole = rent(problem(), CARDS, Reach(tokens_per_s=2000.0))
    assert isinstance(whole, Rental)
    for after in range(12):
        asked = itertools.count()
        found = rent(problem(), CARDS, Reach(tokens_per_s=2000.0), should_stop=lambda a=asked, n=after: next(a) >= n)  # type: ignore[misc]
        if isinstance(found, Rental):
            assert found.bound <= whole.achieved * SLACK <= found.achieved * SLACK**2


# By hand


def test_the_price_is_the_markets_and_the_links_are_the_fleets() -> None:
    p = problem()
    found = rent(p, CARDS, WithinBudget(usd_per_h=14.0))
    assert isinstance(found, Rental)
    assert found.plan.prediction.usd_per_h == 14.0  # the catalogue's kinds would say 2 * 5 + 2 * 2 too, spot 8
    assert found.mix == (("fast", 1), ("wide", 1))
    assert found.problem.cluster.cross_kind == p.cluster.cross_kind
    assert {d.id for d in found.problem.cluster.devices} == {"fast-0/gpu0", "fast-0/gpu1", "wide-0/gpu0", "wide-0/gpu1"}
    spot = rent(p, CARDS, WithinBudget(usd_per_h=8.0), spot=True)
    assert isinstance(spot, Rental)
    assert (spot.mix, spot.plan.prediction.usd_per_h) == ((("fast", 2),), 8.0)
    mtok = 14.0 / 3600 / found.achieved * 1e6
    assert found.plan.prediction.usd_per_mtok == pytest.approx(mtok)


def test_egress_by_hand() -> None:
    """Trainer in the east, all rollout in the west: weights and prompts go west, samples come east."""
    two = Market(
        name="two",
        instances=(
            Instance(name="t", kind="compute", gpus=1, region="east", usd_per_h=1.0, available=1),
            Instance(name="r", kind="bandwidth", gpus=1, region="west", usd_per_h=1.0, available=1),
        ),
        egress=(Egress(origin="east", to="west", usd_per_gb=0.02), Egress(origin="west", to="east", usd_per_gb=0.5)),
    )
    p = problem(overrides=())
    empty = on_market(p, two, p.cluster.kinds)
    both = replace(rented(empty, two, (1, 1)), overrides=(Override(device="t-0/gpu0", kind="pin", role="train"),))
    found = solve(both, scheduler="hex")
    assert isinstance(found, Feasible)
    moved = bytes_between_regions(both, found.plan)
    weights = p.model.params * 2
    assert moved["east", "west"] == pytest.approx(weights + 64 * 100 * 4)
    assert moved["west", "east"] == pytest.approx(64 * 400 * 8)
    usd = (weights + 25_600) / 1e9 * 0.02 + 204_800 / 1e9 * 0.5
    assert egress_usd_per_step(both, found.plan, two) == pytest.approx(usd)
    assert egress_usd_per_step(both, found.plan, replace(two, egress=two.egress[:1])) is None


def test_egress_of_the_links_is_in_dollars_per_token() -> None:
    """Weights, prompts and samples between two regions over a link of $0.02 a GB."""
    fleet = cluster(("compute", "a"), ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))
    east, west = fleet.devices
    fleet = replace(fleet, devices=(replace(east, region="east"), replace(west, region="west")))
    priced = replace(fleet, cross_region=replace(fleet.cross_region, egress_usd_per_gb=0.02))
    pins = (Override(device="d0", kind="pin", role="train"),)
    free, paid = (solve(problem(c, overrides=pins)) for c in (fleet, priced))
    assert isinstance(free, Feasible)
    assert isinstance(paid, Feasible)
    p = problem(priced)
    usd = (p.model.params * 2 + 64 * 100 * 4 + 64 * 400 * 8) / 1e9 * 0.02
    assert linked_egress_usd(p, paid.plan) == pytest.approx(usd)
    assert paid.prediction.egress_usd_per_step == pytest.approx(usd)
    assert free.prediction.egress_usd_per_step == 0.0
    assert free.prediction.usd_per_mtok is not None
    assert paid.prediction.usd_per_mtok == pytest.approx(free.prediction.usd_per_mtok + usd / (64 * 400) * 1e6)


def test_a_bill_by_hand() -> None:
    """100 steps of 36 s are an hour; 2 spot instances interrupted once in 10 h and 30 min lost each time: 1/(1-0.1) h."""
    b = bill(
        steps=100,
        step_s=36.0,
        usd_per_h=9.0,
        egress_usd_per_step=0.01,
        spot_instances=2,
        risk=SpotRisk(interruptions_per_h=0.1, restart_s=1800.0),
    )
    assert b is not None
    assert b.seconds == pytest.approx(4000.0)
    assert b.interruptions == pytest.approx(2 * 0.1 * 4000 / 3600)
    assert b.lost_s == pytest.approx(400.0)
    assert b.total_usd == pytest.approx(10.0 + 1.0)
    risk = SpotRisk(interruptions_per_h=1.0, restart_s=1800.0)
    assert bill(steps=1, step_s=1, usd_per_h=1, egress_usd_per_step=0, spot_instances=2, risk=risk) is None


def test_spot_is_taken_where_it_pays_and_left_where_interruptions_eat_it() -> None:
    job = Deadline(steps=100, seconds=1e7, spot=SpotRisk(interruptions_per_h=0.01))
    cheap = rent(problem(), CARDS, job)
    dear = rent(problem(), CARDS, replace(job, spot=SpotRisk(interruptions_per_h=4.0, restart_s=800.0)))
    never = rent(problem(), CARDS, replace(job, spot=None))
    assert isinstance(cheap, Rental)
    assert isinstance(dear, Rental)
    assert isinstance(never, Rental)
    assert cheap.spot
    assert not dear.spot
    assert cheap.achieved < dear.achieved
    assert dear.achieved == pytest.approx(never.achieved)


def test_machines_of_two_sizes_of_one_kind_are_searched_in_parts() -> None:
    """Where a large machine holds a replica alone, the pipelined replicas of small ones are not planned: renting it in
    addition must not hide them."""
    card = kind("card", memory=2.4e9, usd=1.0)
    p = problem(cluster(kinds=(card,)), workload=workload(prompts_per_step=4))
    market = Market(
        name="sizes",
        instances=(
            Instance(name="one", kind="card", gpus=1, usd_per_h=1.0, available=5),
            Instance(name="two", kind="card", gpus=2, usd_per_h=2.5, available=1),
        ),
    )
    every = brute_force(p, market)
    for budget in (3.0, 5.0, 6.5, 7.5):
        found = rent(p, market, WithinBudget(usd_per_h=budget), kinds=p.cluster.kinds)
        most = max((f.prediction.tokens_per_s for c, f in every.items() if market.usd_per_h(c) <= budget), default=0)
        assert (found.achieved if isinstance(found, Rental) else 0) == pytest.approx(most, rel=1e-6)


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (WithinBudget(usd_per_h=3.0), "less than the cheapest instance, wide at $4.00/h"),
        (Reach(tokens_per_s=1e9), "no mix of what the market has reaches it"),
        (PerDollar(floor_tokens_per_s=1e9), "no mix of what the market has reaches it"),
        (Deadline(steps=10**6, seconds=1.0), "no mix of what the market has reaches it"),
    ],
)
def test_what_cannot_be_had(objective: WithinBudget | Reach | PerDollar | Deadline, says: str) -> None:
    found = rent(problem(), CARDS, objective)
    assert isinstance(found, Infeasible)
    assert says in found.message


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInput, match="unknown kind"):
        rent(
            problem(),
            Market(name="m", instances=(Instance(name="x", kind="nope", gpus=1, usd_per_h=1),)),
            Reach(tokens_per_s=1),
        )
    with pytest.raises(InvalidInput, match="overrides name devices"):
        rent(problem(overrides=(Override(device="d0", kind="cordon"),)), CARDS, Reach(tokens_per_s=1))
    with pytest.raises(InvalidInput, match="offers nothing"):
        Market(name="m", instances=())
    with pytest.raises(InvalidInput, match="listed twice"):
        Market(name="m", instances=CARDS.instances * 2)
    with pytest.raises(InvalidInput, match="price"):
        Instance(name="x", kind="y", gpus=1, usd_per_h=-1)
    apart = replace(CARDS, instances=(CARDS.instances[0], replace(CARDS.instances[1], region="west")))
    with pytest.raises(InvalidInput, match="no egress price from east to west"):
        rent(problem(), apart, Deadline(steps=1, seconds=1e9))
    for wrong in (0.0, -5.0, math.inf, math.nan):
        with pytest.raises(InvalidInput):
            WithinBudget(usd_per_h=wrong)


def test_the_fleet_at_hand_is_searched_without_a_limit_on_mixes() -> None:
    """Thirteen types of machine of up to two each: more mixes than could be listed; a stop still gets an answer."""
    names = [f"m{i}" for i in range(26)]
    kinds = tuple(kind(f"c{i}", tflops=100 + 10 * i, usd=1.0 + 0.1 * i) for i in range(13))
    fleet = cluster(*[(f"c{i % 13}", n) for i, n in enumerate(names)], kinds=kinds)
    whole = problem(fleet, objective="throughput_per_dollar", floor_tokens_per_s=100.0)
    found = solve(whole, scheduler="hex", should_stop=lambda: True)
    assert isinstance(found, Feasible)
    assert not found.finished
    assert found.prediction.tokens_per_s >= 100.0
