"""What a fleet of a hundred thousand devices asks of the cost model, against the plain way to count it."""

import itertools
import math

import pytest
from fleets import problem, workload
from hypothesis import given
from hypothesis import strategies as st

from planner import Feasible, solve
from planner.cluster import Cluster, DeviceKind, Link
from planner.cost.context import context_of
from planner.cost.lengths import longest, quantiles
from planner.cost.network import Place, best_link, best_of, link_between, spread_of, worst_of
from planner.cost.training import IMBALANCE_DRAWS, assign_sequences, imbalance
from planner.whatif import apply, parse
from planner.workload import Lengths

LENGTHS = Lengths(mean_tokens=600, cv=1.0, max_tokens=4000)
MACHINES = 20_000  # four hundred million pairs of two groups of these would take minutes


def links_apart() -> Cluster:
    """Every class of link has rates of its own."""
    kinds = {
        name: DeviceKind(name=name, peak_flops=1e14, hbm_bytes_per_s=2e12, memory_bytes=8e10, link_bytes_per_s=rate)
        for name, rate in (("x", 2e11), ("y", 3e11))
    }
    return Cluster(
        kinds=kinds,
        devices=(),
        same_kind=Link(latency_s=1e-5, bytes_per_s=5e10),
        cross_kind=Link(latency_s=5e-6, bytes_per_s=1e9, streams=4),
        cross_region=Link(latency_s=0.03, bytes_per_s=1e8, streams=8, egress_usd_per_gb=0.02),
        regions={("ap", "eu"): Link(latency_s=0.1, bytes_per_s=5e7, egress_usd_per_gb=0.09)},
    )


CLUSTER = links_apart()
PLACES = st.lists(
    st.builds(Place, node=st.sampled_from("abcd"), kind=st.sampled_from("xy"), region=st.sampled_from(("ap", "eu", "us"))),
    min_size=1,
    max_size=7,
).map(tuple)  # fmt: skip


@given(PLACES, PLACES)
def test_the_links_of_a_few_machines_are_those_of_all(left: tuple[Place, ...], right: tuple[Place, ...]) -> None:
    pairs = itertools.product(left, right)
    assert best_link(CLUSTER, left, right) == best_of([link_between(CLUSTER, a, b) for a, b in pairs])
    distinct = list(dict.fromkeys(left))
    every = [link_between(CLUSTER, a, b) for a, b in itertools.combinations(distinct, 2)]
    spread = spread_of(CLUSTER, left)
    assert spread.nodes == len(distinct)
    assert spread.remote == (worst_of(every) if every else None)


def test_groups_of_many_machines_are_joined_at_once() -> None:
    left = tuple(Place(node=f"l{i}", kind="x", region="eu") for i in range(MACHINES))
    right = tuple(Place(node=f"r{i}", kind="y", region="eu") for i in range(MACHINES))
    assert best_link(CLUSTER, left, right) == CLUSTER.cross_kind.bulk()
    assert spread_of(CLUSTER, left + right[:1]).remote == worst_of(
        [CLUSTER.same_kind.bulk(), CLUSTER.cross_kind.bulk()]
    )


@given(st.integers(1, 5000))
def test_the_longest_is_the_last_quantile(points: int) -> None:
    assert longest(LENGTHS, points) == quantiles(LENGTHS, points)[-1]


@given(st.integers(2, 4096))
def test_imbalance_is_that_of_sequences_given_out(dp: int) -> None:
    """All of them where workers are fewer than the draws; beyond, the mean of the draws is as good as that of all."""
    ctx = context_of(problem(workload=workload(prompts_per_step=1024, response=LENGTHS)))
    lengths = ctx.m.prompt + quantiles(LENGTHS, max(IMBALANCE_DRAWS, dp))
    loads = [math.fsum(lengths[i] for i in group) for group in assign_sequences(lengths, dp)]
    whole = max(loads) * dp / math.fsum(lengths)
    assert imbalance(ctx, dp) == pytest.approx(whole, rel=1e-9 if dp <= IMBALANCE_DRAWS else 2e-3)


@pytest.mark.parametrize(("scheduler", "more"), [("hex", 20_000), ("areal-hex", 2_000)])
def test_a_search_that_is_to_stop_plans_a_large_fleet_all_the_same(scheduler: str, more: int) -> None:
    p = apply(problem(), parse(f"add={more}xH20"))
    found = solve(p, scheduler=scheduler, should_stop=lambda: True)
    assert isinstance(found, Feasible)
    assert not found.finished
    assert found.bound_tokens_per_s >= found.prediction.tokens_per_s > 0
