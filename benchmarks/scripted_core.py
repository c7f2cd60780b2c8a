"""A core without a model for the engine's process: every request gets a token a step from a table, at no other cost.

Started by the warden in vLLM's place (`bench_rollout`): what is left is the way of a token through hexctl's own code.
"""

import os
from typing import Any

from runtime.rl.engine.vllm_host.figures import PlainSteps
from runtime.rl.engine.vllm_host.main import run
from runtime.rl.engine.vllm_host.rows import Row
from runtime.rl.engine.vllm_host.wire import Message

TOKENS = [5 + (7 * i) % 49_000 for i in range(997)]
LOGPROBS = [-float(i) / 997 for i in range(997)]  # with all their digits, as a logprob has them


class ScriptedCore:
    """Serves `main.Core`."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self._slots = spec["slots"]
        self._left: dict[int, int] = {}
        self._at = self._prefilled = 0

    @property
    def facts(self) -> Message:
        return {"release": "scripted", "pid": os.getpid()}

    def limit(self, slots: int) -> None:
        self._slots = slots

    def add(self, key: int, tokens: list[int], max_tokens: int) -> None:
        self._left[key] = max_tokens
        self._prefilled += len(tokens) - 1

    def abort(self, keys: list[int]) -> None:
        for key in keys:
            self._left.pop(key, None)

    def busy(self) -> bool:
        return bool(self._left)

    def step(self) -> list[Row]:
        rows: list[Row] = []
        for key in list(self._left)[: self._slots]:
            at = self._at = (self._at + 1) % 997
            left = self._left[key] - 1
            rows.append((key, TOKENS[at : at + 1] or [5], LOGPROBS[at : at + 1] or [-0.5], left <= 0))
            if left > 0:
                self._left[key] = left
            else:
                del self._left[key]
        return rows

    def load(self, ref: Message, *, keep: bool) -> list[Row]:
        if not keep:
            self._left.clear()
        return []

    def join(self, offer: Message, member: Message) -> None:
        raise NotImplementedError

    def swap(self, ref: Message, *, keep: bool) -> tuple[list[Row], Message] | None:
        return None

    def sleep(self) -> bool:
        return False

    def wake(self) -> None:
        raise NotImplementedError

    def level(self) -> Message:
        running = min(self._slots, len(self._left))
        queue = {"running": running, "waiting": len(self._left) - running, "kv_used": 0.25}
        return {**queue, "prefilled": self._prefilled, **PlainSteps().told()}


if __name__ == "__main__":
    run(ScriptedCore)
