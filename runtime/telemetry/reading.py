"""What the agent says, one JSON line a poll. Every figure may be missing (None); an age travels with each reading."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from planner.record import record

LibraryState = Literal[
    "ok", "no-library", "stub", "version-mismatch", "no-driver", "no-permission", "access-lost", "error", "off"
]


@record
class GpuReading:
    """One GPU. `id` is its UUID and its identity; `index` is for display only."""

    id: str
    index: int
    name: str
    pci: str | None = None
    present: bool | None = True  # False: positively gone; None: the driver does not say
    util_share: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: bool | None = None
    throttle_reasons: tuple[str, ...] = ()
    pids: tuple[int, ...] | None = None  # compute processes; None: the driver does not list them
    note: str = ""
    age_s: float | None = None  # of the figures


@record
class ProcessReading:
    """One watched process."""

    pid: int
    resident_bytes: float
    cpu_share: float | None  # of one core, since the poll before


@record
class HostReading:
    """The machine."""

    cpu_share: float | None = None  # of all cores
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    disk_free_bytes: float | None = None
    processes: tuple[ProcessReading, ...] = ()


@record
class Report:
    """One poll of the agent."""

    seq: int
    library: LibraryState
    message: str  # about the library, for people; "" when it is fine
    gpus: tuple[GpuReading, ...]
    host: HostReading
    rejected: int = 0  # implausible figures dropped since the start
    driver: str = ""


@record
class Watch:
    """What the agent shall look at besides GPUs; one JSON line to its stdin."""

    folder: str  # whose disk counts
    pids: tuple[int, ...] = ()
    sessions: tuple[int, ...] = ()


def to_plain(value: Any) -> Mapping[str, Any]:
    """A record as plain JSON values."""
    return dataclasses.asdict(value)
