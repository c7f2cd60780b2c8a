"""Who an actor is, and the level it reports. Pure values; they travel through Ray."""

from typing import Literal

from planner.record import record
from runtime.core.observation import Work

ActorPhase = Literal["starting", "running", "ended", "failed"]


@record
class Parts:
    """The factories an actor calls, as "module:function". `runtime.backends.ray.parts` holds the real ones; tests name doubles."""

    flow: str = "runtime.backends.ray.parts:flow"
    rewards: str = "runtime.backends.ray.parts:rewards"
    replica: str = "runtime.backends.ray.parts:replica"
    trainer: str = "runtime.backends.ray.parts:trainer"


@record
class Ranks:
    """A trainer of several ranks, and which of them an actor is. The tuples are by rank."""

    rank: int
    devices: tuple[str, ...]
    kinds: tuple[str, ...]
    shares: tuple[float, ...]  # of every batch's tokens


@record
class Identity:
    """One incarnation of one actor."""

    run: str
    hexctl_version: str
    daemon_epoch: int  # of the daemon that started it
    name: str  # of the actor
    id: str  # of replica or trainer; "flow" and "rewards" for those
    epoch: int
    log: str  # file that takes its output
    devices: tuple[str, ...] = ()
    kind: str = ""  # of its devices
    paced: bool = False
    gpus: tuple[str, ...] = ()  # UUIDs of the cards to make visible; () hides every GPU
    gpu_share: float = 1.0  # of each card's memory; below 1 others compute there too
    torch_threads: int = 1
    ranks: Ranks | None = None  # of a trainer on more than one device
    import_path: tuple[str, ...] = ()  # where the user's own modules are looked for


@record
class Gauge:
    """What a workload's loop says of itself beyond what it tells flow."""

    host_lag_share: float | None = None  # paced: how far behind its clock
    detail: str = ""
    work: Work | None = None  # of a trainer; replicas tell flow


@record
class ActorLevel:
    """Answer to a ping."""

    name: str
    pid: int
    group: int  # process group, its own for replica and trainer
    start_ticks: int
    hexctl_version: str
    phase: ActorPhase
    reason: str = ""  # why it failed or how it ended, in words
    devices: tuple[str, ...] = ()
    log: str = ""
    gauge: Gauge = Gauge()
