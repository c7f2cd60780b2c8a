"""The fault script of a simulated fleet: what happens to it and when, in virtual seconds."""

from planner.cluster import Device
from planner.record import record


@record
class DeviceLeaves:
    """A device goes. `noticed`: the fleet knows that it is gone; else nobody can say (None) until `returns_s`, if ever."""

    at_s: float
    device: str
    noticed: bool = True
    returns_s: float | None = None


@record
class DeviceJoins:
    """A device comes, or comes back."""

    at_s: float
    device: Device


@record
class UnitDies:
    """The process of whatever runs on the device ends. Nothing happens where nothing runs."""

    at_s: float
    device: str
    reason: str = "killed by signal 9"


@record
class UnitHangs:
    """What runs on the device keeps its process and does nothing more."""

    at_s: float
    device: str


@record
class DeviceSlows:
    """A device works at a share of its speed from now on, whatever runs there; 1: its own speed again."""

    at_s: float
    device: str
    speed: float


Fault = DeviceLeaves | DeviceJoins | UnitDies | UnitHangs | DeviceSlows


@record
class Behaviour:
    """How the fleet carries steps out. Seconds are virtual; rates are tokens/s of one device of a kind."""

    start_s: float = 2.0
    drain_s: float = 1.0
    quiesce_s: float = 1.0
    lost_share: float = 0.0  # of applied steps that never take effect
    late_s: float = 0.0  # a step takes effect up to that much later
    lossy_until_s: float = float("inf")  # after that no step is lost or late
    rollout_tokens_per_s: float = 100.0
    train_tokens_per_s: float = 400.0
    tokens_per_step: float = 1000.0
    tokens_per_sample: float = 20.0
    slots: int = 16
