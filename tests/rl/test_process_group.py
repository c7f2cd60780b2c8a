"""A group of processes and its leader: seen without being waited for, killed once, from any thread."""

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from runtime.process_group import ProcessGroup

# Starts a process of its own, says both have begun, and does what its argument says.
PROGRAM = """
import os, signal, subprocess, sys
other = subprocess.Popen([sys.executable, "-c", "import signal; print(1, flush=True); signal.pause()"],
                         stdout=subprocess.PIPE)
other.stdout.read(1)
print(other.pid, flush=True)
if sys.argv[1] == "leave":
    os._exit(7)
signal.pause()
"""


def started(how: str) -> tuple[ProcessGroup, int]:
    """(a group, the number of the process that its leader started)."""
    leader = subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    with leader.stdout:
        return ProcessGroup(leader), int(leader.stdout.readline())


def state(pid: int) -> str:
    """R, S, Z, ..., or "" where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""


def has_ended(handle: int) -> bool:
    """Whether the process of a pidfd has ended, at once or within a minute."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    ended = bool(poll.poll(60_000))
    os.close(handle)
    return ended


def test_a_killed_group_is_gone_and_its_leader_waited_for() -> None:
    group, other = started("stay")
    handle = os.pidfd_open(other)
    assert group.ended() is None
    assert group.kill() == -signal.SIGKILL
    assert state(group.pid) == ""
    assert has_ended(handle)
    assert group.kill() == group.ended() == -signal.SIGKILL
    group.interrupt()


def test_a_leader_that_left_by_itself_is_not_waited_for_before_its_group_is_killed() -> None:
    """Else the group's number could be a stranger's when the signal is sent."""
    group, other = started("leave")
    handle = os.pidfd_open(other)
    assert group.ended(60.0) == group.ended() == 7
    assert state(group.pid) == "Z"
    assert state(other) not in {"", "Z"}
    assert group.kill() == 7
    assert state(group.pid) == ""
    assert has_ended(handle)


def at_once(begin: threading.Barrier, act: Callable[[], object]) -> None:
    begin.wait(60.0)
    act()


@pytest.mark.parametrize("how", ["stay", "leave"])
def test_many_threads_may_interrupt_and_kill_at_once(how: str) -> None:
    for _ in range(5):
        group, _ = started(how)
        with ThreadPoolExecutor(8) as threads:
            begin = threading.Barrier(8)
            asked = [threads.submit(at_once, begin, group.kill if i % 2 else group.interrupt) for i in range(8)]
        assert [a.exception() for a in asked] == [None] * 8
        assert state(group.pid) == ""
