"""One verifier child, seen from its parent: started, asked with a deadline, killed hard."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from runtime.errors import ConfigError, DeadlineError, RunError
from runtime.process_group import ProcessGroup
from runtime.rl.rewards.items import RewardItem
from runtime.rl.rewards.verifiers import VerifierSpec

MOST_LINE_BYTES = 2**20  # a child that says more in one line is not ours
ENDING_S = 10.0  # from the end of what it says to its own


class ChildLost(RunError):
    """The child ended or talked nonsense; it has been killed."""


class VerifierChild:
    """One living child. Any error kills it. `interrupt` is for any thread, the rest for one."""

    def __init__(self, spec: VerifierSpec, *, start_s: float) -> None:
        """Start it and wait until it is ready. ConfigError when its verifier does not load, DeadlineError, ChildLost."""
        raw = {"name": spec.name, "callable": spec.callable, "search_path": list(spec.search_path)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.rl.rewards.child", json.dumps(raw), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # a process group of its own: what it starts is killed with it
        )
        self._group = ProcessGroup(self._process)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._in, False)
        self._buffer = b""
        self._asked = 0
        try:
            word = self._read(time.monotonic() + start_s, "start")
        except BaseException:
            self.kill()
            raise
        if "failed" in word:
            self.kill()
            failed = word["failed"]
            raise ConfigError(failed.pop("what"), **failed)

    @property
    def pid(self) -> int:
        """Process id, and id of its process group."""
        return self._process.pid

    @property
    def asked(self) -> int:
        """Items it was given."""
        return self._asked

    def verify(self, item: RewardItem, *, timeout_s: float) -> tuple[float, str]:
        """(reward, "") or (0, what the verifier raised). DeadlineError after `timeout_s`, ChildLost when it died."""
        self._asked += 1
        deadline = time.monotonic() + timeout_s
        question = {
            "id": self._asked,
            "prompt": item.prompt,
            "response": item.response,
            "answer": item.answer,
            "finish": item.finish,
        }
        try:
            self._write((json.dumps(question) + "\n").encode(), deadline)
            answer = self._read(deadline, "answer")
            if answer.get("id") != self._asked or not ("reward" in answer or "error" in answer):
                raise ChildLost("the verifier's process answered something else", got=answer)
            return float(answer.get("reward", 0.0)), str(answer.get("error", ""))
        except BaseException:
            self.kill()
            raise

    def interrupt(self) -> None:
        """SIGKILL from another thread: whoever waits for an answer gets ChildLost."""
        self._group.interrupt()

    def kill(self) -> None:
        """SIGKILL to its whole process group, and wait for the end."""
        self._group.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _write(self, data: bytes, deadline: float) -> None:
        poll = select.poll()
        poll.register(self._in, select.POLLOUT)
        while data:
            if not poll.poll(_left_ms(deadline)):
                raise DeadlineError("the verifier does not read", got=f"{len(data)} bytes left")
            try:
                data = data[os.write(self._in, data) :]
            except BlockingIOError:
                continue
            except OSError as e:
                raise ChildLost("the verifier's process is gone", got=self._ending()) from e

    def _read(self, deadline: float, what: str) -> Mapping[str, Any]:
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poll.poll(_left_ms(deadline)):
                raise DeadlineError(f"the verifier did not {what} in time")
            data = os.read(self._out, 65536)
            if not data:
                raise ChildLost("the verifier's process ended", got=self._ending())
            self._buffer += data
            if len(self._buffer) > MOST_LINE_BYTES:
                raise ChildLost("the verifier's process talks nonsense", got=f"{len(self._buffer)} bytes in a line")
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            word = json.loads(line)
        except ValueError as e:
            raise ChildLost("the verifier's process talks nonsense", got=line[:80]) from e
        if not isinstance(word, dict):
            raise ChildLost("the verifier's process talks nonsense", got=line[:80])
        return word

    def _ending(self) -> str:
        """How it ended, in words."""
        code = self._group.ended(ENDING_S)
        if code is None:
            return "closed its pipe"
        return f"signal {-code}" if code < 0 else f"exit code {code}"


def _left_ms(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic()) * 1000
