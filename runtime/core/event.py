"""Events: what happened, in the past tense. Append-only; the state is a fold over them.

An event is a record of plain JSON values (and records of such); its kind is the class's name. A *unit* is a rollout
replica or a trainer: one incarnation of it is (id, epoch).
"""

from typing import Literal, get_args

from planner.override import Override, OverrideKind
from planner.record import record
from runtime.core.solved import SolvedPlan

UnitRole = Literal["train", "rollout"]


@record
class DaemonStarted:
    """A daemon took the run over. `adopted`: the run had been living before."""

    epoch: int
    pid: int
    adopted: bool


@record
class DeviceJoined:
    """A device was seen that was not there before (or was lost)."""

    device: str
    kind: str
    node: str
    index: int
    region: str = "local"


@record
class DeviceLost:
    """A device is positively gone, or silent beyond the age limit."""

    device: str
    reason: str


@record
class DeviceWentStale:
    """Nobody can say whether the device is there. Unknown is not dead."""

    device: str
    age_s: float
    note: str = ""


@record
class DeviceAnswered:
    """A stale device was seen again."""

    device: str


@record
class DeviceBecameHostBound:
    """A paced device fell behind its clock: the host is too slow, not the device."""

    device: str
    lag_share: float | None


@record
class DeviceCaughtUp:
    """A host-bound device keeps its clock again."""

    device: str


@record
class DeviceQuarantined:
    """Units failed on the device again and again; nothing is started there until an operator uncordons it."""

    device: str
    failures: int
    reason: str


@record
class DeviceReleased:
    """An operator lifted the quarantine."""

    device: str


@record
class DeviceDrifted:
    """Devices of one unit run slower than was assumed of them for long enough, otherwise slow than was told, or are back.

    `speed`: share of their kind's speed that plans count with from now on, 1 when they are back; `before`: the same until now.
    `share`: measured speed over what the plan in force assumed, `for_s` seconds long. Rates are of the unit, in the newest block.
    """

    devices: tuple[str, ...]
    role: UnitRole
    speed: float
    before: float
    share: float
    for_s: float
    measured_tokens_per_s: float
    assumed_tokens_per_s: float
    recoveries: int = 0  # so far; each doubles the time to the next verdict


@record
class DeviceRetried:
    """Nobody measured a slow device for so long that it counts at its kind's speed again, until it is measured otherwise."""

    device: str
    before: float  # share of its kind's speed that plans counted with until now
    unmeasured_s: float
    recoveries: int  # so far, this one included


@record
class LearnedSpeed:
    """What a device has shown in a role while nothing was wrong: smoothed ln(measured / modelled speed) over so many blocks."""

    device: str
    role: UnitRole
    log_ratio: float
    blocks: int


@record
class SpeedsLearned:
    """What the next verdicts on these devices are held against, for a daemon that takes over."""

    speeds: tuple[LearnedSpeed, ...]


@record
class StepOrdered:
    """A migration step was decided. Recorded before it is carried out; repeats carry the same id and no new record.

    `step` holds the step's parts, for its verb is in its id: "stop-replica:r1:3".
    """

    id: str
    unit: str
    epoch: int
    devices: tuple[str, ...] = ()  # of a start
    plan_rev: int
    reason: str = ""


@record
class UnitAppeared:
    """A started unit was seen for the first time."""

    unit: str
    epoch: int
    pid: int | None


@record
class UnitAdopted:
    """A unit nobody had a record of was seen; it is taken over as it is."""

    unit: str
    role: UnitRole
    epoch: int
    devices: tuple[str, ...]


@record
class UnitServed:
    """A replica reported verified weights and takes traffic, or a trainer trains. `after_s`: since its start was ordered."""

    unit: str
    epoch: int
    version: int | None
    after_s: float
    pid: int | None = None


@record
class UnitDrained:
    """A unit holds nothing any more."""

    unit: str
    epoch: int


@record
class UnitDied:
    """A unit is positively dead, hung beyond a limit, or never came up. `held`: samples it had, which go on elsewhere."""

    unit: str
    epoch: int
    reason: str
    hung: bool = False
    held: int = 0
    device_lost: bool = False  # then the failure is not the unit's


@record
class UnitStopped:
    """A unit's body is gone and its devices are free."""

    unit: str
    epoch: int


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
class CalibrationChanged:
    """A kind's calibration factor in a role (measured over modelled speed) is materially another. It counts from the next
    plan on. Rates are those of the newest blocks, a device; `samples`: blocks behind the factor."""

    kind: str
    role: UnitRole
    factor: float
    before: float
    samples: int
    device_count: int
    modelled_tokens_per_s: float
    measured_tokens_per_s: float


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


@record
class FlowFellSilent:
    """The data plane's writer does not answer."""

    age_s: float | None


@record
class FlowAnswered:
    """The data plane's writer answers again (or for the first time)."""

    pid: int | None


@record
class MilestoneReached:
    """Something a newcomer waits for, once a run."""

    name: str
    detail: str


@record
class RunEndRequested:
    """The run is to end: an operator's word, a limit reached, or Ctrl-C."""

    reason: str
    author: str = ""


@record
class RunEnded:
    """Samples are suspended in the ledger and the actors are stopped."""

    reason: str
    failed: bool = False


Event = (
    DaemonStarted
    | DeviceJoined
    | DeviceLost
    | DeviceWentStale
    | DeviceAnswered
    | DeviceBecameHostBound
    | DeviceCaughtUp
    | DeviceQuarantined
    | DeviceReleased
    | DeviceDrifted
    | DeviceRetried
    | SpeedsLearned
    | StepOrdered
    | UnitAppeared
    | UnitAdopted
    | UnitServed
    | UnitDrained
    | UnitDied
    | UnitStopped
    | OverrideSet
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
    | CalibrationChanged
    | PlanReached
    | FloorWaived
    | MigrationBlocked
    | MigrationUnblocked
    | FlowFellSilent
    | FlowAnswered
    | MilestoneReached
    | RunEndRequested
    | RunEnded
)

UNSAID = (CommandAccepted, SpeedsLearned)
"""For the audit and for a daemon that takes over: what they led to says itself."""

EVENT_TYPES: dict[str, type[Event]] = {t.__name__: t for t in get_args(Event)}


def kind(event: Event) -> str:
    """The name an event is stored under."""
    return type(event).__name__


@record
class Stored:
    """An event as the store keeps it: its place in the log and its time in unix seconds."""

    seq: int
    at_s: float
    event: Event
