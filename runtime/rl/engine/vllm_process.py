"""The engine's process as the replica holds it: started in a group of its own, spoken to with deadlines, ended for sure."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import runtime
from runtime.errors import DeadlineError, RunError
from runtime.process_group import ProcessGroup
from runtime.rl.engine.vllm_host.warden import TRACKER_S
from runtime.rl.engine.vllm_host.wire import Closed, Line, Message

WARDEN = (sys.executable, "-m", "runtime.rl.engine.vllm_host.warden")
WARDEN_S = TRACKER_S + 1.0  # for the warden to end its group; then it is ended without
ENGINE = "runtime.rl.engine.vllm_host.main"


class EngineProcess:
    """One warden and what it keeps. Every wait has a deadline; what runs over it is killed, not waited for."""

    def __init__(
        self,
        spec: dict[str, Any],
        *,
        start_s: float,
        program: str = ENGINE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the engine and wait until it has generated. Raises RunError with its reason, or DeadlineError.

        `program` is the module to run: anything that serves a `main.Core`."""
        self._clock = clock
        ours, theirs = socket.socketpair()
        source = str(Path(runtime.__file__).parents[1])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        with theirs:
            warden = subprocess.Popen(
                [*WARDEN, str(theirs.fileno()), str(os.getpid()), program],
                pass_fds=(theirs.fileno(),),
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=2,  # vLLM logs to its standard output; ours is data
                env={**os.environ, "PYTHONPATH": path},
            )
        self._group = ProcessGroup(warden)
        self._line = Line(ours)
        self.send({"kind": "start", "spec": spec})
        self.ready = self.wait_for("ready", deadline_s=start_s, doing="start")

    @property
    def group(self) -> int:
        """The process group of everything that belongs to the engine."""
        return self._group.pid

    def send(self, message: Message) -> None:
        """Tell the engine something."""
        try:
            self._line.send(message)
        except DeadlineError:
            raise self.hung("read a command", 0.0) from None
        except Closed:
            raise self._ended() from None

    def receive(self, timeout_s: float) -> Message | None:
        """The next thing it says, None when it said nothing in time. RunError when it has failed or ended."""
        try:
            message = self._line.receive(timeout_s)
        except Closed:
            raise self._ended() from None
        if message is not None and message["kind"] == "failed":
            self.close()
            raise RunError("the engine failed", got=message["error"])
        return message

    def wait_for(
        self, *kinds: str, deadline_s: float, doing: str, other: Callable[[Message], None] | None = None
    ) -> Message:
        """The next message of one of `kinds`; those before it go to `other`. DeadlineError after the deadline."""
        until = self._clock() + deadline_s
        while (left := until - self._clock()) > 0:
            message = self.receive(left)
            if message is None:
                break
            if message["kind"] in kinds:
                return message
            if other is not None:
                other(message)
        raise self.hung(doing, deadline_s)

    def check(self) -> None:
        """RunError when it has ended; nothing that it says is read while it lives."""
        if self._group.ended() is not None:
            raise self._ended()

    def close(self) -> None:
        """End the whole group now. A polite request would wait for vLLM's own teardown, and nothing in it is ours to keep: the
        warden kills it, and sees to the shared memory that is left."""
        self._group.ask()
        self._group.ended(WARDEN_S)
        self._group.kill()
        self._line.close()

    def hung(self, doing: str, waited_s: float) -> DeadlineError:
        """End it; the error to raise."""
        self.close()
        after = f" within {waited_s:g} s" if waited_s else ""
        return DeadlineError(f"the engine did not {doing}{after}; its processes are ended")

    def _ended(self) -> RunError:
        """The stream is over. What it told or wrote before it ended says more than that."""
        failure = self._told_failure()
        self.close()
        if failure is not None:
            return failure
        return RunError("the engine's process ended", got=f"group {self._group.pid}", hint="its last words are above")

    def _told_failure(self) -> RunError | None:
        """The failure that it told, which may lie unread where it ended before a command came."""
        with suppress(Closed):
            while (message := self._line.receive(0.0)) is not None:
                if message["kind"] == "failed":
                    return RunError("the engine failed", got=message["error"])
        return None
