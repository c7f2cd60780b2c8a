"""The plans of a run: made by the planner, chosen with an eye to devices that are slow."""

import planner
from planner.cost.model import CostModel
from planner.override import Override
from planner.plan import Plan, Prediction
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible, Infeasible
from runtime.policy.drift import pays, slowed_tokens_per_s
from runtime.sim.options import Options
from runtime.sim.watching import Watch


class Plans:
    """`watch` knows which devices are slow; None: nobody looks."""

    def __init__(self, options: Options, watch: Watch | None) -> None:
        self._options, self._watch = options, watch

    def solve(self, problem: Problem) -> tuple[Plan | None, str]:
        """The plan, or why there is none."""
        if not problem.cluster.devices:
            return None, "no device is there"
        found = self._ask(problem)
        if isinstance(found, Infeasible):
            return None, f"no plan: {found.message}"
        return self._apart(problem, found).plan, ""

    def pays(self, cost: CostModel, now: Plan | None, then: Plan) -> bool:
        """Whether moving from one plan to the other earns what it costs, on devices as slow as they are."""
        scored = [None if p is None else cost.evaluate(p) for p in (now, then)]
        if scored[0] is None or scored[1] is None or self._watch is None:
            return scored[0] is None
        costs = self._options.costs
        before, after = (self._slowed(cost.problem, s.plan, s.prediction) for s in scored if s is not None)
        return pays(before, after, max(costs.start_s, costs.reform_s), self._watch.rule)

    def _ask(self, problem: Problem) -> Feasible | Infeasible:
        return planner.solve(problem, scheduler=self._options.scheduler, budget=self._options.budget)

    def _apart(self, problem: Problem, found: Feasible) -> Feasible:
        """Of this plan and the one in which slow devices only generate, which is better on devices as slow as they are."""
        slow = [d.id for d in problem.cluster.devices if self._watch is not None and d.id in self._watch.speeds]
        if not slow:
            return found
        pins = tuple(Override(device=d, kind="pin", role="rollout", reason="slow") for d in slow)
        other = self._ask(replace(problem, overrides=problem.overrides + pins))
        if isinstance(other, Infeasible):
            return found
        return max(found, other, key=lambda s: self._slowed(problem, s.plan, s.prediction))

    def _slowed(self, problem: Problem, plan: Plan, prediction: Prediction) -> float:
        assert self._watch is not None
        synchronous = problem.workload.synchronous
        return slowed_tokens_per_s(plan, prediction, self._watch.speeds, synchronous=synchronous)
