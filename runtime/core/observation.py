"""An observation is a level: everything as it is now, with ages. Unknown is not dead: `None` means nobody answered."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from planner.record import record
from runtime.rl.types import FlowStatus

ReplicaPhase = Literal["starting", "serving", "draining", "drained", "dead", "unknown"]
TrainerPhase = Literal["starting", "running", "quiescing", "quiesced", "dead", "unknown"]


@record
class DeviceSample:
    """One reading of one device. Every field may be missing (None): never a zero for "not supported"."""

    util_share: float | None = None  # 0..1
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    host_bound: bool | None = None  # paced only: more than 10 % behind its clock
    note: str = ""  # e.g. "driver not answering 12 s", "WSL", "foreign process 1234"


@record
class DeviceSeen:
    """A device as the telemetry agent sees it. `present`: True seen, False positively gone, None not known."""

    id: str
    kind: str
    node: str
    index: int
    present: bool | None
    sample: DeviceSample
    age_s: float | None  # of the sample


@record
class Work:
    """What a unit has done since its process started. Figures only grow; time without work is no part of them."""

    busy_s: float = 0.0  # seconds in engine steps, or in optimiser steps from gradients to publication
    steps: int = 0  # decode steps or optimiser steps
    tokens: int = 0  # decoded, or prompt and response tokens trained on
    prefill_tokens: int = 0  # rollout: prompts and recomputed prefixes


@record
class ReplicaSeen:
    """A replica as Ray and flow see it."""

    id: str
    epoch: int
    devices: tuple[str, ...]
    phase: ReplicaPhase
    version: int | None
    digest: str | None
    running: int
    slots: int
    tokens_per_s: float | None
    kv_used_share: float | None
    host_lag_share: float | None
    pid: int | None
    age_s: float | None  # since its last exchange with flow
    leased: int = 0  # samples it holds
    reason: str = ""  # why it is dead, in words
    work: Work | None = None  # None: it does not say


@record
class TrainerSeen:
    """A trainer as Ray and flow see it."""

    id: str
    epoch: int
    devices: tuple[str, ...]
    phase: TrainerPhase
    step: int | None
    tokens_per_s: float | None
    host_lag_share: float | None
    pid: int | None
    age_s: float | None
    reason: str = ""
    work: Work | None = None
    rank_pids: tuple[int | None, ...] = ()  # by device, where there are several; `pid` is the first rank's

    def pid_on(self, device: str) -> int | None:
        """The process that carries one of its devices."""
        return self.rank_pids[self.devices.index(device)] if self.rank_pids else self.pid


@record
class HostSeen:
    """The machine the run folder is on."""

    cpu_share: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    disk_free_bytes: float | None = None
    processes: Mapping[str, int] = dataclasses.field(default_factory=dict)  # name of each process of the run -> pid
    resident_bytes: float | None = None  # all processes of the run together


@record
class Observation:
    """Everything as it is now."""

    at_s: float  # unix seconds
    devices: tuple[DeviceSeen, ...]
    replicas: tuple[ReplicaSeen, ...]
    trainers: tuple[TrainerSeen, ...]
    flow: FlowStatus | None
    flow_age_s: float | None  # None: never answered
    flow_pid: int | None = None
    host: HostSeen = HostSeen()
    problems: tuple[str, ...] = ()  # sources that do not answer, in words
