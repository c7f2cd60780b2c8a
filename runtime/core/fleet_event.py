"""Events of the fleet (`runtime.core.event`): what became of its devices, of their speeds and of the units on them.

A *unit* is a rollout replica or a trainer: one incarnation of it is (id, epoch).
"""

from typing import Literal

from planner.record import record

UnitRole = Literal["train", "rollout"]


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


FleetEvent = (
    DeviceJoined
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
    | CalibrationChanged
    | StepOrdered
    | UnitAppeared
    | UnitAdopted
    | UnitServed
    | UnitDrained
    | UnitDied
    | UnitStopped
)
