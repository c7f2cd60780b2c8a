"""Figures of the machine and of the run's processes."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.telemetry.reading import HostReading, ProcessReading, Watch

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class HostWatch:
    """Remembers CPU times between polls. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import psutil

        self._psutil = psutil
        self._clock = clock
        self._before: dict[int, tuple[float, float]] = {}
        psutil.cpu_percent()  # the first call has nothing to compare with

    def read(self, watch: Watch | None) -> HostReading:
        """The level now; a figure that cannot be had is None."""
        memory = self._psutil.virtual_memory()
        return HostReading(
            cpu_share=self._psutil.cpu_percent() / 100.0,
            memory_used_bytes=float(memory.total - memory.available),
            memory_total_bytes=float(memory.total),
            disk_free_bytes=_disk_free(watch.folder) if watch is not None else None,
            processes=self._processes(watch) if watch is not None else (),
        )

    def _processes(self, watch: Watch) -> tuple[ProcessReading, ...]:
        now, wanted = self._clock(), set(watch.pids)
        if watch.sessions:
            wanted |= set(_pids_of(watch.sessions))
        found, after = [], {}
        for pid in sorted(wanted):
            figures = _figures(pid)
            if figures is None:
                continue
            cpu_s, resident = figures
            before = self._before.get(pid)
            share = None if before is None or now <= before[0] else max(0.0, (cpu_s - before[1]) / (now - before[0]))
            after[pid] = (now, cpu_s)
            found.append(ProcessReading(pid=pid, resident_bytes=resident, cpu_share=share))
        self._before = after
        return tuple(found)


def _pids_of(sessions: Iterable[int]) -> list[int]:
    wanted = set(sessions)
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None and int(fields[3]) in wanted:
            found.append(int(entry.name))
    return found


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/<pid>/stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None


def _figures(pid: int) -> tuple[float, float] | None:
    """(CPU seconds, resident bytes) of a living process."""
    fields = _stat(pid)
    if fields is None or fields[0] == "Z":
        return None
    return (int(fields[11]) + int(fields[12])) * _TICK_S, float(int(fields[21]) * _PAGE)


def _disk_free(folder: str) -> float | None:
    try:
        s = os.statvfs(folder)
    except OSError:
        return None
    return float(s.f_bavail * s.f_frsize)
