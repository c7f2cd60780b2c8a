"""What a scheduler answers: a plan with a bound, or why there is none. Both are values."""

from planner.plan import Plan, Prediction
from planner.record import record


@record
class Explanation:
    """Why this plan: one headline and some lines, all from the cost model."""

    headline: str
    lines: tuple[str, ...] = ()


@record
class Feasible:
    """A valid plan, its prediction and a proven upper bound on tokens/s over the plan space named in `bound_scope`."""

    plan: Plan
    prediction: Prediction
    bound_tokens_per_s: float
    bound_scope: str
    explanation: Explanation
    scheduler: str
    evaluations: int
    finished: bool = True  # False: stopped early, this is the incumbent

    @property
    def gap(self) -> float:
        """(bound - achieved) / bound, in [0, 1]."""
        return max(0.0, 1.0 - self.prediction.tokens_per_s / self.bound_tokens_per_s)


@record
class Conflict:
    """One limit that takes part in the infeasibility."""

    limit: str  # e.g. "memory", "capability.train_max_devices", "override pin n0/gpu1 train"
    detail: str


@record
class Infeasible:
    """No plan exists; `conflicts` is a set of limits that cannot hold together."""

    conflicts: tuple[Conflict, ...]
    scheduler: str

    @property
    def message(self) -> str:
        """One line for people."""
        return "; ".join(f"{c.limit}: {c.detail}" for c in self.conflicts)


Solution = Feasible | Infeasible


@record
class Repaired:
    """A valid plan after a loss, and its prediction. No bound was computed, so there is none here, and no gap."""

    plan: Plan
    prediction: Prediction
    changed: tuple[str, ...]  # devices of the cluster whose placement is another than before
    explanation: Explanation
    scheduler: str = "repair"
