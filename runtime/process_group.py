"""The process group that a child leads: whether the leader has ended, and the end of all of them.

A process's number, and its group's, may be a stranger's as soon as the process has been waited for. So the group is always
killed first and the leader waited for after it, and no signal is sent once it was, whichever threads ask.
"""

import os
import select
import signal
import subprocess
import threading

END_S = 10.0  # for a killed leader to be gone; one that the kernel holds longer is left to it


class ProcessGroup:
    """Thread-safe. Nobody else may poll or wait for the leader."""

    def __init__(self, leader: "subprocess.Popen[bytes]") -> None:
        """`leader` was started in a group (or session) of its own."""
        self._leader = leader
        self._reaping = threading.Lock()

    @property
    def pid(self) -> int:
        """Number of the leader and of the group."""
        return self._leader.pid

    def ended(self, within_s: float = 0.0) -> int | None:
        """The leader's exit code, or minus the signal that ended it; None when it still lives after `within_s` seconds."""
        with self._reaping:
            if (code := self._code()) is not None:
                return code
            handle = os.pidfd_open(self.pid)
        try:
            poll = select.poll()
            poll.register(handle, select.POLLIN)
            if not poll.poll(within_s * 1000):
                return None
            with self._reaping:
                if (code := self._code()) is not None:
                    return code
                seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
                assert seen is not None  # that is for WNOHANG
        finally:
            os.close(handle)
        return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status

    def ask(self) -> None:
        """SIGTERM to the leader alone; does not wait."""
        with self._reaping:
            if self._code() is None:
                os.kill(self.pid, signal.SIGTERM)

    def interrupt(self) -> None:
        """SIGKILL to all of them; does not wait."""
        with self._reaping:
            if self._code() is None:
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> int | None:
        """SIGKILL to all of them, and wait for the leader: what `ended` says of it then. Again is harmless."""
        self.interrupt()
        if self.ended(END_S) is not None:
            with self._reaping:
                self._leader.poll()
        return self._code()

    def _code(self) -> int | None:
        """What `ended` says once the leader was waited for."""
        return self._leader.returncode
