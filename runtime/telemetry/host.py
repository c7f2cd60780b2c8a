"""Figures of the machine and of the run's processes."""

import os
import time
from collections.abc import Callable

from runtime.telemetry.reading import HostReading, ProcessReading, Watch

_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
ALL_EVERY = 60  # looks between two at every process of the machine
_PAGE = os.sysconf("SC_PAGE_SIZE")


class HostWatch:
    """Remembers CPU times between polls. `clock` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        import psutil

        self._psutil = psutil
        self._clock = clock
        self._before: dict[int, tuple[float, float]] = {}
        self._others: set[int] = set()  # processes of no session that is watched
        self._sessions: tuple[int, ...] = ()
        self._looks = 0
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
        now = self._clock()
        stats = {pid: _stat(pid) for pid in watch.pids} | self._members(watch.sessions)
        found, after = [], {}
        for pid, fields in sorted(stats.items()):
            if fields is None or fields[0] == b"Z":
                continue
            cpu_s, resident = _figures(fields)
            before = self._before.get(pid)
            share = None if before is None or now <= before[0] else max(0.0, (cpu_s - before[1]) / (now - before[0]))
            after[pid] = (now, cpu_s)
            found.append(ProcessReading(pid=pid, resident_bytes=resident, cpu_share=share))
        self._before = after
        return tuple(found)

    def _members(self, sessions: tuple[int, ...]) -> dict[int, list[bytes]]:
        """Fields of every process of the sessions. A process comes into a session by birth alone, so the machine's other
        processes, mostly many more, are read once; all of them now and then, in case a number went to another one."""
        if not sessions:
            return {}
        wanted, there = set(sessions), {int(name) for name in os.listdir("/proc") if name.isdigit()}
        if sessions != self._sessions or self._looks % ALL_EVERY == 0:
            self._others = set()
        self._sessions, self._looks = sessions, self._looks + 1
        self._others &= there
        read = {pid: fields for pid in there - self._others if (fields := _stat(pid)) is not None}
        found = {pid: fields for pid, fields in read.items() if int(fields[3]) in wanted}
        self._others |= read.keys() - found.keys()
        return found


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/<pid>/stat from the state on."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:
            return f.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None


def _figures(fields: list[bytes]) -> tuple[float, float]:
    """(CPU seconds, resident bytes) of a living process."""
    return (int(fields[11]) + int(fields[12])) * _TICK_S, float(int(fields[21]) * _PAGE)


def _disk_free(folder: str) -> float | None:
    try:
        s = os.statvfs(folder)
    except OSError:
        return None
    return float(s.f_bavail * s.f_frsize)
