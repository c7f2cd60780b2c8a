"""The plans of a run: made by the planner, for devices as slow as they were found to be."""

import planner
from planner.plan import Plan
from planner.problem import Problem
from planner.record import replace
from planner.slowed import scored
from planner.solution import Infeasible
from runtime.policy.drift import pays
from runtime.sim.options import Options
from runtime.sim.watching import Watch


class Plans:
    """`watch` knows which devices are slow; None: nobody looks."""

    def __init__(self, options: Options, watch: Watch | None) -> None:
        self._options, self._watch = options, watch

    def asked(self, problem: Problem, *, drift: bool = False) -> Problem:
        """The problem on devices as slow as they are found to be now. `drift`: they only became slow, so a move must be worth
        its cost."""
        if self._watch is None:
            return problem
        ids = {d.id for d in problem.cluster.devices}
        problem = replace(problem, speeds={d: s for d, s in self._watch.speeds.items() if d in ids})
        if not drift:
            return problem
        return replace(problem, switch_s=self._move_s, switch_horizon_s=self._watch.rule.payback_s)

    def solve(self, problem: Problem) -> tuple[Plan | None, str]:
        """The plan, or why there is none."""
        if not problem.cluster.devices:
            return None, "no device is there"
        found = planner.solve(problem, scheduler=self._options.scheduler, budget=self._options.budget)
        if isinstance(found, Infeasible):
            return None, f"no plan: {found.message}"
        return found.plan, ""

    def pays(self, asked: Problem, now: Plan | None, then: Plan) -> bool:
        """Whether moving from one plan to the other earns what it costs."""
        before, after = (None if p is None else scored(asked, p) for p in (now, then))
        if before is None or after is None or self._watch is None:
            return before is None
        rates = before.prediction.tokens_per_s, after.prediction.tokens_per_s
        return pays(*rates, self._move_s, self._watch.rule)

    @property
    def _move_s(self) -> float:
        return max(self._options.costs.start_s, self._options.costs.reform_s)
