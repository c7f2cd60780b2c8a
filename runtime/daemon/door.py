"""The one object the API server gets from the daemon: people leave by snapshots and enter by commands."""

from typing import Protocol

from runtime.api.wire import Command, CommandResult, EventRow, Snapshot


class Door(Protocol):
    """What the server may ask. All methods run in the daemon's event loop and never block it."""

    def snapshot(self) -> Snapshot:
        """The newest snapshot."""
        ...

    async def wait_snapshot(self, after: int, timeout_s: float) -> Snapshot | None:
        """The newest snapshot as soon as its `seq` exceeds `after`; None when `timeout_s` seconds pass first."""
        ...

    def events(self, after: int, limit: int) -> tuple[EventRow, ...]:
        """At most `limit` events with a sequence number above `after`, oldest first."""
        ...

    async def command(self, c: Command) -> CommandResult:
        """Carry out a request. RefusedError when the daemon says no; a repeated `key` answers as the first did."""
        ...
