"""A core without a model, for the engine's process: tokens by a rule, and whatever trouble the prompt asks for.

Run as a program by the warden in vLLM's place. The next token is the sum of all before it plus the weights' version, modulo
11, plus 2; its logprob is minus the version. A prompt that begins with one of the marks below does what it says.
"""

import os
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any

from runtime.errors import WeightsError
from runtime.rl.engine.vllm_host.main import run
from runtime.rl.engine.vllm_host.rows import Row
from runtime.rl.engine.vllm_host.wire import Message

CRASH, HANG, BABBLE = 90, 91, 92  # raises; sleeps for ever; starts a child that sleeps for ever, then goes on
SHARE = 93  # makes shared memory called `shared_name`, as tensor parallel workers do, then goes on


def shared_name(pid: int) -> str:
    return f"hexctl-toy-{pid}"


def next_token(tokens: list[int], version: int) -> int:
    return (sum(tokens) + version) % 11 + 2


class ToyCore:
    """Serves `main.Core`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        if spec["seed"] == 666:
            raise RuntimeError("this seed does not start")
        self._slots, self._eos = spec["slots"], set(spec["eos_ids"])
        self._requests: dict[int, tuple[list[int], int]] = {}
        self._version, self._prefilled = -1, 0
        self._shared: SharedMemory | None = None
        self.steps = 0

    @property
    def facts(self) -> Message:
        return {"release": "toy", "pid": os.getpid()}

    def limit(self, slots: int) -> None:
        self._slots = slots

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        self._requests[key] = (list(tokens), max_tokens)
        self._prefilled += len(tokens) - 1

    def abort(self, keys: list[int]) -> None:
        for key in keys:
            self._requests.pop(key, None)

    def busy(self) -> bool:
        return bool(self._requests)

    def step(self) -> list[Row]:
        self.steps += 1
        rows: list[Row] = []
        for key, (tokens, left) in list(self._requests.items())[: self._slots]:
            self._trouble(tokens[0])
            token = next_token(tokens, self._version)
            tokens.append(token)
            finished = left <= 1 or token in self._eos
            self._requests[key] = (tokens, left - 1)
            if finished:
                del self._requests[key]
            rows.append((key, [token], [-float(self._version)], finished))
        return rows

    def load(self, ref: Message, *, keep: bool) -> list[Row]:
        rows = self.step() if self._version >= 0 else []  # what was under way
        if not keep:
            self._requests.clear()
        if "bad" in ref["path"]:
            self._requests.clear()
            raise WeightsError("hash does not match", where=ref["path"])
        self._version = ref["version"]
        return rows

    def sleep(self) -> bool:
        self._requests.clear()
        return False

    def wake(self) -> None:
        pass

    def level(self) -> Message:
        running = min(self._slots, len(self._requests))
        return {
            "running": running,
            "waiting": len(self._requests) - running,
            "kv_used": 0.25,
            "prefilled": self._prefilled,
            "steps": self.steps,
            "plain_steps": self.steps,
            "plain_step_s": 0.5 * self.steps,
            "plain_host_s": 0.25 * self.steps,
        }

    def _trouble(self, mark: int) -> None:
        if mark == CRASH:
            raise RuntimeError("the toy crashed")
        if mark == HANG:
            time.sleep(3600)
        if mark == SHARE and self._shared is None:
            self._shared = SharedMemory(shared_name(os.getpid()), create=True, size=4096)
        if mark == BABBLE and os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(3600)"])


if __name__ == "__main__":
    run(ToyCore)
