"""Events of the plan (`runtime.core.event`): what operators and the planner want to stand where, and whether it does."""

from planner.override import Override, OverrideKind
from planner.record import record
from runtime.core.solved import SolvedPlan


@record
class OverrideSet:
    """An operator's word on a device; replaces an earlier one of the same kind (cordon and drain are one kind here)."""

    override: Override
    rev: int


@record
class OverrideCleared:
    """An operator took a word back."""

    device: str
    kind: OverrideKind
    rev: int
    author: str = ""
    reason: str = ""


@record
class CommandAccepted:
    """A command was answered; a repeated key gets the same answer."""

    key: str
    name: str
    message: str
    author: str = ""
    reason: str = ""
    device: str | None = None
    override_rev: int
    plan_rev: int | None


@record
class ReplanRequested:
    """An operator asked for a new plan."""

    author: str
    reason: str


@record
class PlanningStarted:
    """The planner process was started."""

    trigger: str
    drift: bool = False  # among the causes
    doubtful: tuple[str, ...] = ()  # with drift: devices that might be found slow soon


@record
class PlanAdopted:
    """A plan is in force from now on, without asking."""

    solved: SolvedPlan
    need_rev: int = 0  # of the newest need the answer knew of


@record
class PlanProposed:
    """A plan waits for consent. `gain_share`: predicted, of tokens/s against the plan in force."""

    solved: SolvedPlan
    expires_at_s: float
    gain_share: float | None
    need_rev: int = 0


@record
class PlanApproved:
    """The proposal of that revision is in force from now on."""

    rev: int
    author: str


@record
class PlanRejected:
    """The proposal of that revision was turned down."""

    rev: int
    author: str
    reason: str = ""


@record
class ProposalExpired:
    """Nobody answered in time."""

    rev: int


@record
class PlanKept:
    """The planner found nothing better than the plan in force. `why`: it did, but a move would not pay."""

    trigger: str
    solve_s: float
    need_rev: int = 0  # of the newest need the answer knew of
    why: str = ""


@record
class PlanFoundInfeasible:
    """No plan exists; the one in force stays as far as overrides allow."""

    trigger: str
    message: str
    need_rev: int = 0  # of the newest need the answer knew of


@record
class PlanningFailed:
    """The planner process broke or ran out of time without a plan."""

    trigger: str
    message: str
    need_rev: int = 0  # of the newest need the answer knew of


@record
class PlanReached:
    """Reality is as the plan has it."""

    rev: int


@record
class FloorWaived:
    """No order of steps keeps a serving replica throughout: rollout pauses for a while."""

    rev: int
    reason: str


@record
class MigrationBlocked:
    """Nothing can be done now, and nothing under way will change that."""

    reason: str
    options: tuple[str, ...]


@record
class MigrationUnblocked:
    """Steps are possible again."""


PlanEvent = (
    OverrideSet
    | OverrideCleared
    | CommandAccepted
    | ReplanRequested
    | PlanningStarted
    | PlanAdopted
    | PlanProposed
    | PlanApproved
    | PlanRejected
    | ProposalExpired
    | PlanKept
    | PlanFoundInfeasible
    | PlanningFailed
    | PlanReached
    | FloorWaived
    | MigrationBlocked
    | MigrationUnblocked
)
