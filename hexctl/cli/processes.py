"""Processes by pid and start time: waiting for them to end, and ending exactly those a run recorded."""

import os
import select
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from runtime.errors import RunError
from runtime.runs import ProcessMark, RunInfo, alive, mark

POLITE_S = 8.0  # from SIGTERM to SIGKILL


def descendants(roots: Iterable[ProcessMark]) -> tuple[ProcessMark, ...]:
    """The living among `roots` and everything they started, children after parents."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (parent := _parent(entry)) is not None:
            children.setdefault(parent, []).append(int(entry.name))
    found: dict[int, ProcessMark] = {}
    todo = [m.pid for m in roots if alive(m)]
    while todo:
        pid = todo.pop(0)
        if pid in found or (m := mark(pid)) is None:
            continue
        found[pid] = m
        todo += children.get(pid, [])
    return tuple(found.values())


def _parent(entry: Path) -> int | None:
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def wait_gone(
    marks: Iterable[ProcessMark],
    timeout_s: float,
    *,
    begin: Callable[[], object] = lambda: None,
    on_left: Callable[[int], None] = lambda left: None,
) -> tuple[ProcessMark, ...]:
    """Wait until all have ended, at most `timeout_s` seconds; answers with those that still live.

    `begin` is called once those that live are held: what ends them, however soon. `on_left` hears how many are left, of those
    that were held, whenever that changes.
    """
    waiting = {fd: m for m in marks if (fd := _handle(m)) is not None}
    poll = select.poll()
    for fd in waiting:
        poll.register(fd, select.POLLIN)
    try:
        begin()
        deadline = time.monotonic() + timeout_s
        while waiting:
            on_left(len(waiting))
            ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                break
            for fd, _ in ready:
                poll.unregister(fd)
                os.close(fd)
                del waiting[fd]
        return tuple(m for m in waiting.values() if alive(m))
    finally:
        for fd in waiting:
            os.close(fd)


def _handle(m: ProcessMark) -> int | None:
    """A descriptor of exactly that process; None when it has ended."""
    try:
        fd = os.pidfd_open(m.pid)
    except OSError:
        return None
    if alive(m):
        return fd
    os.close(fd)
    return None


def end_recorded(run: RunInfo, *, say: Callable[[str], None]) -> int:
    """End the recorded processes of `run` and what they started: SIGTERM, then SIGKILL; answers with how many there
    were. RunError when some survive."""
    victims = descendants([m for m in (run.daemon, *run.ray_processes) if m is not None])
    victims = tuple(m for m in victims if m.pid != os.getpid())
    if victims:
        say(f"ending {len(victims)} recorded {'process' if len(victims) == 1 else 'processes'} of run {run.id}")
    left = victims
    for number, timeout_s in ((signal.SIGTERM, POLITE_S), (signal.SIGKILL, POLITE_S)):
        for m in left:
            _send(m, number)
        left = wait_gone(left, timeout_s)
        if not left:
            return len(victims)
    raise RunError("processes do not end", where=run.id, got=", ".join(str(m.pid) for m in left), expected="none left")


def _send(m: ProcessMark, number: signal.Signals) -> None:
    fd = _handle(m)
    if fd is None:
        return
    try:
        signal.pidfd_send_signal(fd, number)
    except ProcessLookupError:
        pass
    except PermissionError as e:
        raise RunError("may not end a process", got=m.pid, expected="one of our own") from e
    finally:
        os.close(fd)
