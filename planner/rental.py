"""The answer to a question about money: the machines to rent and the plan for them."""

import math
from typing import Literal

from planner.egress import Bill
from planner.market import Counts, Market
from planner.objectives import MarketObjective, PerDollar, Reach, WithinBudget
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record, replace
from planner.solution import Feasible

Measure = Literal["tokens_per_s", "usd_per_h", "tokens_per_usd", "usd"]


@record
class Rental:
    """The machines to rent and the plan for them.

    `achieved` and `bound` are in `measure`: no plan on any mix of `scope` is better than `bound`.
    """

    objective: MarketObjective
    mix: tuple[tuple[str, int], ...]  # (instance, number), those rented only
    spot: bool
    plan: Feasible  # its prediction tells the price of the instances
    problem: Problem
    measure: Measure
    achieved: float
    bound: float
    scope: str
    egress_usd_per_h: float | None  # on top of the machines; None: a price is not known
    bill: Bill | None  # for a deadline
    planned: int  # mixes planned
    costed: int  # mixes given a ceiling
    finished: bool

    @property
    def gap(self) -> float:
        """How far the bound is from what was achieved, as a share of the larger of the two."""
        if self.achieved == self.bound:
            return 0.0
        return abs(self.bound - self.achieved) / max(abs(self.bound), abs(self.achieved))


def trimmed(market: Market, counts: Counts, plan: Plan) -> tuple[Counts, Plan]:
    """A mix and its plan without the machines that the plan leaves unused; those left are numbered anew."""
    nodes = {d.id: d.node for d in market.devices(counts)}
    used = {nodes[d] for p in plan.placements for d in p.devices}
    kept: dict[str, str] = {}
    fewer = [0] * len(counts)
    for i, node in market.nodes(counts):
        if node in used:
            kept[node] = f"{market.title(i)}-{fewer[i]}"
            fewer[i] += 1
    names = {d: f"{kept[n]}/{d.rpartition('/')[2]}" for d, n in nodes.items() if n in kept}
    placements = tuple(
        replace(
            p,
            devices=tuple(names[d] for d in p.devices),
            stages=tuple(replace(s, devices=tuple(names[d] for d in s.devices)) for s in p.stages),
        )
        for p in plan.placements
    )
    return tuple(fewer), Plan(placements=placements)


def measured(
    objective: MarketObjective, tokens_per_s: float, usd_per_h: float, cost: Bill | None, score: float
) -> tuple[Measure, float, float]:
    """What an objective is measured in, what was achieved, and the bound for a score that no mix exceeds."""
    if isinstance(objective, WithinBudget):
        return "tokens_per_s", tokens_per_s, max(tokens_per_s, score)
    if isinstance(objective, Reach):
        return "usd_per_h", usd_per_h, max(0.0, min(usd_per_h, -score))
    if isinstance(objective, PerDollar):
        per_usd = tokens_per_s / usd_per_h * 3600 if usd_per_h > 0 else math.inf
        return "tokens_per_usd", per_usd, max(per_usd, score * 3600)
    assert cost is not None, "a deadline has a bill"
    return "usd", cost.total_usd, max(0.0, min(cost.total_usd, -score))
