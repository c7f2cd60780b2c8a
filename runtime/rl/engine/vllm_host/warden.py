"""The leader of an engine's process group: starts the engine, ends the whole group when the replica or the engine has ended.

    python -m runtime.rl.engine.vllm_host.warden SOCKET_FD REPLICA_PID PROGRAM

It waits on pidfds and does nothing else, so that a replica killed with -9 takes vLLM and whatever vLLM started (tensor
parallel workers, compilers) with it, in the time of one kill. A TERM to the warden does the same. Were the warden itself killed,
the kernel ends the engine: every engine process asks for a KILL at its parent's death (`dies_with_parent`).

Shared memory that workers talk through stays in /dev/shm when they are killed. Python's resource tracker, a process beside them,
removes it once they are gone: it is killed last, and not before it had a moment for that.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

TRACKER_S = 10.0  # for resource trackers to remove what the killed ones left
_PR_SET_PDEATHSIG = 1


def dies_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that made it ends. Exits at once if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_group() -> None:
    """KILL to this process's group, itself included: trackers last. Never returns."""
    seen: set[int] = set()
    trackers: list[int] = []  # pidfds
    try:
        while new := [pid for pid in _members() if pid not in seen]:  # until nobody was born meanwhile
            seen.update(new)
            for pid in new:
                with contextlib.suppress(ProcessLookupError):
                    if _tracks(pid):
                        trackers.append(os.pidfd_open(pid))
                    elif os.getpgid(pid) == os.getpid():
                        os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + TRACKER_S
        for handle in trackers:
            select.select([handle], [], [], max(0.0, until - time.monotonic()))
    finally:
        os.killpg(0, signal.SIGKILL)


def _members() -> list[int]:
    """Living processes of this process's group but itself."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state, _, group = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:3]
            except (OSError, IndexError):
                continue
            if int(group) == os.getpid() and state not in "ZX":
                found.append(int(entry.name))
    return found


def _tracks(pid: int) -> bool:
    """Whether it is a resource tracker of Python's `multiprocessing`."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def main(argv: list[str]) -> None:
    """Never returns: ends by the KILL it sends to its own group."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # out of the wait below, into its end
    line, replica = int(argv[0]), int(argv[1])
    watched = os.pidfd_open(replica)
    if os.getppid() != replica or os.getpgid(0) != os.getpid():
        os._exit(1)
    command = [sys.executable, "-m", argv[2], str(line), str(os.getpid())]
    engine = subprocess.Popen(command, pass_fds=(line,))
    os.close(line)
    poll = select.poll()
    for fd in (watched, os.pidfd_open(engine.pid)):
        poll.register(fd, select.POLLIN)
    try:
        poll.poll()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_group()


if __name__ == "__main__":
    main(sys.argv[1:])
