"""The robust plan against brute force over candidates, and where it says to plan again."""

import itertools

import pytest
from fleets import BANDWIDTH, COMPUTE, cluster, problem, problems, workload
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner import Feasible, Infeasible, Problem, solve, violations
from planner.cost import CostModel
from planner.errors import InvalidInput
from planner.plan import Plan
from planner.problem import Capabilities
from planner.record import replace
from planner.robust import Robust, Scenario, in_scenario, solve_robust
from planner.workload import Lengths

SIX = cluster(*[("compute", "a")] * 3, *[("bandwidth", "b")] * 3, kinds=(COMPUTE, BANDWIDTH))
LONG = workload(response=Lengths(mean_tokens=400, cv=0.6, max_tokens=20_000))
ROLES = problem(SIX, workload=LONG, capabilities=Capabilities.single_device_roles())
FUTURES = tuple(Scenario(response_mean=m, eta=e) for e in (0, 1, 4) for m in (50, 400, 3000, 10_000))


def rate(p: Problem, plan: Plan, s: Scenario) -> float:
    """Tokens/s of the roles and shapes of a plan in a scenario, by the cost model alone."""
    bare = Plan(placements=tuple(replace(q, max_running=None) for q in plan.placements))
    there = in_scenario(p, s)
    scored = None if violations(bare, there) else CostModel(there).evaluate(bare)
    return 0.0 if scored is None else scored.prediction.tokens_per_s


@settings(max_examples=10)
@given(problems(most=4), st.lists(st.sampled_from([20.0, 60.0, 200.0]), min_size=1, max_size=3, unique=True))
def test_no_candidate_has_a_smaller_worst_regret(p: Problem, lengths: list[float]) -> None:
    p = replace(p, workload=replace(p.workload, response=replace(p.workload.response, max_tokens=8000)))
    futures = [Scenario(response_mean=m, eta=e) for m in lengths for e in (0, 3)]
    found = solve_robust(p, futures)
    assume(isinstance(found, Robust))
    assert isinstance(found, Robust)
    optima = [solve(in_scenario(p, s), scheduler="hex") for s in futures]
    plans = [o.plan for o in optima if isinstance(o, Feasible)]
    table = [[rate(p, plan, s) for s in futures] for plan in (found.plan.plan, *plans)]
    best = [r.best_tokens_per_s for r in found.regrets]
    assert all(b >= max(row[j] for row in table) * (1 - 1e-9) for j, b in enumerate(best))
    worst = [max(1 - r / b for r, b in zip(row, best, strict=True)) for row in table]
    assert worst[0] == pytest.approx(found.worst, abs=1e-9)
    assert worst[0] <= min(worst) + 1e-9
    for r, mine in zip(found.regrets, table[0], strict=True):
        assert r.tokens_per_s == pytest.approx(mine)
        assert r.regret == pytest.approx(1 - mine / r.best_tokens_per_s)
        assert r.bound_tokens_per_s >= r.best_tokens_per_s


def test_the_trade_between_short_and_long_by_hand() -> None:
    """One trainer on six devices: a fast card trains, or a wide one. The minimax of the two rows, worked out here."""
    found = solve_robust(ROLES, FUTURES)
    assert isinstance(found, Robust)
    rows: dict[str, list[float]] = {}
    for kind in ("compute", "bandwidth"):
        plans = [solve(in_scenario(ROLES, s), scheduler="exhaustive") for s in FUTURES]
        mine = [f.plan for f in plans if isinstance(f, Feasible) and f.plan.train and f.plan.train.kind == kind]
        if mine:
            rows[kind] = [max(rate(ROLES, plan, s) for plan in mine) for s in FUTURES]
    assert rows
    most = [max(row[j] for row in rows.values()) for j in range(len(FUTURES))]
    for r, m in zip(found.regrets, most, strict=True):
        assert r.best_tokens_per_s == pytest.approx(m, rel=1e-6)
    assert 0 < found.worst < 1, "no plan is best both at 50 tokens and at 10,000"
    assert found.candidates >= 2


def test_plan_again_where_another_plan_is_better_by_the_threshold() -> None:
    found = solve_robust(ROLES, FUTURES, threshold=0.05, precision=0.02)
    assert isinstance(found, Robust)
    assert found.replan_at
    for again in found.replan_at:
        assert again.side == "longer"
        for factor, behind in ((1.0, False), (1.021, True)):
            s = Scenario(response_mean=again.response_mean * factor, eta=again.eta)
            best = solve(in_scenario(ROLES, s), scheduler="hex")
            assert isinstance(best, Feasible)
            assert (best.prediction.tokens_per_s > 1.05 * rate(ROLES, found.plan.plan, s)) == behind
    calm = solve_robust(ROLES, FUTURES, threshold=10.0)
    assert isinstance(calm, Robust)
    assert calm.replan_at == ()


def test_one_scenario_has_its_own_optimum_and_no_regret() -> None:
    here = Scenario(response_mean=400, eta=4)
    found, best = solve_robust(problem(), [here]), solve(problem(), scheduler="hex")
    assert isinstance(found, Robust)
    assert isinstance(best, Feasible)
    assert found.worst == 0
    assert found.replan_at == ()
    assert found.plan.prediction.tokens_per_s == pytest.approx(best.prediction.tokens_per_s)


def test_a_stop_tells_the_best_so_far() -> None:
    for after in range(0, 30, 7):
        asked = itertools.count()
        found = solve_robust(ROLES, FUTURES, should_stop=lambda a=asked, n=after: next(a) >= n)  # type: ignore[misc]
        assert isinstance(found, Robust)
        assert violations(found.plan.plan, ROLES) == ()
        assert len(found.regrets) == len(FUTURES)


def test_what_is_refused() -> None:
    with pytest.raises(InvalidInput, match="needs scenarios"):
        solve_robust(problem(), [])
    with pytest.raises(InvalidInput, match="exceeds the longest"):
        solve_robust(problem(), [Scenario(response_mean=1e6, eta=1)])
    with pytest.raises(InvalidInput):
        Scenario(response_mean=-1, eta=1)
    alone = problem(cluster(("compute", "a"), kinds=(COMPUTE,)))
    assert isinstance(solve_robust(alone, [Scenario(response_mean=400, eta=1)]), Infeasible)
