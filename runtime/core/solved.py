"""A plan that the planner answered with, with all that was known when it was made."""

from typing import Literal

from planner.plan import Plan, Prediction
from planner.record import record

PlanCause = Literal["start", "loss", "join", "operator", "quarantine", "drift"]


@record
class SolvedPlan:
    """One solution under a revision number. Revisions grow by one with every plan that differs from the one in force."""

    rev: int
    plan: Plan
    prediction: Prediction
    scheduler: str
    bound_tokens_per_s: float
    bound_scope: str
    gap: float
    solve_s: float
    finished: bool  # False: the planner was stopped early, this is its incumbent
    headline: str
    why: tuple[str, ...]
    trigger: str  # what led to it, in words
    made_at_s: float


def shape(plan: Plan) -> frozenset[tuple[str, tuple[str, ...], int, int, int]]:
    """What a plan has every device do, without rates and shares: two plans of one shape need no migration."""
    return frozenset((p.role, p.devices, p.tp, p.pp, p.dp) for p in plan.placements)
