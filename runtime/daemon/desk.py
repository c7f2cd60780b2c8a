"""The daemon's side of the door: the loop's snapshots and commands for the API server."""

import asyncio
import time
from collections.abc import Callable

from runtime.api.wire import Command, CommandResult, EventRow, Snapshot
from runtime.daemon.loop import Loop


class Desk:
    """Implements `Door`. Lives in the daemon's event loop, like the control loop itself."""

    def __init__(self, loop: Loop, wake: Callable[[], None]) -> None:
        self._loop, self._wake = loop, wake
        self._news = asyncio.Event()

    def announce(self) -> None:
        """There is a new snapshot: let the long polls go."""
        self._news.set()
        self._news = asyncio.Event()

    def snapshot(self) -> Snapshot:
        """The newest snapshot."""
        return self._loop.snapshot(time.time())

    async def wait_snapshot(self, after: int, timeout_s: float) -> Snapshot | None:
        """The newest snapshot as soon as its number is not `after`; None when `timeout_s` seconds pass first."""
        deadline_s = time.monotonic() + timeout_s
        while self._loop.seq <= after:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            try:
                await asyncio.wait_for(self._news.wait(), left_s)
            except TimeoutError:
                return None
        return self.snapshot()

    def events(self, after: int, limit: int) -> tuple[EventRow, ...]:
        """Events above a sequence number, oldest first."""
        return self._loop.events(after, limit)

    async def command(self, c: Command) -> CommandResult:
        """Recorded and folded when this returns; the loop turns at once."""
        result = self._loop.command(c, time.time())
        self._wake()
        self.announce()
        return result
