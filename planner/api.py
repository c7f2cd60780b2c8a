"""`solve`: a problem in, a plan with a bound or the conflicting limits out. No clock, no input or output, no globals."""

from collections.abc import Callable

from planner.bound import EXACT, Bound, upper_bound
from planner.cost.model import CostModel, Scored
from planner.explain import explain
from planner.holding import HoldingSearch, around_frozen_trainer
from planner.infeasible import conflicts, first_plan, floor_conflicts
from planner.problem import Budget, Problem
from planner.renting import solve_per_dollar
from planner.resolve import frozen_placements, resolved, with_pins_for_keeps
from planner.schedulers import scheduler as named
from planner.search import Scheduler
from planner.slowed import slow_devices, solve_slowed
from planner.solution import Conflict, Explanation, Feasible, Infeasible, Solution


def solve(
    problem: Problem,
    *,
    scheduler: str = "hex",
    budget: Budget | None = None,
    on_incumbent: Callable[[Feasible], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Solution:
    """Plan. `on_incumbent` gets every plan better than the last; after `should_stop` the best so far is returned.

    Raises UnknownName for a scheduler that does not exist, InvalidInput for an override of an unknown device or an
    objective that lacks its floor or its prices. Devices that `problem.speeds` names are counted as slow as it says
    (`planner.slowed`).
    """
    named(scheduler)
    resolved(problem)  # says what is wrong with overrides before anything is searched
    if slow_devices(problem):
        return solve_slowed(
            problem,
            lambda p, told: solve(p, scheduler=scheduler, budget=budget, on_incumbent=told, should_stop=should_stop),
            on_incumbent,
        )
    if problem.objective == "throughput_per_dollar":
        return solve_per_dollar(
            with_pins_for_keeps(problem),
            lambda p: solve_throughput(p, scheduler, budget or Budget(), None, should_stop),
            on_incumbent=on_incumbent,
            should_stop=should_stop,
            scheduler=scheduler,
        )
    return solve_throughput(problem, scheduler, budget or Budget(), on_incumbent, should_stop)


def solve_throughput(
    problem: Problem,
    scheduler: str,
    budget: Budget,
    on_incumbent: Callable[[Feasible], None] | None,
    should_stop: Callable[[], bool],
) -> Solution:
    """The plan with the shortest step."""
    said, problem = problem, resolved(problem)
    cost = CostModel(problem)
    first = upper_bound(cost, should_stop)
    if first is None:
        return Infeasible(conflicts=conflicts(cost, said), scheduler=scheduler)
    bound = first
    if problem.floor_tokens_per_s is not None and bound.tokens_per_s < problem.floor_tokens_per_s:
        return Infeasible(conflicts=floor_conflicts(said, floor_conflict(problem, bound)), scheduler=scheduler)

    def why(scored: Scored) -> Explanation:
        found = explain(cost, scored, bound, search.runner_up())
        if not given_up:
            return found
        line = f"{scheduler} found no plan itself: this is " + (
            "the first that fits" if scheduler == "hex" else "what fits first, or what hex finds"
        )
        return Explanation(headline=found.headline, lines=(line, *found.lines))

    def feasible(scored: Scored, finished: bool) -> Feasible:
        return Feasible(
            plan=scored.plan,
            prediction=scored.prediction,
            bound_tokens_per_s=max(bound.tokens_per_s, scored.prediction.tokens_per_s),
            bound_scope=bound.scope,
            explanation=why(scored),
            scheduler=scheduler,
            evaluations=search.evaluations,
            finished=finished,
        )

    def improved(scored: Scored) -> None:
        if on_incumbent is not None:
            on_incumbent(feasible(scored, False))

    given_up = False

    search = HoldingSearch(cost, budget, should_stop=should_stop, on_improved=improved)
    _running(problem, scheduler)(search)
    if search.best is None and scheduler != "exhaustive":
        # A scheduler that gives up early, as areal-hex may under caps, has not shown that there is no plan.
        given_up = True
        first_plan(search, by_hand_only=scheduler == "hex")
    if search.best is None:
        return Infeasible(conflicts=conflicts(cost, said), scheduler=scheduler)
    if problem.floor_tokens_per_s is not None and search.best.prediction.tokens_per_s < problem.floor_tokens_per_s:
        return Infeasible(conflicts=(floor_conflict(problem, bound),), scheduler=scheduler)
    if bound.scope != EXACT:
        bound = upper_bound(cost, steps=0) or bound  # the search may have proven more
    return feasible(search.best, not search.stopped)


def floor_conflict(problem: Problem, bound: Bound) -> Conflict:
    """The floor that no plan was found to reach."""
    return Conflict(
        limit="floor_tokens_per_s",
        detail=f"{problem.floor_tokens_per_s:,.0f} tokens/s asked for, no plan exceeds {bound.tokens_per_s:,.0f}",
    )


def _running(problem: Problem, scheduler: str) -> Scheduler:
    """With a frozen trainer only replicas are left to choose; the oracle goes on judging every plan."""
    frozen = any(p.role == "train" for p in frozen_placements(problem))
    return around_frozen_trainer if frozen and scheduler != "exhaustive" else named(scheduler)
