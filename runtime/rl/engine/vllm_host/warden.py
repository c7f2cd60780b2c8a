"""The leader of an engine's process group: starts the engine, ends the whole group when the replica or the engine has ended.

    python -m runtime.rl.engine.vllm_host.warden SOCKET_FD REPLICA_PID PROGRAM

It waits on pidfds and does nothing else, so that a replica killed with -9 takes vLLM and whatever vLLM started (tensor
parallel workers, compilers) with it, in the time of one kill. Were the warden itself killed, the kernel ends the engine:
every engine process asks for a KILL at its parent's death (`dies_with_parent`).
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1


def dies_with_parent(parent: int) -> None:
    """The kernel kills this process when the thread that made it ends. Exits at once if the parent is gone already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main(argv: list[str]) -> None:
    """Never returns: ends by the KILL it sends to its own group."""
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
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
