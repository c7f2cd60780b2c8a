"""ClusterState: what the daemon knows and wants, a fold over events. Maps are replaced, never changed in place."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from planner.override import Override
from planner.record import record
from runtime.api.wire import CommandResult
from runtime.core.fleet_event import LearnedSpeed, UnitRole
from runtime.core.needing import Need
from runtime.core.solved import SolvedPlan

UnitStatus = Literal["ordered", "seen", "serving", "drained", "dead", "stopped"]


@record
class DeviceBelief:
    """One device that was ever seen. Lost ones stay, so that history keeps their names."""

    id: str
    kind: str
    node: str
    index: int
    region: str = "local"
    lost: str = ""  # why it is lost; "" while it is there
    stale: bool = False
    host_bound: bool = False
    quarantined: str = ""
    failures: int = 0  # units that failed here, without a healthy stretch between
    failed_at_s: float = 0.0
    speed: float = 1.0  # share of its kind's speed that plans count with; below 1: it is slow
    recoveries: int = 0  # times it was slow and fast again

    @property
    def display(self) -> str:
        """The name people use: the device's place, not its identity."""
        return f"{self.node}/{'cpu' if self.id.startswith('cpu') else 'gpu'}{self.index}"


@record
class Unit:
    """The newest incarnation of a replica or trainer that a start was recorded for."""

    id: str
    role: UnitRole
    epoch: int
    devices: tuple[str, ...]
    status: UnitStatus
    since_s: float  # in this status
    ordered_at_s: float
    served_at_s: float | None = None
    hung: bool = False
    reason: str = ""  # why it is dead
    orders: tuple[str, ...] = ()  # ids of the steps recorded since this incarnation's start

    def ordered(self, *verbs: str) -> bool:
        """Whether a step of one of the verbs ("drain", "quiesce", "stop") was recorded for this incarnation."""
        mine = f":{self.epoch}"  # stops of older incarnations that came back are kept too
        return any(o.split("-", 1)[0] in verbs and o.endswith(mine) for o in self.orders)


@record
class OpenProposal:
    """A plan that waits for consent."""

    solved: SolvedPlan
    expires_at_s: float
    gain_share: float | None


@record
class DriftPlanned:
    """A planning for slow devices: when, which were slow by then, and which might have been found so soon."""

    at_s: float
    slow: frozenset[str]
    doubtful: frozenset[str]


@record
class ClusterState:
    """Everything the loop remembers across a restart."""

    daemon_epoch: int = 0
    devices: Mapping[str, DeviceBelief] = dataclasses.field(default_factory=dict)
    units: Mapping[str, Unit] = dataclasses.field(default_factory=dict)
    names: Mapping[tuple[str, ...], str] = dataclasses.field(default_factory=dict)  # replica of a set of devices
    overrides: tuple[Override, ...] = ()
    override_rev: int = 0
    plan: SolvedPlan | None = None  # in force
    plan_rev: int = 0  # newest revision given out
    proposal: OpenProposal | None = None
    reached_rev: int | None = None  # plan that reality was last seen to be as
    floor_waived_rev: int | None = None
    need: Need | None = None
    need_rev: int = 0
    planning_failed_at_s: float | None = None
    drift_planned: DriftPlanned | None = None  # newest planning that drift had a part in
    start_s: Mapping[UnitRole, float] = dataclasses.field(default_factory=dict)  # newest start, from order to service
    calibration: Mapping[tuple[str, UnitRole], float] = dataclasses.field(default_factory=dict)  # by (kind, role)
    learned: Mapping[tuple[str, UnitRole], LearnedSpeed] = dataclasses.field(default_factory=dict)  # by (device, role)
    infeasible: str = ""
    blocked: str = ""
    flow_silent: bool | None = None  # None: never heard of
    answers: Mapping[str, CommandResult] = dataclasses.field(default_factory=dict)  # by command key, newest 256
    milestones: tuple[str, ...] = ()
    ending: str = ""
    ended: str = ""

    @property
    def present(self) -> tuple[DeviceBelief, ...]:
        """Devices that are not lost."""
        return tuple(d for d in self.devices.values() if not d.lost)

    def display(self, device: str) -> str:
        """The name people use for a device."""
        known = self.devices.get(device)
        return device if known is None else known.display

    def override(self, device: str, *kinds: str) -> Override | None:
        """The override of one of the kinds on a device."""
        return next((o for o in self.overrides if o.device == device and o.kind in kinds), None)

    def excluded(self, device: str) -> str:
        """Why no work may be placed on a device; "" when it may."""
        d = self.devices.get(device)
        if d is None:
            return "never seen"
        if d.lost:
            return f"lost ({d.lost})"
        if d.quarantined:
            return f"quarantined ({d.quarantined})"
        o = self.override(device, "cordon", "drain")
        if o is not None:
            return "cordoned" if o.kind == "cordon" else "drained by the operator"
        pin = self.override(device, "pin")
        return "pinned idle" if pin is not None and pin.role == "idle" else ""
