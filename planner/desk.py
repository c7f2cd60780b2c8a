"""Which machines to rent on a market: one desk, several questions.

Every objective is a search over mixes of whole instances (`planner.mixes`); on each mix a scheduler only maximises throughput.
"""

import math
from collections.abc import Callable, Mapping

from planner.api import solve_throughput
from planner.bound import Bound
from planner.catalogue import CATALOGUE
from planner.cluster import DeviceKind
from planner.cost.model import CostModel
from planner.egress import Bill, bill, egress_usd_per_step
from planner.errors import InvalidInput
from planner.explain import explain
from planner.fluid import Fluid, device_rates
from planner.goals import LeastPrice, LeastTotal, MostPerUsd, MostTokens
from planner.market import Counts, Market, on_market, rented
from planner.mixes import Best, Evaluated, Goal, Machines, MixSearch, Outcome
from planner.objectives import Deadline, MarketObjective, PerDollar, Reach, WithinBudget
from planner.problem import Budget, Problem
from planner.record import record, replace
from planner.rental import Rental, measured, trimmed
from planner.solution import Conflict, Feasible, Infeasible

UNLISTED = 32
"""Instances of a type that are considered where the market does not say how many there are (a choice, to end the search)."""

_SAME = 1 - 1e-6  # throughputs this close are the same when the cheaper mix is sought
_DEARER = 2.0
"""Tokens a dollar are compared up to that multiple of the lowest price that reaches the throughput: the ratio hardly depends
on size, so that without a limit every larger fleet would have to be looked at (a choice, told in the scope)."""
_GROWTH = 1.2  # a first mix that reaches a throughput is sought in budgets that grow by this factor


def _silent(_rental: Rental) -> None:
    """Tell nobody."""


@record
class _Question:
    objective: MarketObjective
    spot: bool
    machines: Machines
    fluid: Fluid
    told: Callable[[Rental], None]


class RentalDesk:
    """One market and one problem: ceilings and plans of mixes are kept from question to question."""

    def __init__(
        self,
        problem: Problem,
        market: Market,
        *,
        kinds: Mapping[str, DeviceKind] = CATALOGUE,
        scheduler: str = "hex",
        budget: Budget | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """InvalidInput for a kind that neither the problem nor `kinds` has, and for overrides."""
        self.market, self.problem = market, on_market(problem, market, kinds)
        self._should_stop, self._scheduler = should_stop, scheduler
        names = {i.kind for i in market.instances}
        self._rates = device_rates(CostModel(self.problem), sorted(names))
        search = budget or Budget()
        self._evaluated = Evaluated(
            self._machines(False), lambda p: solve_throughput(p, scheduler, search, None, should_stop)
        )

    def stopped(self) -> bool:
        """Whether it is time to stop."""
        return self._should_stop()

    def _machines(self, spot: bool, *, within_usd_per_h: float = math.inf) -> Machines:
        prices = tuple(i.price(spot) for i in self.market.instances)
        most = tuple(
            i.available if i.available is not None else _affordable(within_usd_per_h, p)
            for i, p in zip(self.market.instances, prices, strict=True)
        )
        return Machines(
            prices=prices,
            holds=tuple({i.kind: i.gpus} for i in self.market.instances),
            most=most,
            build=lambda counts: rented(self.problem, self.market, counts),
            always={},
            always_largest={},
        )

    def answer(
        self, objective: MarketObjective, *, spot: bool = False, on_incumbent: Callable[[Rental], None] | None = None
    ) -> Rental | Infeasible:
        """The mix and plan for one objective. With `spot` instances cost their spot price where they have one; a
        `Deadline` with a spot risk compares both. A stop gets the best so far, or says that there is none yet."""
        told = on_incumbent or (lambda _rental: None)
        if isinstance(objective, WithinBudget):
            return self._within(objective, self._asked(objective, spot, told, within_usd_per_h=objective.usd_per_h))
        if isinstance(objective, Reach):
            return self._reach(self._asked(objective, spot, told), objective.tokens_per_s)
        if isinstance(objective, PerDollar):
            return self._per_dollar(objective, self._asked(objective, spot, told))
        return self._by_deadline(objective, told)

    def _asked(
        self,
        objective: MarketObjective,
        spot: bool,
        told: Callable[[Rental], None],
        *,
        within_usd_per_h: float = math.inf,
    ) -> "_Question":
        machines = self._machines(spot, within_usd_per_h=within_usd_per_h)
        fluid = Fluid(self._rates, machines.holds, machines.prices, always={}, always_usd_per_h=0.0)
        return _Question(objective=objective, spot=spot, machines=machines, fluid=fluid, told=told)

    def _within(self, objective: WithinBudget, q: "_Question") -> Rental | Infeasible:
        """Most throughput; of the mixes that have it the cheapest."""
        goal = MostTokens(machines=q.machines, fluid=q.fluid, usd_per_h=objective.usd_per_h)
        outcome = self._search(q, goal)
        if outcome.best is None:
            return self._beyond_budget(objective, q.machines, outcome)
        best = self._trimmed(outcome.best)
        rate, usd = best.found.prediction.tokens_per_s, q.machines.usd_per_h(best.counts)
        cheaper = LeastPrice(machines=q.machines, fluid=q.fluid, tokens_per_s=rate * _SAME)
        second = self._search(replace(q, told=_silent), cheaper, replace(best, score=-usd))
        finished = outcome.finished and second.finished
        return self._rental(q, Outcome(best=second.best, bound=max(outcome.bound, rate), finished=finished))

    def _reach(self, q: "_Question", tokens_per_s: float) -> Rental | Infeasible:
        outcome = self._cheapest(q, tokens_per_s)
        return self._beyond_reach(q, tokens_per_s, outcome) if outcome.best is None else self._rental(q, outcome)

    def _cheapest(self, q: "_Question", tokens_per_s: float) -> Outcome:
        """The least price that reaches a throughput: a first mix from growing budgets, then the search."""
        goal = LeastPrice(machines=q.machines, fluid=q.fluid, tokens_per_s=tokens_per_s)
        first = self._first(q, goal)
        if first is not None:
            q.told(self._rental(q, Outcome(best=first, bound=math.inf, finished=False)))
        return self._search(q, goal, first)

    def _first(self, q: "_Question", goal: LeastPrice) -> Best | None:
        most = q.machines.most
        usd = q.fluid.least_usd_per_h((0,) * len(most), most, goal.tokens_per_s)
        while usd < math.inf and not self._should_stop():
            budget = MostTokens(machines=q.machines, fluid=q.fluid, usd_per_h=usd)
            search = MixSearch(q.machines, self._evaluated, budget, should_stop=self._should_stop)
            best = search.run(until_first=True).best
            if best is not None:
                best = self._trimmed(best)
                score = goal.score(best.counts, best.found)
                if score is not None:
                    return replace(best, score=score)
            if usd >= q.machines.usd_per_h(most):
                return None
            usd *= _GROWTH
        return None

    def _per_dollar(self, objective: PerDollar, q: "_Question") -> Rental | Infeasible:
        floor = objective.floor_tokens_per_s
        cheapest = self._cheapest(replace(q, told=_silent), floor)
        if cheapest.best is None:
            return self._beyond_reach(q, floor, cheapest)
        goal = self._ratio(q, floor, cheapest.best)
        score = goal.score(cheapest.best.counts, cheapest.best.found)
        assert score is not None, "it reaches the floor"
        outcome = self._search(q, goal, replace(cheapest.best, score=score))
        return self._rental(q, outcome, within_usd_per_h=goal.limit_usd_per_h)

    def _ratio(self, q: "_Question", floor_tokens_per_s: float, cheapest: Best) -> MostPerUsd:
        limit = _DEARER * q.machines.usd_per_h(cheapest.counts)
        return MostPerUsd(
            machines=q.machines, fluid=q.fluid, floor_tokens_per_s=floor_tokens_per_s, limit_usd_per_h=limit
        )

    def _by_deadline(self, objective: Deadline, told: Callable[[Rental], None]) -> Rental | Infeasible:
        regions = list(dict.fromkeys(i.region for i in self.market.instances))
        missing = self.market.unpriced(regions)
        if missing is not None:
            raise InvalidInput(
                f"no egress price from {missing[0]} to {missing[1]}",
                where=f"market {self.market.name!r}",
                expected="an [[egress]] entry for every two regions",
                hint="a total cost without it would be a guess; 0 says that it is free",
            )
        found = [self._least_total(objective, self._asked(objective, False, told))]
        if objective.spot is not None and any(i.spot_usd_per_h is not None for i in self.market.instances):
            found.append(self._least_total(objective, self._asked(objective, True, told)))
        rentals = [f for f in found if isinstance(f, Rental)]
        if not rentals:
            return found[0]
        best = min(rentals, key=lambda r: r.achieved)
        finished = all(r.finished for r in rentals)
        return replace(best, bound=min(r.bound for r in rentals), finished=finished)

    def _least_total(self, objective: Deadline, q: "_Question") -> Rental | Infeasible:
        tokens = objective.steps * self.problem.workload.response_tokens_per_step
        floor = tokens / objective.seconds
        cheapest = self._cheapest(replace(q, told=_silent), floor)
        if cheapest.best is None:
            return self._beyond_reach(q, floor, cheapest)

        def total_usd(counts: Counts, found: Feasible) -> float | None:
            b = self._bill(q, counts, found)
            return None if b is None or b.seconds > objective.seconds * (1 + 1e-9) else b.total_usd

        ratio = self._ratio(q, floor, cheapest.best)
        goal = LeastTotal(per_usd=ratio, tokens=tokens, total_usd=total_usd)
        score = goal.score(cheapest.best.counts, cheapest.best.found)
        outcome = self._search(q, goal, None if score is None else replace(cheapest.best, score=score))
        if outcome.best is None:
            return self._beyond_reach(q, floor, outcome)
        return self._rental(q, outcome, within_usd_per_h=ratio.limit_usd_per_h)

    def _bill(self, q: "_Question", counts: Counts, found: Feasible) -> Bill | None:
        if not isinstance(q.objective, Deadline):
            return None
        problem = rented(self.problem, self.market, counts)
        leaving = egress_usd_per_step(problem, found.plan, self.market)
        assert leaving is not None, "every egress price was asked for"
        return bill(
            steps=q.objective.steps,
            step_s=found.prediction.step_s,
            usd_per_h=q.machines.usd_per_h(counts),
            egress_usd_per_step=leaving,
            spot_instances=sum(
                n for n, i in zip(counts, self.market.instances, strict=True) if q.spot and i.spot_usd_per_h is not None
            ),
            risk=q.objective.spot,
        )

    def _search(self, q: "_Question", goal: Goal, incumbent: Best | None = None) -> Outcome:
        def improved(best: Best, bound: float) -> None:
            q.told(self._rental(q, Outcome(best=best, bound=bound, finished=False)))

        return MixSearch(
            q.machines,
            self._evaluated,
            goal,
            should_stop=self._should_stop,
            on_improved=improved,
            incumbent=incumbent,
        ).run()

    def _trimmed(self, best: Best) -> Best:
        counts, plan = trimmed(self.market, best.counts, best.found.plan)
        return replace(best, counts=counts, found=replace(best.found, plan=plan))

    def _rental(self, q: "_Question", outcome: Outcome, *, within_usd_per_h: float = math.inf) -> Rental:
        assert outcome.best is not None
        best = self._trimmed(outcome.best)
        problem = rented(self.problem, self.market, best.counts)
        if best.counts != outcome.best.counts:
            best = replace(best, found=_explained(problem, best.found))
        usd, p = q.machines.usd_per_h(best.counts), best.found.prediction
        leaving, cost = (
            egress_usd_per_step(problem, best.found.plan, self.market),
            self._bill(q, best.counts, best.found),
        )
        measure, achieved, bound = measured(q.objective, p.tokens_per_s, usd, cost, outcome.bound)
        egress_usd = leaving or 0.0
        per_s = usd / 3600 + egress_usd / p.step_s
        prediction = replace(
            p, usd_per_h=usd, egress_usd_per_step=egress_usd, usd_per_mtok=per_s / p.tokens_per_s * 1e6
        )
        return Rental(
            objective=q.objective,
            mix=tuple((self.market.title(i), n) for i, n in enumerate(best.counts) if n),
            spot=q.spot,
            plan=replace(best.found, prediction=prediction),
            problem=problem,
            measure=measure,
            achieved=achieved,
            bound=bound,
            scope=self._scope(q, within_usd_per_h),
            egress_usd_per_h=None if leaving is None else leaving / p.step_s * 3600,
            bill=cost,
            planned=len(self._evaluated.plans),
            costed=self._evaluated.costed,
            finished=outcome.finished,
        )

    def _scope(self, q: "_Question", within_usd_per_h: float) -> str:
        text = "mixes of the market" if within_usd_per_h == math.inf else f"mixes up to ${within_usd_per_h:,.2f}/h"
        if isinstance(q.objective, WithinBudget):
            within_usd_per_h = q.objective.usd_per_h
            text = f"mixes within ${within_usd_per_h:,.2f}/h"
        cut = any(
            i.available is None and UNLISTED * p < within_usd_per_h
            for i, p in zip(self.market.instances, q.machines.prices, strict=True)
        )
        return text + (f", at most {UNLISTED} of an instance whose number is not given" if cut else "")

    def _beyond_budget(self, objective: WithinBudget, machines: Machines, outcome: Outcome) -> Infeasible:
        offered = [i for i, it in enumerate(self.market.instances) if it.available != 0]
        least, i = min((machines.prices[i], i) for i in offered)
        if least > objective.usd_per_h:
            detail = f"${objective.usd_per_h:,.2f}/h is less than the cheapest instance, {self.market.title(i)} at ${least:,.2f}/h"
        elif not outcome.finished:
            detail = "stopped before a mix within the budget was planned"
        else:
            detail = (
                f"no mix of instances within ${objective.usd_per_h:,.2f}/h holds both a trainer and a rollout replica of "
                f"{self.problem.model.name}"
            )
        return Infeasible(conflicts=(Conflict(limit="usd_per_h", detail=detail),), scheduler=self._scheduler)

    def _beyond_reach(self, q: "_Question", tokens_per_s: float, outcome: Outcome) -> Infeasible:
        asked = f"{tokens_per_s:,.0f} tokens/s asked for"
        if outcome.finished:
            most = q.fluid.most_tokens_per_s((0,) * len(q.machines.most), q.machines.most, math.inf)
            detail = f"{asked}, no mix of what the market has reaches it"
            if most < tokens_per_s:
                detail += f": all of it together cannot exceed {most:,.0f}"
        else:
            detail = f"{asked}, stopped before a mix was found that reaches it"
        return Infeasible(conflicts=(Conflict(limit="tokens_per_s", detail=detail),), scheduler=self._scheduler)


def _explained(problem: Problem, found: Feasible) -> Feasible:
    """A plan explained anew, on fewer machines than it was made for."""
    cost = CostModel(problem)
    scored = cost.evaluate(found.plan)
    assert scored is not None, "a plan does not need what it leaves unused"
    bound = Bound(step_s=0.0, tokens_per_s=found.bound_tokens_per_s, scope=found.bound_scope)
    return replace(found, explanation=explain(cost, scored, bound))


def _affordable(usd_per_h: float, price: float) -> int:
    """Instances of a type without a known limit that are considered."""
    return min(UNLISTED, math.floor(usd_per_h / price)) if price > 0 and usd_per_h < math.inf else UNLISTED


def rent(
    problem: Problem,
    market: Market,
    objective: MarketObjective,
    *,
    kinds: Mapping[str, DeviceKind] = CATALOGUE,
    scheduler: str = "hex",
    budget: Budget | None = None,
    spot: bool = False,
    on_incumbent: Callable[[Rental], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Rental | Infeasible:
    """The mix of instances and the plan for one objective: see `RentalDesk`."""
    desk = RentalDesk(problem, market, kinds=kinds, scheduler=scheduler, budget=budget, should_stop=should_stop)
    return desk.answer(objective, spot=spot, on_incumbent=on_incumbent)
