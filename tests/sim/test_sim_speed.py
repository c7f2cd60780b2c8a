"""Speeds of replicas beside the cost model, a kind's calibration factor included."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sim_run import problem

import planner
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape, decode_step_s, prefill_s, replica_level
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible
from runtime.sim import Options, simulate
from runtime.sim.speed import replica_speed


def reaching(p: Problem, share: float, **figures: float) -> Problem:
    """With kinds that generate at that share of the modelled speed."""
    figures["rollout_efficiency"] = share
    kinds = {name: replace(k, **figures) for name, k in p.cluster.kinds.items()}  # type: ignore[arg-type]
    return replace(p, cluster=replace(p.cluster, kinds=kinds))


@settings(max_examples=25)
@given(
    share=st.floats(0.25, 4.0), kind=st.sampled_from(["compute", "bandwidth"]), tp=st.sampled_from([1, 2]),
    running=st.integers(1, 64), used=st.floats(0.5, 1.0), begins_s=st.floats(0.0, 0.1),
)  # fmt: skip
def test_a_replica_is_as_fast_as_the_cost_model_says_of_its_kind(
    *, share: float, kind: str, tp: int, running: int, used: float, begins_s: float
) -> None:
    ctx = context_of(reaching(problem(), share, slots_used=used, prefill_sample_s=begins_s))
    shape = ReplicaShape(kind=kind, tp=tp)
    speed = replica_speed(ctx, shape, 64)
    step = speed.step_s(running, ctx.m.context)
    assert step == pytest.approx(decode_step_s(ctx, shape, running * used) / used / share)
    p0, p1, p2 = speed.prefill
    assert p0 + 100 * p1 + 20_000 * p2 == pytest.approx((prefill_s(ctx, shape, 100, 20_000) + begins_s) / share)
    # What the planner counts with is slower by the prompts that are prefilled meanwhile, and by nothing else.
    level = replica_level(ctx, shape, running)
    assert level.rate_tokens_per_s <= running / step * (1 + 1e-9)
    assert level.recompute_s == pytest.approx(
        prefill_s(ctx, shape, running * used * ctx.m.context, running * used * ctx.m.context2) / share
    )


@pytest.mark.parametrize(
    ("share", "figures"),
    [(1.0, {}), (0.5, {}), (0.5, {"slots_used": 0.8, "prefill_sample_s": 0.01, "recompute_sample_s": 0.005})],
)
def test_a_calibrated_run_is_as_fast_as_predicted(share: float, figures: dict[str, float]) -> None:
    """The plan is that of the factor 1: with 0.5 its replicas are what everything waits for."""
    p = problem(prompts_per_step=128, eta=4)
    found = planner.solve(p)
    assert isinstance(found, Feasible)
    run = simulate(reaching(p, share, **figures), found.plan, Options(steps=40))
    assert run.predicted is not None
    assert run.steady_step_s is not None
    assert run.steady_step_s / run.predicted.step_s == pytest.approx(1.0, abs=0.05)
    if share < 1:
        assert run.predicted.step_s > 1.3 * found.prediction.step_s
