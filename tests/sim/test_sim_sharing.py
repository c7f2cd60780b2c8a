"""Samples of a group on one replica: who gets which, what is prefilled and held, and that planner and simulator agree on it."""

import math
from collections import defaultdict

import numpy as np
import pytest

from planner import Feasible, solve
from planner.cost.context import context_of
from planner.problem import Problem
from planner.record import replace
from planner.workload import Lengths
from runtime.policy.staleness import StalenessPolicy, StalePolicy
from runtime.sim.flow import SimulatedFlow
from runtime.sim.homes import Homes
from runtime.sim.lengths import LengthModel
from runtime.sim.options import Options
from runtime.sim.report import simulate
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.speed import ReplicaSpeed, TrainerSpeed
from tests.planner.fleets import SLOW, cluster, kind, problem, workload

GROUP, PROMPT = 4, 33


def flow_of(
    *, slots: int, replicas: int = 1, block: int | None = 16, kv: float = math.inf, stale: StalePolicy = "mask",
    prompts: int = 4, prefill: float = 0.0, spread: float = 0.0, steps: int | None = None, recompute: bool = True,
) -> SimulatedFlow:  # fmt: skip
    """Replicas at 10 ms a token, `prefill` seconds a prompt token; groups of 4 samples of 100 tokens after prompts of 33."""
    response = LengthModel(
        family="constant" if spread == 0 else "lognormal", mean_tokens=100, cv=spread, max_tokens=1000
    )
    rules = FlowRules(
        policy=StalenessPolicy(eta=2, prompts_per_step=prompts, stale=stale),
        responses_per_prompt=GROUP,
        prompt=LengthModel(family="constant", mean_tokens=PROMPT, max_tokens=PROMPT),
        response=response,
        block=block,
        steps=steps,
        recompute=recompute,
    )
    flow = SimulatedFlow(rules, 5)
    for i in range(replicas):
        speed = ReplicaSpeed(
            slots=slots, base_s=np.full(slots + 1, 0.01), kv_s=np.zeros(slots + 1), kv_tokens=kv,
            prefill=(0.0, prefill, 0.0), recompute_efficiency=0.5,
        )  # fmt: skip
        flow.add_replica(f"r{i}", speed, WeightsPath())
        flow.granting._ramps[f"r{i}"] = flow.decoding.allowed[i] = slots  # no warm-up
    return flow


def test_a_replica_takes_the_rest_of_a_group_and_the_last_of_a_step_are_split() -> None:
    homes = Homes()
    homes.open(7, [10, 20, 30])
    assert homes.take(7, "a") == (10, False)
    assert homes.take(7, "a") == (20, True)
    homes.open(8, [5, 6])
    homes.take(8, "b")
    assert (homes.here("a"), homes.here("b"), homes.here("c"), homes.waiting, homes.least_left) == (7, 8, None, 2, 6)
    assert homes.take(7, "c") == (30, False)  # the prompt is not there
    assert list(homes) == [8]
    homes.leave("b")
    assert (homes.nowhere(), homes.here("b")) == (8, None)
    assert homes.take(8, "a") == (6, False)
    assert (homes.waiting, homes.least_left, homes.nowhere()) == (0, None, None)


def homes_seen(flow: SimulatedFlow) -> dict[int, set[int]]:
    d = flow.decoding
    seen = defaultdict(set)
    for k in np.flatnonzero(np.isfinite(d.ends)).tolist():
        seen[int(d.row[k])].add(int(d.rep[k]))
    return seen


@pytest.mark.parametrize("stale", ["mask", "wait", "drop"])
def test_samples_of_a_group_run_on_one_replica(stale: StalePolicy) -> None:
    """Nine slots each, so that no replica is filled by whole groups: first come, first served would split most groups."""
    shares = {}
    for block in (16, None):
        flow = flow_of(slots=9, replicas=3, stale=stale, prompts=16, spread=0.6, block=block, steps=30)
        flow.set_trainer(TrainerSpeed(train_s=0.5))
        together, looked = 0, 0
        for at_s in range(5, 60):
            if flow.advance(float(at_s)) == "steps":
                break
            many = [where for row, where in homes_seen(flow).items()]
            together, looked = together + sum(len(w) == 1 for w in many), looked + len(many)
        assert looked > 100
        shares[block] = together / looked
    assert shares[16] > 0.85
    assert shares[None] < 0.7


def test_a_prompt_is_prefilled_once_a_replica() -> None:
    """33 tokens once and one more for each of the three others, 36 and not 132 a group; at 1 ms each and four groups."""
    for block, tokens in ((16, 36), (None, 4 * PROMPT)):
        flow = flow_of(slots=16, block=block, prefill=1e-3)
        flow.granting.fill(0.0)
        assert flow.decoding.stall[0] == pytest.approx(4 * tokens * 1e-3)


def test_prefixes_are_computed_anew_once_a_group_at_the_measured_efficiency() -> None:
    """16 samples at 50 tokens of 33 + 50: 16 x 83 less 12 x 32 that others of their groups have, at half the speed of prefill."""
    flow = flow_of(slots=16, prefill=1e-3)
    flow.granting.fill(0.0)
    flow.decoding.stall[0] = 0.0
    flow.advance(0.5)
    assert flow.decoding.recompute_s(0) == pytest.approx((16 * 83 - 12 * 32) * 1e-3 / 0.5)


def test_a_replica_that_shares_prompts_holds_more_samples() -> None:
    """16 samples of 33 + 100 tokens are 2,128; of 32 shared ones in four groups three quarters are spared: 1,744."""
    preempted = {}
    for block in (16, None):
        flow = flow_of(slots=16, kv=1800.0, block=block)
        flow.granting.fill(0.0)
        assert flow.decoding.held_tokens(0.0)[0] == 16 * PROMPT - (12 * 32 if block else 0)
        flow.advance(0.99)
        preempted[block] = flow.books.preempted
    assert preempted[16] == 0
    assert preempted[None] > 0


def test_a_replica_that_leaves_gives_its_groups_to_others() -> None:
    flow = flow_of(slots=6, replicas=2, steps=8)
    flow.set_trainer(TrainerSpeed(train_s=0.1))
    flow.advance(0.5)
    flow.remove_replica("r0", lost=True)
    assert flow.advance(math.inf) == "steps"
    assert flow.groups.homes.waiting <= flow.groups.fresh_count


def prefilling(block: int | None) -> Problem:
    """Long prompts and short answers, where prefill is much of what a replica does, on two cards that train faster than that."""
    asked = workload(
        prompts_per_step=32,
        responses_per_prompt=8,
        prompt=Lengths(mean_tokens=1501, max_tokens=1501),
        response=Lengths(mean_tokens=100, cv=0.4, max_tokens=400),
    )
    fleet = cluster(
        *[("k", "a")] * 2, kinds=(replace(kind("k"), train_efficiency=8.0, rollout_efficiency=0.5),), cross=SLOW
    )
    base = problem(fleet, workload=asked)
    return replace(base, capabilities=replace(base.capabilities, rollout_prefix_block=block))


@pytest.mark.parametrize("block", [None, 16])
def test_a_run_with_shared_prompts_is_about_as_fast_as_predicted(block: int | None) -> None:
    p = prefilling(block)
    found = solve(p)
    assert isinstance(found, Feasible)
    run = simulate(p, found.plan, Options(steps=40, seed=3))
    assert found.prediction.rollout_s > 1.2 * found.prediction.train_s
    assert run.steady_step_s == pytest.approx(found.prediction.step_s, rel=0.03)


def test_sharing_is_felt_in_the_plan() -> None:
    alone, together = (solve(prefilling(b)) for b in (None, 16))
    assert isinstance(alone, Feasible)
    assert isinstance(together, Feasible)
    assert together.prediction.tokens_per_s > 1.1 * alone.prediction.tokens_per_s
    assert context_of(prefilling(16)).shared.tokens == 1488
