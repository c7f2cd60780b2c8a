"""Processes of a run: found by session, group or mark, ended by mark only. A reused pid is never signalled.

A signal goes through a pidfd whose process had the recorded start time after the pidfd was open, so that nothing can come
between check and signal.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.runs import ProcessMark, mark, start_ticks


def _ids(pid: int) -> tuple[int, int] | None:
    """(process group, session) of a living process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] == "Z" else (int(fields[2]), int(fields[3]))


def _members(wanted: Callable[[tuple[int, int]], bool]) -> tuple[ProcessMark, ...]:
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            ids = _ids(int(entry.name))
            if ids is not None and wanted(ids) and (m := mark(int(entry.name))) is not None:
                found.append(m)
    return tuple(sorted(found, key=lambda m: m.pid))


def session_members(session: int) -> tuple[ProcessMark, ...]:
    """Living processes of a session."""
    return _members(lambda ids: ids[1] == session)


def group_members(group: int) -> tuple[ProcessMark, ...]:
    """Living processes of a process group."""
    return _members(lambda ids: ids[0] == group)


def session_of(m: ProcessMark) -> int | None:
    """Session of exactly that process; None when it is gone."""
    ids = _ids(m.pid)
    return ids[1] if ids is not None and start_ticks(m.pid) == m.start_ticks else None


def command_line(pid: int) -> str:
    """The command line, blanks between arguments; "" when the process is gone or not ours to read."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


class Watched:
    """Open pidfds of marked processes: signal them, wait for their end."""

    def __init__(self, marks: Iterable[ProcessMark]) -> None:
        self._open: dict[ProcessMark, int] = {}
        for m in marks:
            try:
                fd = os.pidfd_open(m.pid)
            except OSError:
                continue
            if start_ticks(m.pid) == m.start_ticks:
                self._open[m] = fd
            else:
                os.close(fd)

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._open.values():
            os.close(fd)
        self._open.clear()

    def signal(self, number: int) -> None:
        """Signal all that still live."""
        for fd in self._open.values():
            try:
                signal.pidfd_send_signal(fd, number)
            except (ProcessLookupError, PermissionError):
                continue

    def wait(self, timeout_s: float) -> tuple[ProcessMark, ...]:
        """Wait until all have ended or the time is over; returns those that still live."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        for fd in self._open.values():
            poll.register(fd, select.POLLIN)
        while self._open and (left := deadline - time.monotonic()) > 0:
            ended = {fd for fd, _ in poll.poll(left * 1000)}
            for m, fd in tuple(self._open.items()):
                if fd in ended:
                    poll.unregister(fd)
                    os.close(fd)
                    del self._open[m]
        return tuple(self._open)


def end(marks: Iterable[ProcessMark], *, term_s: float, kill_s: float = 5.0) -> tuple[ProcessMark, ...]:
    """TERM, wait `term_s` seconds, KILL, wait `kill_s` seconds; returns what lives even then (stuck in the kernel)."""
    with Watched(marks) as watched:
        if term_s > 0:
            watched.signal(signal.SIGTERM)
            watched.wait(term_s)
        watched.signal(signal.SIGKILL)
        return watched.wait(kill_s)
