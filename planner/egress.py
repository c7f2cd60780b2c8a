"""What a job on rented machines costs in all: machines, bytes that leave regions (`planner.cost.traffic`), interruptions."""

import math

from planner.cost.traffic import bytes_between_regions
from planner.market import Market
from planner.objectives import SpotRisk
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record


def egress_usd_per_step(problem: Problem, plan: Plan, market: Market) -> float | None:
    """What those bytes cost; None where a price is not known."""
    prices = {(e.origin, e.to): e.usd_per_gb for e in market.egress}
    moved = bytes_between_regions(problem, plan)
    if any(pair not in prices for pair in moved):
        return None
    return math.fsum(n / 1e9 * prices[pair] for pair, n in moved.items())


@record
class Bill:
    """A job's expected time and cost."""

    seconds: float  # interruptions included
    machines_usd: float
    egress_usd: float
    interruptions: float  # expected number
    lost_s: float  # expected time lost to them

    @property
    def total_usd(self) -> float:
        """Machines and egress. What interruptions cost is in the machines' time."""
        return self.machines_usd + self.egress_usd


def bill(
    *,
    steps: int,
    step_s: float,
    usd_per_h: float,
    egress_usd_per_step: float,
    spot_instances: int,
    risk: SpotRisk | None,
) -> Bill | None:
    """The bill of `steps` steps; None where interruptions come faster than the run recovers.

    With n spot instances interrupted at rate v each, a run of H hours meets n v H interruptions and loses r hours to each:
    H = work + n v H r, so H = work / (1 - n v r).
    """
    work_s = steps * step_s
    rate_per_s = spot_instances * risk.interruptions_per_h / 3600 if risk is not None else 0.0
    kept = 1 - rate_per_s * (risk.restart_s if risk is not None else 0.0)
    if kept <= 0:
        return None
    seconds = work_s / kept
    return Bill(
        seconds=seconds,
        machines_usd=seconds / 3600 * usd_per_h,
        egress_usd=steps * egress_usd_per_step,
        interruptions=rate_per_s * seconds,
        lost_s=seconds - work_s,
    )
