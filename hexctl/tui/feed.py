"""The feed: long-polls the daemon, keeps only the newest snapshot, reconnects with back-off. It never ends by itself."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from hexctl.tui.view.context import Health
from planner.errors import HexError
from runtime.api.wire import Command, CommandResult, Snapshot

WAIT_S = 2.0  # of one long-poll
LATE_S = 3.0  # over the long-poll's own time, then the daemon counts as not answering
SPACING_S = 0.5  # between frames
BACKOFF_S = (0.25, 0.5, 1.0, 2.0, 4.0)


class SnapshotSource(Protocol):
    """What the console needs of a client. Errors are `HexError` (unreachable, refused) or `OSError`."""

    async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
        """The newest snapshot once its seq is above `after`; None when `wait_s` seconds brought none."""
        ...

    async def command(self, command: Command) -> CommandResult:
        """Hand in a command; RefusedError when the daemon says no."""
        ...


class Feed:
    """`run` calls `on_snapshot` with every newest snapshot and `on_health` when the daemon stops or resumes answering."""

    def __init__(
        self,
        source: SnapshotSource,
        on_snapshot: Callable[[Snapshot], None],
        on_health: Callable[[], None],
        *,
        clock: Callable[[], float] = time.monotonic,
        spacing_s: float = SPACING_S,
        wait_s: float = WAIT_S,
        late_s: float = LATE_S,
        backoff_s: tuple[float, ...] = BACKOFF_S,
    ) -> None:
        self._source = source
        self._on_snapshot = on_snapshot
        self._on_health = on_health
        self._clock = clock
        self._spacing_s, self._wait_s, self._late_s, self._backoff_s = spacing_s, wait_s, late_s, backoff_s
        self._answered_at = clock()
        self._reason = ""
        self._retry_s: float | None = None
        self._nudge = asyncio.Event()

    @property
    def health(self) -> Health:
        """As of now."""
        return Health(
            answering=not self._reason,
            silent_s=max(0.0, self._clock() - self._answered_at),
            reason=self._reason,
            retry_s=self._retry_s,
        )

    def nudge(self) -> None:
        """Ask again at once instead of after the spacing or the back-off."""
        self._nudge.set()

    async def run(self) -> None:
        """Poll until cancelled."""
        after, failures = 0, 0
        shown: tuple[int, float] | None = None
        while True:
            try:
                got = await asyncio.wait_for(self._source.snapshot(after, self._wait_s), self._wait_s + self._late_s)
            except (HexError, OSError, TimeoutError) as fault:
                # A daemon that was started again counts from its own first snapshot: take whatever it has.
                after = 0
                self._retry_s = self._backoff_s[min(failures, len(self._backoff_s) - 1)]
                failures += 1
                self._reason = _words(fault)
                self._on_health()
                await self._pause(self._retry_s)
                continue
            failures = 0
            self._answered_at = self._clock()
            if self._reason:
                self._reason, self._retry_s = "", None
                self._on_health()
            if got is None:
                # A new daemon behind the same socket may count from the start again: do not wait for the old number.
                after = 0
                continue
            after = got.seq
            if shown != (got.seq, got.at_s):
                shown = (got.seq, got.at_s)
                self._on_snapshot(got)
            await self._pause(self._spacing_s)

    async def _pause(self, seconds: float) -> None:
        """Until nudged, at most that long."""
        self._nudge.clear()
        try:
            await asyncio.wait_for(self._nudge.wait(), seconds)
        except TimeoutError:
            return


def _words(fault: BaseException) -> str:
    text = fault.what if isinstance(fault, HexError) else str(fault)
    if text:
        return text
    return "no answer in time" if isinstance(fault, TimeoutError) else type(fault).__name__
