"""The cost model: lengths against simulation, collectives and pipelines by hand, the period against a grid search."""

import math

import numpy as np
import pytest
from fleets import BANDWIDTH, COMPUTE, LINK, MIXED, SLOW, SMALL, TINY, cluster, kind, problem, workload
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import Link
from planner.cost import Assumptions, CostModel
from planner.cost.context import context_of
from planner.cost.decode import Level, ReplicaShape, concurrency_grid, decode_step_s, replica_level
from planner.cost.lengths import expected_max, moments, quantiles
from planner.cost.memory import replica_kv_bytes_per_token, replica_kv_capacity_bytes
from planner.cost.network import Place, Spread, best_link, ring_s, spread_collective_s, spread_of
from planner.cost.step import Group, Offer, Rules, by_pace, even_period, solve_period, window_needed_s
from planner.cost.training import StageShape, TrainerShape, assign_sequences, passes, split_layers, train_cost
from planner.cost.update import update_s
from planner.model import ModelSpec
from planner.plan import Placement, Plan, Stage
from planner.problem import Capabilities
from planner.record import replace
from planner.workload import Lengths

A = Assumptions()
IDEAL = Assumptions(
    gemm_ceiling=1.0, gemm_half_tokens=0.0, gemm_half_width=0.0, hbm_efficiency=1.0, link_efficiency=1.0
)


# lengths


def test_length_biased_context_agrees_with_sampling() -> None:
    """Meet running samples at random times: longer ones more often, at a uniform point."""
    lengths = Lengths(mean_tokens=1000, cv=0.8, max_tokens=1_000_000)
    m = moments(workload(response=lengths, prompt=Lengths(mean_tokens=50, max_tokens=50)))
    rng = np.random.default_rng(0)
    sigma = math.sqrt(math.log1p(0.64))
    drawn = rng.lognormal(math.log(1000) - sigma**2 / 2, sigma, 400_000)
    met = rng.choice(drawn, size=400_000, p=drawn / drawn.sum()) * rng.random(400_000)
    assert m.context - 50 == pytest.approx(met.mean(), rel=0.02)
    assert m.context - 50 == pytest.approx(1.64 * 500)
    assert m.context_sd == pytest.approx(met.std(), rel=0.05)


def test_tail_of_a_group_agrees_with_sampling() -> None:
    lengths = Lengths(mean_tokens=1000, cv=0.8, max_tokens=4000)
    m = moments(workload(response=lengths, responses_per_prompt=8))
    rng = np.random.default_rng(1)
    sigma = math.sqrt(math.log1p(0.64))
    groups = np.minimum(rng.lognormal(math.log(1000) - sigma**2 / 2, sigma, (50_000, 8)), 4000)
    assert m.tail_group * 1000 == pytest.approx(groups.max(axis=1).mean(), rel=0.02)


def test_constant_lengths_have_no_tail_and_no_spread() -> None:
    m = moments(
        workload(response=Lengths(mean_tokens=100, max_tokens=100), prompt=Lengths(mean_tokens=10, max_tokens=10))
    )
    assert (m.tail_group, m.tail_batch, m.context) == (1.0, 1.0, 60.0)
    assert m.sequence2 == 110**2


def test_the_maximum_of_one_is_the_mean() -> None:
    values = quantiles(Lengths(mean_tokens=100, cv=0.5, max_tokens=1000), 1000)
    assert expected_max(values, 1) == pytest.approx(values.mean())


# decode


def test_decode_is_weights_and_kv_over_bandwidth_when_bandwidth_is_scarce() -> None:
    k = kind("k", tflops=10_000, hbm=1e12, launch_s=0.0)
    p = problem(cluster(("k", "a"), kinds=(k,)))
    ctx = context_of(p, replace(IDEAL, host_s_per_sample=0.0))
    read = (SMALL.layers * SMALL.layer_params + SMALL.vocab * SMALL.hidden) * 2
    kv = 10 * ctx.m.context * SMALL.kv_bytes_per_token
    assert decode_step_s(ctx, ReplicaShape(kind="k", tp=1), 10) == pytest.approx((read + kv) / 1e12)


def test_a_paced_device_decodes_at_its_declared_speed() -> None:
    """0.4 MB of weights at 8 MB/s, and two layers at 10 ms each."""
    k = kind("k", tflops=5e-3, hbm=8e6, memory=1e9, paced=True, launch_s=0.01)
    w = workload(response=Lengths(mean_tokens=8, cv=0.4, max_tokens=14), prompt=Lengths(mean_tokens=9, max_tokens=16))
    ctx = context_of(problem(cluster(("k", "a"), kinds=(k,)), model=TINY, workload=w))
    weights = (2 * TINY.layer_params + 32 * 64) * 4 / 8e6
    kv = ctx.m.context * TINY.kv_bytes_per_token / 8e6
    assert decode_step_s(ctx, ReplicaShape(kind="k", tp=1), 1) == pytest.approx(weights + kv + 0.02, rel=1e-3)
    assert 20 < replica_level(ctx, ReplicaShape(kind="k", tp=1), 64).rate_tokens_per_s < 2000


def test_running_batch_fills_kv_memory_and_leaves_room_for_its_fluctuation() -> None:
    w = workload(prompts_per_step=4096, response=Lengths(mean_tokens=4000, cv=0.8, max_tokens=16000))
    cost = CostModel(problem(cluster(("compute", "a"), kinds=(kind("compute", memory=10e9),)), workload=w))
    shape = ReplicaShape(kind="compute", tp=1)
    capacity = replica_kv_capacity_bytes(cost.context, "compute", 1, 1) / replica_kv_bytes_per_token(SMALL, 1, 1)
    b, m = cost.running_limit(shape), cost.moments
    assert b * m.context + 2 * math.sqrt(b) * m.context_sd <= capacity
    assert (b + 1) * m.context + 2 * math.sqrt(b + 1) * m.context_sd > capacity


def test_what_the_engine_can_run_caps_the_batch() -> None:
    shape = ReplicaShape(kind="bandwidth", tp=1)
    free = CostModel(problem()).running_limit(shape)
    for cap in (1, free - 1, free, free + 1):
        limited = CostModel(problem(capabilities=Capabilities(rollout_max_running=cap)))
        assert limited.running_limit(shape) == min(cap, free)


def test_more_memory_runs_more_and_more_running_is_faster_and_slower_for_each() -> None:
    cost = CostModel(problem())
    levels = [cost.level(ReplicaShape(kind="bandwidth", tp=1), b) for b in (1, 4, 16, 64)]
    rates, taus = [x.rate_tokens_per_s for x in levels], [x.tau_s for x in levels]
    assert rates == sorted(rates)
    assert taus == sorted(taus)
    for level in levels:  # Little's law
        assert level.running == pytest.approx(level.rate_tokens_per_s / 400 * level.tau_s)


@given(st.integers(0, 5000))
def test_the_grid_of_concurrency_starts_at_the_limit(limit: int) -> None:
    grid = concurrency_grid(limit)
    assert len(grid) <= 8
    assert grid == tuple(sorted(grid, reverse=True))
    assert grid[:1] == ((limit,) if limit else ())


# network and update


def test_collectives_by_hand() -> None:
    link = Link(latency_s=0.0, bytes_per_s=100.0)
    assert ring_s(link, 1000, 4, 2, IDEAL) == pytest.approx(2 * 1000 * 3 / 4 / 100)
    assert ring_s(link, 1000, 1, 2, IDEAL) == 0
    slow = Link(latency_s=0.0, bytes_per_s=10.0)
    spread = Spread(nodes=2, local=link, remote=slow)
    # four ranks of TP 2 on two machines: two inside on half the bytes each, then two machines on all of them
    both = spread_collective_s(spread, 1000, dp=4, tp=2, passes=2, a=IDEAL)
    assert both == pytest.approx(2 * 500 / 2 / 100 + 2 * 1000 / 2 / 10)
    assert spread_collective_s(spread, 1000, dp=1, tp=2, passes=2, a=IDEAL) == 0


def test_links_and_spreads() -> None:
    a, b = Place(node="a", kind="compute", region="local"), Place(node="b", kind="bandwidth", region="local")
    near = Place(node="a", kind="bandwidth", region="local")
    assert best_link(MIXED, (a,), (b,)) == SLOW
    assert best_link(MIXED, (a,), (b, near)).bytes_per_s == 2e11
    spread = spread_of(MIXED, (a, a))
    assert (spread.nodes, spread.remote) == (1, None)
    other = Place(node="c", kind="compute", region="local")
    assert spread_of(MIXED, (a, other, a)).remote == LINK


def test_weight_update_is_near_the_published_times() -> None:
    """AReaL-Hex, table 2: 7B takes 14.8 s between H800 machines and 58 s across kinds."""
    seven = ModelSpec(
        name="7B",
        hidden=3584,
        intermediate=18944,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        vocab=152064,
        qkv_bias=True,
    )
    ctx = context_of(problem(model=seven))
    assert update_s(ctx, "compute", LINK) == pytest.approx(14.8, rel=0.25)
    assert update_s(ctx, "compute", SLOW) == pytest.approx(58.3, rel=0.25)


# training


@given(st.integers(1, 100), st.lists(st.floats(0.1, 100), min_size=1, max_size=8), st.floats(0, 5))
def test_layers_are_divided_whole_and_in_proportion(layers: int, weights: list[float], heads: float) -> None:
    split = split_layers(layers, weights, heads)
    if len(weights) > layers:
        assert split is None
        return
    assert split is not None
    assert sum(split) == layers
    assert min(split) >= 1
    if len(set(weights)) == 1 and heads == 0:
        assert max(split) - min(split) <= 1


@given(st.lists(st.floats(1, 1000), max_size=60), st.integers(1, 8))
def test_sequences_are_dealt_once_and_evenly(lengths: list[float], workers: int) -> None:
    groups = assign_sequences(lengths, workers)
    assert sorted(i for g in groups for i in g) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in g) for g in groups]
    if lengths:  # greedy by fewest tokens: no worker is above the mean by more than one sequence
        assert max(loads) <= sum(lengths) / workers + max(lengths) + 1e-6


def _shape(*stages: tuple[str, int, int, int], link: Link = LINK) -> TrainerShape:
    local = Spread(nodes=1, local=Link(latency_s=0.0, bytes_per_s=2e11))
    made = tuple(StageShape(kind=k, dp=dp, tp=tp, layers=n, spread=local) for k, dp, tp, n in stages)
    return TrainerShape(stages=made, links=(link,) * (len(made) - 1))


def test_training_time_is_flops_over_peak_when_nothing_else_binds() -> None:
    k = kind("k", tflops=100, hbm=1e18, memory=1e15, link=1e18, launch_s=0.0)
    p = problem(cluster(("k", "a"), kinds=(k,)), workload=workload(proximal_forward=True))
    ctx = context_of(p, IDEAL)
    m = ctx.m
    per_sample = 24 * (m.sequence * (4 * 896 * 64 * 16 + 6 * 896 * 4864) + 2 * m.sequence2 * 14 * 64)
    per_sample += 2 * m.sequence * 896 * 151936
    cost = train_cost(ctx, _shape(("k", 1, 1, 24)), [1.0])
    assert cost is not None
    assert not cost.recompute
    assert cost.train_s == pytest.approx(
        4 * 64 * per_sample / 1e14, rel=1e-6
    )  # forward, backward twice, proximal forward


def test_recomputation_costs_one_more_pass_over_the_layers() -> None:
    assert passes(workload(), False) == (3, 3)
    assert passes(workload(), True) == (4, 3)
    assert passes(workload(proximal_forward=True), True) == (5, 4)
    assert passes(workload(proximal_forward=True), True, "critic_training") == (4, 0)
    assert passes(workload(), False, "reference") == (1, 1)
    assert passes(workload(), False, "reward") == (1, 0)


def test_a_pipeline_over_a_slow_link_pays_for_activations_and_bubbles() -> None:
    ctx = context_of(problem())
    fast = train_cost(ctx, _shape(("compute", 1, 1, 12), ("compute", 1, 1, 12)), [1.0, 1.0])
    slow = train_cost(ctx, _shape(("compute", 1, 1, 12), ("compute", 1, 1, 12), link=SLOW), [1.0, 1.0])
    alone = train_cost(ctx, _shape(("compute", 1, 1, 24)), [1.0])
    assert fast is not None
    assert slow is not None
    assert alone is not None
    assert fast.train_s < slow.train_s
    assert fast.train_s > alone.train_s / 2
    assert fast.bubble_s > 0
    size = ctx.batch_tokens * SMALL.hidden * 2
    assert slow.communication_s >= 2 * size / (SLOW.bytes_per_s * 0.8)  # forward and back


def test_what_does_not_fit_has_no_cost() -> None:
    small = kind("compute", memory=6e9)
    ctx = context_of(problem(cluster(("compute", "a"), kinds=(small,))))
    assert train_cost(ctx, _shape(("compute", 1, 1, 24)), [1.0]) is None


def test_fsdp_divides_optimiser_state() -> None:
    card = kind("compute", memory=8e9)
    fleet = cluster(("compute", "a"), kinds=(card,))
    wide = _shape(("compute", 4, 1, 24))
    w = workload(prompt=Lengths(mean_tokens=100, max_tokens=100), response=Lengths(mean_tokens=400, max_tokens=400))
    whole = context_of(problem(fleet, workload=w))
    assert train_cost(whole, wide, [1.0]) is None
    assert train_cost(replace(whole, trainer="fsdp"), wide, [1.0]) is not None


# the period

levels = st.builds(
    lambda b, r: Level(running=b, rate_tokens_per_s=r, tau_s=100 * b / r, recompute_s=0.0),
    st.integers(1, 64),
    st.floats(1, 500),
)
offers = st.builds(lambda x, p: Offer(level=x, pause_s=p, transfer_s=p), levels, st.floats(0, 5))
# Tokens by seconds, both ascending.
curves = st.lists(st.tuples(st.floats(0.01, 20), st.floats(0, 500)), min_size=1, max_size=4).map(
    lambda steps: tuple(
        (math.fsum(s for s, _ in steps[:n]), math.fsum(t for _, t in steps[:n])) for n in range(1, len(steps) + 1)
    )
)
curved = st.builds(lambda o, d: replace(o, done=d), offers, curves)


def groups_of(some: st.SearchStrategy[Offer]) -> st.SearchStrategy[Group]:
    return st.builds(
        lambda o, n, m: Group(offers=tuple(o), count=n, mandatory=m),
        st.lists(some, min_size=1, max_size=3),
        st.integers(1, 3),
        st.booleans(),
    )


groups = groups_of(offers)
rules = st.builds(
    Rules,
    work_tokens=st.floats(10, 10_000),
    sync=st.booleans(),
    eta=st.integers(0, 8),
    tail_group=st.floats(1, 3),
    tail_batch=st.floats(1, 5),
    reward_s=st.sampled_from([0.0, 1.0]),
    pause_all=st.booleans(),
    overlapped=st.booleans(),
)


def test_equal_parts_are_paced_by_the_slowest() -> None:
    """300 tokens on replicas of 100 and 50 tokens/s: 2 s by speed, 3 s where each does 150."""
    fast, slow = (
        Offer(level=Level(running=1, rate_tokens_per_s=r, tau_s=0.1, recompute_s=0.0), pause_s=0.0, transfer_s=0.0)
        for r in (100.0, 50.0)
    )
    r = Rules(work_tokens=300.0, sync=True, eta=0, tail_group=1.0, tail_batch=1.0, reward_s=0.0, pause_all=False)
    fleet = [Group(offers=(o,), mandatory=True) for o in (fast, slow)]
    by_speed, even = solve_period(1.0, fleet, r), even_period(1.0, fleet, r)
    assert by_speed is not None
    assert even is not None
    assert by_speed[0] == pytest.approx(3.0)  # training takes 1 s of it
    assert even[0] == pytest.approx(4.0)
    assert even_period(1.0, [], r) is None


@given(st.floats(0.01, 100), st.lists(st.one_of(groups, groups_of(curved)), min_size=1, max_size=3), rules)
def test_the_period_is_the_smallest_that_does_the_work(train_s: float, fleet: list[Group], r: Rules) -> None:
    solved = solve_period(train_s, fleet, r)
    assert solved is not None
    period, chosen = solved
    assert period >= train_s

    def work(at: float) -> float:
        total = 0.0
        for g in fleet:
            given = [r.given_tokens(o, at, train_s) for o in g.offers if r.required_s(o, train_s) <= at]
            total += g.count * max(given, default=0.0)
        return total

    def allowed(at: float) -> bool:
        forced = [min(r.required_s(o, train_s) for o in g.offers) for g in fleet if g.mandatory]
        return at >= train_s and all(at >= f for f in forced) and work(at) >= r.work_tokens

    assert allowed(period * (1 + 1e-6))
    for share in (0.5, 0.9, 0.99, 0.9999):
        assert not allowed(period * share)
    for g, o in zip(fleet, chosen, strict=True):
        assert o is not None or not g.mandatory
        if o is not None:
            assert r.required_s(o, train_s) <= period * (1 + 1e-9)


@given(st.lists(offers, min_size=1, max_size=4), st.floats(10, 1000))
def test_the_rollout_window_does_exactly_the_work(chosen: list[Offer], tokens: float) -> None:
    r = Rules(work_tokens=tokens, sync=False, eta=4, tail_group=1, tail_batch=1, reward_s=0.0, pause_all=False)
    window = window_needed_s([(o, 1) for o in chosen], r)
    done = sum(o.level.rate_tokens_per_s * max(0.0, window - o.pause_s) for o in chosen)
    assert done == pytest.approx(tokens, rel=1e-6)


def test_sync_adds_and_async_overlaps() -> None:
    def step(**changes: object) -> tuple[float, float, float]:
        p = problem(workload=workload(**changes))
        stage = Stage(devices=("d0",), kind="compute", dp=1, tp=1, layers=24)
        train = Placement(role="train", kind="compute", devices=("d0",), stages=(stage,))
        roll = Placement(role="rollout", kind="bandwidth", devices=("d2",))
        found = CostModel(p).evaluate(Plan(placements=(train, roll)))
        assert found is not None
        return found.prediction.step_s, found.prediction.train_s, found.prediction.rollout_s

    period, train, rollout = step(mode="async", eta=8)
    assert period == pytest.approx(max(train, rollout))
    period, train, rollout = step(mode="sync", eta=0)
    assert period == pytest.approx(train + rollout)
    assert step(mode="async", eta=0)[0] == pytest.approx(period)


def test_price_covers_idle_devices_of_rented_machines_and_is_unknown_without_a_price() -> None:
    stage = Stage(devices=("d0",), kind="compute", dp=1, tp=1, layers=24)
    train = Placement(role="train", kind="compute", devices=("d0",), stages=(stage,))
    roll = Placement(role="rollout", kind="compute", devices=("d1",))
    two = cluster(*[("compute", "a")] * 3, ("bandwidth", "b"), kinds=(COMPUTE, BANDWIDTH))
    plan = Plan(placements=(train, roll))
    assert CostModel(problem(two)).usd_per_h(plan) == 15.0
    free = cluster(*[("compute", "a")] * 3, kinds=(replace(COMPUTE, price_usd_per_h=None),))
    assert CostModel(problem(free)).usd_per_h(plan) is None


@given(curved, rules, st.floats(0, 200))
def test_no_window_gives_more_than_the_pace_of_an_offer(offer: Offer, r: Rules, window_s: float) -> None:
    [(pace, same)] = by_pace([offer])
    assert same == offer
    assert r.tokens_in(offer, window_s) <= pace * window_s
