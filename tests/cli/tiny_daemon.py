"""A daemon of a few lines for the command line's tests: `python -m tests.cli.tiny_daemon ROOT MODE`.

serve: makes a run folder and answers on its socket until `down`. slow: answers as starting, then as running. late:
answers as starting, then ends with an error in its log. fail: ends with an error of its own. crash: ends without a
word of hexctl's.
"""

import asyncio
import os
import sys
from pathlib import Path

from planner.record import replace
from runtime.api.wire import Command, CommandResult, Snapshot
from runtime.daemon.server import serve
from runtime.runs import write_run
from tests.api.doors import MemoryDoor
from tests.cli.runs import make_run


class EndingDoor(MemoryDoor):
    def __init__(self, stop: asyncio.Event) -> None:
        super().__init__()
        self.stop = stop

    async def command(self, c: Command) -> CommandResult:
        if c.name == "down":
            asyncio.get_running_loop().call_later(0.05, self.stop.set)
        return await super().command(c)

    async def wait_snapshot(self, after: int, timeout_s: float) -> Snapshot | None:
        if self.current.run.state == "starting":  # somebody waits for the end of the start
            asyncio.get_running_loop().call_soon(lambda: asyncio.ensure_future(self.started()))
        return await super().wait_snapshot(after, timeout_s)

    async def started(self) -> None:
        await self.put(run=replace(self.current.run, state="running"), problems=())

    async def starting(self) -> None:
        await self.put(run=replace(self.current.run, state="starting"), problems=("starting Ray",))


class FailingDoor(EndingDoor):
    async def started(self) -> None:
        self.stop.set()


async def live(root: Path, mode: str) -> None:
    info = make_run(root, "local-7f3a")
    stop = asyncio.Event()
    door = FailingDoor(stop) if mode == "late" else EndingDoor(stop)
    if mode in ("slow", "late"):
        await door.starting()
    await serve(door, info.paths.api_socket, stop)
    if mode == "late":
        info.paths.logs.mkdir()
        (info.paths.logs / "daemon.log").write_text("12:00:00 I hello\nerror: Ray does not start, got 'no memory'\n")
    write_run(replace(info, state="ended", ending="hexctl down"))


def main() -> int:
    root, mode = Path(sys.argv[1]), sys.argv[2]
    if mode in ("serve", "slow", "late"):
        asyncio.run(live(root, mode))
        return 0
    if mode == "fail":
        print("log line\nerror: no GPUs, got 'nothing'\nhint: try paced", file=sys.stderr)
        return 2
    print("Fatal: something else", file=sys.stderr, flush=True)
    os._exit(77)


if __name__ == "__main__":
    sys.exit(main())
