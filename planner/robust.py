"""One plan for several futures: the least worst-case regret over scenarios of response length and staleness bound.

Candidates are the optimum of every scenario and of the scenarios between neighbours (blends). Each candidate is scored in each
scenario by the cost model, with its concurrency free: that is an engine setting, roles and parallelism are what a change
of plan costs. The regret of a plan in a scenario is the share of the best known throughput there that it forgoes. The
choice is proven over the candidates, not over all plans. `bound_tokens_per_s` says what no plan of the scheduler's plan space
exceeds in a scenario, or what the best candidate does where that is more: a plan of another scenario may divide the layers
in a way that the plan space there does not have.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from planner.api import solve_throughput
from planner.cost.model import CostModel
from planner.errors import InvalidInput
from planner.judge import violations
from planner.plan import Plan
from planner.problem import Budget, Problem
from planner.record import record, replace
from planner.solution import Feasible, Infeasible

_ROUNDS = 40


@record
class Scenario:
    """A future: the mean response length (spread in proportion) and the staleness bound."""

    response_mean: float  # tokens
    eta: int

    def __post_init__(self) -> None:
        if not 0 < self.response_mean < math.inf or self.eta < 0:
            raise InvalidInput(
                "a scenario needs a mean length and an eta of 0 or more", got=(self.response_mean, self.eta)
            )


@record
class Regret:
    """The robust plan in one scenario."""

    scenario: Scenario
    tokens_per_s: float  # of the robust plan; 0 where it does not fit
    best_tokens_per_s: float  # of the best candidate there
    bound_tokens_per_s: float  # see above
    regret: float  # 1 - tokens_per_s / best


@record
class Replan:
    """Beyond `response_mean` (tokens), on the side told, another plan is better by more than the threshold; "here": at once."""

    response_mean: float
    eta: int
    side: Literal["longer", "shorter", "here"]


@record
class Robust:
    """The plan with the least worst-case regret."""

    plan: Feasible  # predicted in the scenario of the problem as it was given
    regrets: tuple[Regret, ...]
    replan_at: tuple[Replan, ...]
    threshold: float
    candidates: int
    finished: bool

    @property
    def worst(self) -> float:
        """The largest regret."""
        return max(r.regret for r in self.regrets)


def solve_robust(
    problem: Problem,
    scenarios: Sequence[Scenario],
    *,
    scheduler: str = "hex",
    budget: Budget | None = None,
    threshold: float = 0.05,
    precision: float = 0.02,
    on_progress: Callable[[str], None] = lambda _text: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Robust | Infeasible:
    """The robust plan and where it stops being good enough, to `precision` of the length.

    Re-planning is sought from the problem's own mean length outwards, over the range of the scenarios' lengths, at each of
    their etas. A stop leaves out candidates and re-planning lengths that were not looked at. InvalidInput without scenarios, or
    for a mean above the longest response. Infeasible where some scenario has no plan.
    """
    futures = _checked(problem, scenarios)
    table = _Table(problem, scheduler, budget or Budget(), should_stop)
    for i, s in enumerate(futures):
        on_progress(f"scenario {i + 1} of {len(futures)}: {s.response_mean:,.0f} tokens, eta {s.eta}")
        found = table.best(s)
        if isinstance(found, Infeasible):
            return found
        if should_stop():
            break
    for s in _between(futures):
        if not should_stop():
            table.best(s)
    rows = [(c, [table.rate(c, s) for s in futures]) for c in table.candidates]
    best = [max(row[j] for _, row in rows) for j in range(len(futures))]

    def regrets(row: Sequence[float]) -> list[float]:
        return [1 - r / b for r, b in zip(row, best, strict=True)]

    chosen, row = min(rows, key=lambda cr: (round(max(regrets(cr[1])), 9), sum(regrets(cr[1]))))
    here = Scenario(response_mean=problem.workload.response.mean_tokens, eta=problem.workload.eta)
    plan = table.told(chosen, here)
    if plan is None:  # it fits the scenarios, not the problem as given
        plan = table.told(chosen, futures[0])
        assert plan is not None
    told = tuple(
        Regret(
            scenario=s,
            tokens_per_s=rate,
            best_tokens_per_s=most,
            bound_tokens_per_s=max(most, table.bound(s)),
            regret=lost,
        )
        for s, rate, most, lost in zip(futures, row, best, regrets(row), strict=True)
    )
    replan = (
        () if should_stop() else tuple(_replans(table, chosen, futures, here, threshold=threshold, precision=precision))
    )
    return Robust(
        plan=plan,
        regrets=told,
        replan_at=replan,
        threshold=threshold,
        candidates=len(rows),
        finished=not should_stop(),
    )


def in_scenario(problem: Problem, s: Scenario) -> Problem:
    """The problem as it would be."""
    w = problem.workload
    response = replace(w.response, mean_tokens=s.response_mean)
    return replace(problem, workload=replace(w, response=response, eta=s.eta))


def _checked(problem: Problem, scenarios: Sequence[Scenario]) -> tuple[Scenario, ...]:
    futures = tuple(dict.fromkeys(scenarios))
    if not futures:
        raise InvalidInput("a robust plan needs scenarios", expected="at least one length and eta")
    longest = problem.workload.response.max_tokens
    for s in futures:
        if s.response_mean > longest:
            raise InvalidInput(
                "mean response length exceeds the longest",
                got=s.response_mean,
                expected=f"at most {longest}",
                hint="raise lengths.response_max",
            )
    return futures


def _between(futures: Sequence[Scenario]) -> Iterator[Scenario]:
    """Blends: half way, in proportion, between neighbouring lengths of an eta."""
    for eta in sorted({s.eta for s in futures}):
        for a, b in itertools.pairwise(sorted(s.response_mean for s in futures if s.eta == eta)):
            yield Scenario(response_mean=math.sqrt(a * b), eta=eta)


class _Table:
    """Plans and scores, each made once."""

    def __init__(self, problem: Problem, scheduler: str, budget: Budget, should_stop: Callable[[], bool]) -> None:
        self._problem, self._scheduler, self._budget, self._should_stop = problem, scheduler, budget, should_stop
        self._costs: dict[Scenario, CostModel] = {}
        self._best: dict[Scenario, Feasible | Infeasible] = {}
        self.candidates: list[Plan] = []

    def best(self, s: Scenario, *, candidate: bool = True) -> Feasible | Infeasible:
        """The scheduler's plan in a scenario; it becomes a candidate."""
        if s not in self._best:
            there = replace(in_scenario(self._problem, s), objective="throughput", floor_tokens_per_s=None)
            self._best[s] = solve_throughput(there, self._scheduler, self._budget, None, self._should_stop)
        found = self._best[s]
        if candidate and isinstance(found, Feasible):
            plan = _bare(found.plan)
            if plan not in self.candidates:
                self.candidates.append(plan)
        return found

    def bound(self, s: Scenario) -> float:
        """What no plan exceeds in a scenario; 0 where it was not planned."""
        found = self._best.get(s)
        return found.bound_tokens_per_s if isinstance(found, Feasible) else 0.0

    def told(self, plan: Plan, s: Scenario) -> Feasible | None:
        """A plan as the answer in a scenario; None where it does not fit."""
        if s not in self._costs:
            self._costs[s] = CostModel(in_scenario(self._problem, s))
        cost = self._costs[s]
        scored = None if violations(plan, cost.problem) else cost.evaluate(plan)
        best = self.best(s, candidate=False)
        if scored is None or not isinstance(best, Feasible):
            return None
        bound = max(best.bound_tokens_per_s, scored.prediction.tokens_per_s)
        return replace(best, plan=scored.plan, prediction=scored.prediction, bound_tokens_per_s=bound)

    def rate(self, plan: Plan, s: Scenario) -> float:
        """Tokens/s of a plan in a scenario; 0 where it does not fit."""
        told = self.told(plan, s)
        return 0.0 if told is None else told.prediction.tokens_per_s


def _replans(
    table: _Table, plan: Plan, futures: Sequence[Scenario], here: Scenario, *, threshold: float, precision: float
) -> Iterator[Replan]:
    for eta in sorted({s.eta for s in futures}):
        lengths = sorted({s.response_mean for s in futures if s.eta == eta})
        start = min(max(here.response_mean, lengths[0]), lengths[-1])

        def behind(length: float, eta: int = eta) -> bool:
            s = Scenario(response_mean=length, eta=eta)
            found = table.best(s, candidate=False)
            return isinstance(found, Feasible) and table.rate(plan, s) * (1 + threshold) < found.prediction.tokens_per_s

        if behind(start):
            yield Replan(response_mean=start, eta=eta, side="here")
            continue
        for longer in (True, False):
            way = [x for x in lengths if x > start] if longer else [x for x in reversed(lengths) if x < start]
            good = start
            for bad in way:
                if behind(bad):
                    length = _crossing(good, bad, behind, precision)
                    yield Replan(response_mean=length, eta=eta, side="longer" if longer else "shorter")
                    break
                good = bad


def _crossing(good: float, bad: float, behind: Callable[[float], bool], precision: float) -> float:
    """The length between a good and a bad one where the plan falls behind."""
    for _ in range(_ROUNDS):
        if max(good, bad) / min(good, bad) <= 1 + precision:
            break
        middle = math.sqrt(good * bad)
        good, bad = (good, middle) if behind(middle) else (middle, bad)
    return good


def _bare(plan: Plan) -> Plan:
    """Roles and parallelism alone: rates and concurrency are of a scenario."""
    return Plan(
        placements=tuple(replace(p, max_running=None, rate_tokens_per_s=None, share=None) for p in plan.placements)
    )
