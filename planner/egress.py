"""Bytes a plan moves between regions, and what a job on rented machines costs in all.

Counted a step: new weights once to each region that rolls out, prompts there and samples back, activations and their gradients
between stages in two regions, gradients of a stage that spans regions. A prompt token is 4 bytes, a sampled one 8 (its number
and its log-probability). Weights start, and samples end, in the region of the trainer's first device.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping

from planner.market import Market
from planner.objectives import SpotRisk
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record

_PROMPT_BYTES, _SAMPLED_BYTES = 4, 8


def bytes_between_regions(problem: Problem, plan: Plan) -> Mapping[tuple[str, str], float]:
    """(from, to): bytes a step. Empty where everything lies in one region."""
    region = {d.id: d.region for d in problem.cluster.devices}
    work, model = problem.workload, problem.model
    moved: dict[tuple[str, str], float] = defaultdict(float)
    train = plan.train
    if train is None:
        return moved
    home = region[train.devices[0]]
    shares: dict[str, float] = defaultdict(float)
    for r in plan.rollouts:
        shares[region[r.devices[0]]] += r.share or 0.0
    for there, share in shares.items():
        samples = work.samples_per_step * share
        moved[home, there] += model.weight_bytes + samples * work.prompt.mean_tokens * _PROMPT_BYTES
        moved[there, home] += samples * work.response.mean_tokens * _SAMPLED_BYTES
    tokens = work.samples_per_step * (work.prompt.mean_tokens + work.response.mean_tokens)
    stages = train.stages
    for a, b in itertools.pairwise(stages):
        here, there = region[a.devices[0]], region[b.devices[0]]
        for pair in ((here, there), (there, here)):
            moved[pair] += tokens * model.hidden * model.dtype_bytes
    for s in stages:
        first = region[s.devices[0]]
        for other in {region[d] for d in s.devices} - {first}:
            for pair in ((first, other), (other, first)):
                moved[pair] += s.layers * model.layer_params * model.dtype_bytes
    return {pair: n for pair, n in moved.items() if pair[0] != pair[1]}


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
