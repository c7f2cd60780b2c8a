"""The cost model beside a run: predictions of real work, and problems with calibration factors in them."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner
from planner.cost.decode import ReplicaShape
from planner.cost.model import CostModel
from planner.model import load_model_spec
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config
from runtime.core.modelled import CostedWork, corrected, rescored
from runtime.core.observation import Work

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def problem_of(name: str) -> Problem:
    config = load_config(CONFIGS / f"{name}.toml").config
    model = load_model_spec(Path(config.model.path))
    return problem_from_config(config, cluster_from_config(config), model)


def solved(problem: Problem) -> Feasible:
    found = planner.solve(problem)
    assert isinstance(found, Feasible)
    return found


def test_decoding_at_a_level_is_predicted_as_the_plan_predicts_it() -> None:
    problem = problem_of("local")
    level = CostModel(problem).level(ReplicaShape(kind="wide", tp=1), 40)
    m = CostModel(problem).moments
    steps = 1000
    tokens = 40 * steps
    # One prompt is prefilled for each response that ends.
    prefill = round(tokens / m.response * m.prompt)
    found = CostedWork(problem, None).decode("wide", 1, Work(steps=steps, tokens=tokens, prefill_tokens=prefill))
    assert found is not None
    assert found.tokens_per_s == pytest.approx(level.rate_tokens_per_s, rel=0.01)
    assert found.seconds == pytest.approx(tokens / level.rate_tokens_per_s, rel=0.01)
    assert CostedWork(problem, None).decode("unheard-of", 1, Work(steps=1, tokens=1)) is None


@given(
    used=st.floats(0.5, 1.0),
    slow=st.floats(0.3, 3.0),
    samples_s=st.tuples(st.floats(0, 0.05), st.floats(0, 0.05)),
    updates=st.integers(0, 5),
    block=st.sampled_from([None, 4]),
)
def test_work_is_counted_as_the_plan_counts_it_whatever_a_calibration_says(
    used: float, slow: float, samples_s: tuple[float, float], updates: int, block: int | None
) -> None:
    """A replica that has as many samples as the plan gives it, for a while in which they take new weights so many times."""
    begins_s, again_s = samples_s
    figures = {
        "slots_used": used,
        "rollout_efficiency": slow,
        "prefill_sample_s": begins_s,
        "recompute_sample_s": again_s,
    }
    problem = problem_of("local")
    kinds = {n: replace(k, **figures) for n, k in problem.cluster.kinds.items()}  # type: ignore[arg-type]
    problem = replace(
        problem,
        cluster=replace(problem.cluster, kinds=kinds),
        capabilities=replace(problem.capabilities, rollout_prefix_block=block),
    )
    cost = CostModel(problem)
    level, m = cost.level(ReplicaShape(kind="wide", tp=1), 40), cost.moments
    steps = 10_000
    tokens = round(40 * used * steps)
    prefill = tokens / m.response * m.prompt + updates * 40 * used * m.context
    work = Work(steps=steps, tokens=tokens, prefill_tokens=round(prefill))
    found = CostedWork(problem, None).decode("wide", 1, work)
    assert found is not None
    # Work tells whole samples of a step.
    assert found.seconds == pytest.approx(tokens / level.rate_tokens_per_s + updates * level.recompute_s, rel=0.03)


def test_training_is_predicted_as_the_plan_lays_it_out() -> None:
    problem = problem_of("local")
    plan = solved(problem)
    train = plan.plan.train
    assert train is not None
    batch = CostModel(problem).context.batch_tokens
    found = CostedWork(problem, plan.plan).train(train.devices, Work(steps=2, tokens=round(2 * batch)))
    assert found is not None
    assert found.seconds == pytest.approx(2 * plan.prediction.train_s, rel=1e-3)
    assert found.tokens_per_s == pytest.approx(train.rate_tokens_per_s or 0.0)
    assert CostedWork(problem, plan.plan).train(("elsewhere",), Work(steps=1, tokens=1)) is None
    assert CostedWork(problem, None).train(train.devices, Work(steps=1, tokens=1)) is None


@pytest.mark.parametrize("name", ["local", "h100-7", "rtx4090-8"])
@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25])
def test_factors_scale_what_the_plan_predicts(name: str, factor: float) -> None:
    problem = problem_of(name)
    plan = solved(problem).plan
    before = CostModel(problem).evaluate(plan)
    names = list(problem.cluster.kinds)
    after = CostModel(
        corrected(replace(problem, in_force=plan), {(k, r): factor for k in names for r in ("train", "rollout")})  # type: ignore[misc]
    ).evaluate(plan)
    assert before is not None
    assert after is not None
    assert after.prediction.train_s == pytest.approx(before.prediction.train_s / factor, rel=0.05)
    for a, b in zip(before.plan.rollouts, after.plan.rollouts, strict=True):
        assert a.rate_tokens_per_s is not None
        if a.max_running == b.max_running:
            assert b.rate_tokens_per_s == pytest.approx(a.rate_tokens_per_s * factor)
    assert corrected(problem, {}) is problem


def test_a_factor_of_one_kind_moves_that_kind_and_its_role_only() -> None:
    problem = problem_of("local")
    factors = {(k, "rollout"): 1.0 for k in problem.cluster.kinds} | {("wide", "rollout"): 0.5}
    changed = corrected(problem, factors)  # type: ignore[arg-type]
    for name in problem.cluster.kinds:
        before = CostModel(problem).level(ReplicaShape(kind=name, tp=1), 16).rate_tokens_per_s
        after = CostModel(changed).level(ReplicaShape(kind=name, tp=1), 16).rate_tokens_per_s
        assert after / before == pytest.approx(0.5 if name == "wide" else 1.0)
        assert changed.cluster.kinds[name].train_efficiency == problem.cluster.kinds[name].train_efficiency


def test_the_plan_in_force_is_scored_under_the_new_factors() -> None:
    problem = problem_of("local")
    plan = solved(problem)
    assert rescored(problem, plan.plan) == pytest.approx(plan.prediction.tokens_per_s)
    half = {(k, r): 0.5 for k in problem.cluster.kinds for r in ("train", "rollout")}
    again = rescored(corrected(replace(problem, in_force=plan.plan), half), plan.plan)  # type: ignore[arg-type]
    assert again is not None
    assert math.isclose(again, plan.prediction.tokens_per_s / 2, rel_tol=0.1)
    fewer = replace(problem, cluster=replace(problem.cluster, devices=problem.cluster.devices[1:]))
    assert rescored(fewer, plan.plan) is None
