"""The engine's process: takes commands, steps vLLM by itself while it has leave to, tells what was sampled.

    python -m runtime.rl.engine.vllm_host.main SOCKET_FD PARENT_PID

It runs ahead of the replica by at most as many steps as it has credit for, so that the accelerator does not wait while the
replica files what came before; without credit it stops, and a replica that may not decode decodes nothing.
"""

import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from runtime.errors import RunError, WeightsError
from runtime.rl.engine.vllm_host.environment import prepare
from runtime.rl.engine.vllm_host.rows import Row, pack_rows, unpack_requests
from runtime.rl.engine.vllm_host.warden import dies_with_parent
from runtime.rl.engine.vllm_host.wire import Closed, Line, Message


class Core(Protocol):
    """What the loop needs of vLLM."""

    @property
    def facts(self) -> Message: ...
    def add(self, key: int, tokens: list[int], max_tokens: int) -> None: ...
    def limit(self, slots: int) -> None: ...
    def abort(self, keys: list[int]) -> None: ...
    def busy(self) -> bool: ...
    def step(self) -> list[Row]: ...
    def load(self, ref: Message, *, keep: bool) -> list[Row]: ...
    def join(self, offer: Message, member: Message) -> None: ...
    def swap(self, ref: Message, *, keep: bool) -> tuple[list[Row], Message] | None: ...
    def sleep(self) -> bool: ...
    def wake(self) -> None: ...
    def level(self) -> Message: ...


def serve(line: Line, core: Core) -> None:
    """Until told to close, or nobody is there."""
    credit = 0
    while True:
        may_step = credit > 0 and core.busy()
        message = line.receive(0.0 if may_step else None)
        if message is None:
            rows = core.step()
            if rows:  # a step that only prefilled, or filled the pipeline, tells nothing and costs no credit
                credit -= 1
                line.send({"kind": "rows", "rows": pack_rows(rows), "level": core.level()})
        elif message["kind"] == "credit":
            credit = min(credit + message["steps"], message["most"])
        elif message["kind"] == "close":
            return
        else:
            _obey(line, core, message)


def _obey(line: Line, core: Core, message: Message) -> None:
    """Everything but steps."""
    match message["kind"]:
        case "add":
            for key, tokens, max_tokens in unpack_requests(message["requests"]):
                core.add(key, tokens, max_tokens)
        case "limit":
            core.limit(message["slots"])
        case "abort":
            core.abort(message["keys"])
        case "load" | "swap":
            try:
                line.send(_new_weights(core, message))
            except WeightsError as e:
                line.send({"kind": "refused", "error": e.what, "where": e.where, "got": str(e.got)})
        case "join":
            core.join(message["offer"], message["member"])
        case "sleep":
            line.send({"kind": "slept", "freed": core.sleep()})
        case "wake":
            core.wake()
            line.send({"kind": "woken"})
        case other:
            raise RunError("the engine does not know this command", got=other)


def _new_weights(core: Core, message: Message) -> Message:
    """The answer to "load" or "swap"."""
    if message["kind"] == "load":
        rows = core.load(message["ref"], keep=message["keep"])
        return {"kind": "loaded", "rows": pack_rows(rows), "level": core.level()}
    swapped = core.swap(message["ref"], keep=message["keep"])
    if swapped is None:
        return {"kind": "absent"}
    return {"kind": "loaded", "rows": pack_rows(swapped[0]), "level": core.level(), "update": swapped[1]}


def main(argv: list[str], build: "Callable[[dict[str, Any]], Core]") -> int:
    """Exit code 0 after a clean end, 1 after a failure, which was told first. `build` makes the core of a spec."""
    dies_with_parent(int(argv[1]))
    line = Line(socket.socket(fileno=int(argv[0])))
    try:
        first = line.receive(60.0)
        if first is None or first["kind"] != "start":
            raise RunError("no start came")
        core = build(first["spec"])
        line.send({"kind": "ready", "facts": core.facts, "level": core.level()})
        serve(line, core)
    except Closed:
        return 0
    except BaseException as e:  # noqa: BLE001 - told to the replica, whatever it is
        traceback.print_exc()
        with suppress(RunError):
            line.send({"kind": "failed", "error": f"{type(e).__name__}: {e}"})
        return 1
    return 0


def run(build: "Callable[[dict[str, Any]], Core]") -> None:
    """The process from its command line to its end, without vLLM's own teardown, which may wait for threads that do not end."""
    code = main(sys.argv[1:], build)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _vllm(spec: dict[str, Any]) -> Core:
    os.environ["HEXCTL_ENGINE_PID"] = str(os.getpid())
    prepare(os.environ, spec)
    from runtime.rl.engine.vllm_host.core import VllmCore

    return VllmCore(spec)


if __name__ == "__main__":
    run(_vllm)
