"""A daemon of a few lines for the command line's tests: `python -m tests.cli.tiny_daemon ROOT MODE`.

serve: makes a run folder and answers on its socket until `down`. fail: ends with an error of its own. crash: ends
without a word of hexctl's.
"""

import asyncio
import os
import sys
from pathlib import Path

from planner.record import replace
from runtime.api.wire import Command, CommandResult
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


async def live(root: Path) -> None:
    info = make_run(root, "local-7f3a")
    stop = asyncio.Event()
    await serve(EndingDoor(stop), info.paths.api_socket, stop)
    write_run(replace(info, state="ended", ending="hexctl down"))


def main() -> int:
    root, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "serve":
        asyncio.run(live(root))
        return 0
    if mode == "fail":
        print("log line\nerror: no GPUs, got 'nothing'\nhint: try paced", file=sys.stderr)
        return 2
    print("Fatal: something else", file=sys.stderr, flush=True)
    os._exit(77)


if __name__ == "__main__":
    sys.exit(main())
