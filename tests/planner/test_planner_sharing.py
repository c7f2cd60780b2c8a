"""Prompts that a group's samples share: counted by hand, against single samples on single slots, and what plans gain by them."""

import heapq

import numpy as np
import pytest
from fleets import cluster, kind, problem, problems, workload
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cost import CostModel
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape, prefill_s, replica_level
from planner.cost.lengths import moments, quantiles
from planner.cost.memory import running_limit
from planner.cost.sharing import Sharing, shared_tokens, sharing
from planner.problem import Problem
from planner.record import replace
from planner.workload import Lengths

SHAPE = ReplicaShape(kind="k", tp=1)
FLEET = cluster(("k", "a"), ("k", "a"), kinds=(kind("k"),))


def of(prompt: float, group: int, block: int | None, *, cv: float = 0.0, **changes: object) -> Problem:
    """Two devices and 16 groups of samples with constant prompts."""
    asked = workload(
        responses_per_prompt=group,
        prompt=Lengths(mean_tokens=prompt, max_tokens=4096),
        response=Lengths(mean_tokens=400, cv=cv, max_tokens=4000),
        **changes,
    )
    base = problem(FLEET, workload=asked)
    return replace(base, capabilities=replace(base.capabilities, rollout_prefix_block=block))


@pytest.mark.parametrize(
    ("prompt", "block", "shared"),
    [
        (130, 16, 128),  # 8 whole blocks of 130 tokens
        (128, 16, 112),  # the last token is computed for each, and its block with it
        (129, 16, 128),
        (16, 16, 0),
        (5, 16, 0),
        (130, 1, 129),
        (130, 32, 128),
    ],
)
def test_whole_blocks_before_the_last_token_are_shared(prompt: int, block: int, shared: int) -> None:
    assert shared_tokens(Lengths(mean_tokens=prompt, max_tokens=prompt), block) == (shared, shared**2)


def test_eight_samples_of_one_prompt_compute_144_tokens() -> None:
    """As counted in vLLM's scheduler: 130 tokens once and 2 more for each of the seven others, not 8 x 130 = 1,040."""
    ctx = context_of(of(130, 8, 16))
    each = ctx.m.prompt - ctx.shared.each_spared * ctx.shared.tokens
    assert 8 * each == pytest.approx(144)
    # Squares: a token at place i looks at i others, so a suffix costs P^2 - Q^2.
    each2 = ctx.m.prompt2 - ctx.shared.each_spared * ctx.shared.tokens2
    assert 8 * each2 == pytest.approx(130**2 + 7 * (130**2 - 128**2))


def test_prompts_of_many_lengths_share_half_a_block_less_than_they_have() -> None:
    lengths = Lengths(mean_tokens=600, cv=0.5, max_tokens=4000)
    tokens, _ = shared_tokens(lengths, 16)
    mean = float(quantiles(lengths, 256).mean())
    assert tokens == pytest.approx(mean - 17 / 2, abs=0.5)


def held_by_simulation(slots: int, group: int, lengths: Lengths, rng: np.random.Generator) -> float:
    """Groups with a running sample, mean over time: each slot takes the next sample when it is free."""
    count = max(200, 20 * slots // group)
    drawn = rng.choice(quantiles(lengths, 2048), (count, group))
    free = [0.0] * slots
    begun, ended = np.zeros_like(drawn), np.zeros_like(drawn)
    for g in range(count):
        for i in range(group):
            begun[g, i] = heapq.heappop(free)
            ended[g, i] = begun[g, i] + drawn[g, i]
            heapq.heappush(free, ended[g, i])
    low, high = np.quantile(begun, 0.3), np.quantile(begun, 0.9)
    spans = np.clip(ended.max(axis=1), low, high) - np.clip(begun.min(axis=1), low, high)
    return float(spans.sum() / (high - low))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([0.3, 0.6, 1.0]), st.sampled_from([2, 4, 8, 16]), st.integers(1, 200))
def test_as_many_groups_are_held_as_single_samples_hold(cv: float, group: int, running: int) -> None:
    asked = workload(
        prompts_per_step=1000, responses_per_prompt=group, response=Lengths(mean_tokens=400, cv=cv, max_tokens=4000)
    )
    shared = sharing(asked, moments(asked), 16)
    seen = held_by_simulation(running, group, asked.response, np.random.default_rng(3))
    assert shared.held_groups(running) == pytest.approx(seen, rel=0.12)


def test_of_constant_lengths_no_more_than_a_group_too_many_is_held() -> None:
    """32 samples in groups of 8 begin and end as 4 whole groups; told are 32/8 + 7/8. One sample at a time is of one group."""
    shared = context_of(of(130, 8, 16)).shared
    assert shared.held_groups(32) == pytest.approx(4 + 7 / 8)
    assert shared.held_groups(1) == 1
    assert shared.spared_tokens(32) == pytest.approx((32 - 4.875) * 128)


def test_there_are_never_more_groups_than_the_step_has() -> None:
    """All 128 samples of a synchronous step at once are 16 groups, however long the last of each goes on."""
    shared = context_of(of(130, 8, 16, cv=1.0, mode="sync", eta=0)).shared
    assert shared.tail > 2
    assert shared.held_groups(128) == 16


@settings(max_examples=50)
@given(st.floats(1, 4), st.integers(1, 32), st.integers(1, 64), st.integers(1, 500), st.integers(1, 500))
def test_more_samples_hold_no_fewer_groups(tail: float, group: int, most: int, a: int, b: int) -> None:
    shared = Sharing(group=group, tokens=128.0, tokens2=128.0**2, tail=tail, most=most)
    low, high = sorted((a, b))
    assert shared.held_groups(low) <= shared.held_groups(high)
    assert low / group * (1 - 1e-12) <= shared.held_groups(low) <= low


@given(problems(), st.sampled_from(["k0", "k1"]), st.integers(1, 200))
def test_without_groups_or_blocks_nothing_changes(p: Problem, name: str, running: int) -> None:
    """Alone in its group a sample shares with nobody, whatever the engine could."""
    alone = replace(p, workload=replace(p.workload, responses_per_prompt=1))
    blocks = replace(alone, capabilities=replace(p.capabilities, rollout_prefix_block=16))
    shape = ReplicaShape(kind=name, tp=1)
    plain, could = context_of(alone), context_of(blocks)
    assert running_limit(plain, name, 1, 1) == running_limit(could, name, 1, 1)
    assert replica_level(plain, shape, running) == replica_level(could, shape, running)


@given(problems(), st.sampled_from([16, 32, 64]), st.sampled_from(["k0", "k1"]), st.integers(1, 200))
def test_sharing_never_costs(p: Problem, block: int, name: str, running: int) -> None:
    shape = ReplicaShape(kind=name, tp=1)
    plain, could = (
        context_of(replace(p, capabilities=replace(p.capabilities, rollout_prefix_block=b))) for b in (None, block)
    )
    a, b = replica_level(plain, shape, running), replica_level(could, shape, running)
    assert b.recompute_s <= a.recompute_s * (1 + 1e-12)
    assert b.rate_tokens_per_s >= a.rate_tokens_per_s * (1 - 1e-12)
    assert running_limit(could, name, 1, 1) >= running_limit(plain, name, 1, 1)


def test_the_limit_counts_a_shared_prompt_once_a_group() -> None:
    """Contexts are 3,001 + 200 tokens, of which a group's samples share 3,000: with 110,000 tokens of KV 34 of them fit apart.
    Shared, 101 samples hold (101 + 7) / 8 = 13.5 prompts: 101 * 201 + 13.5 * 3,000 = 60,801, and 186 samples fit."""
    apart, together = of(3001, 8, None), of(3001, 8, 1000)
    at = context_of(apart)
    kv = 2 * 24 * 2 * 64 * 2  # layers, heads of keys and of values, their width, bytes
    memory = 110_000 * kv
    a = replace(at.a, rollout_memory_share=1.0, overhead_bytes=0.0, bucket_bytes=0.0, kv_sigmas=0.0)
    weights = at.model.weight_bytes

    def limit(p: Problem) -> int:
        small = replace(p.cluster, kinds={"k": replace(p.cluster.kinds["k"], memory_bytes=memory + weights)})
        return running_limit(context_of(replace(p, cluster=small), a), "k", 1, 1)

    assert at.m.context == 3201
    assert limit(apart) == 34
    # b * 201 + (b + 7) / 8 * 3,000 <= 110,000 of constant lengths: b <= (110,000 - 2,625) / 576.
    assert limit(together) == 186


def test_prefixes_after_an_update_are_computed_once_a_group() -> None:
    """32 running samples of groups of 8: 4.875 prompts of 128 shared tokens instead of 32; and as fast as was measured."""
    ctx = context_of(of(130, 8, 16))
    tokens = 32 * ctx.m.context - (32 - 4.875) * 128
    tokens2 = 32 * ctx.m.context2 - (32 - 4.875) * 128**2
    assert replica_level(ctx, SHAPE, 32).recompute_s == pytest.approx(prefill_s(ctx, SHAPE, tokens, tokens2))
    quick = replace(ctx.cluster, kinds={"k": replace(ctx.kind("k"), recompute_efficiency=0.5)})
    assert replica_level(replace(ctx, cluster=quick), SHAPE, 32).recompute_s == pytest.approx(
        2 * prefill_s(ctx, SHAPE, tokens, tokens2)
    )


def test_a_plan_with_shared_prompts_is_faster() -> None:
    """Long prompts and short answers, where prefill is most of what a replica does."""
    base = of(2000, 8, None)
    short = replace(base, workload=replace(base.workload, response=Lengths(mean_tokens=50, max_tokens=100)))
    can = replace(short, capabilities=replace(short.capabilities, rollout_prefix_block=16))
    level, shared = (CostModel(p).level(SHAPE, 64) for p in (short, can))
    assert shared.rate_tokens_per_s > 2 * level.rate_tokens_per_s
