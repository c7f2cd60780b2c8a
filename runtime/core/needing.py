"""Why a plan is needed, and which late answers of the planner still count: one rule for the daemon and the simulator.

A planning takes seconds, and reasons come meanwhile. A join or a drift makes the plan that is on its way no worse than the one in
force: the answer is taken, and the newer reason is planned for after it. A loss, a quarantine or an operator's word does: the
planning is thrown away at once.
"""

from planner.record import record
from runtime.core.solved import PlanCause

KEPT_REASONS = 8
PATIENT: frozenset[PlanCause] = frozenset({"join", "drift"})  # reasons that wait for a planning under way


@record
class Need:
    """A new plan is needed. `rev` changes with every new reason, so that an answer to an older need is not taken for it."""

    causes: frozenset[PlanCause]
    reasons: tuple[str, ...]
    since_s: float
    last_s: float
    rev: int
    urgent_rev: int  # of the newest reason that is not patient; 0: none


def needed(old: Need | None, cause: PlanCause, reason: str, at_s: float, *, rev: int) -> Need:
    """The need with one more reason, whose revision is `rev`."""
    return Need(
        causes=(old.causes if old else frozenset()) | {cause},
        reasons=(*(old.reasons if old else ()), reason)[-KEPT_REASONS:],
        since_s=old.since_s if old else at_s,
        last_s=at_s,
        rev=rev,
        urgent_rev=rev if cause not in PATIENT else old.urgent_rev if old else 0,
    )


def unanswered(need: Need | None, answered_rev: int) -> Need | None:
    """What is left of the need once the planner answered the reasons up to `answered_rev`."""
    return need if need is not None and need.rev > answered_rev else None


def outdates(newer: Need | None, worked_on: Need) -> bool:
    """Whether what is needed now throws a planning for `worked_on` away, answered or not."""
    return newer is not None and newer.urgent_rev > worked_on.rev
