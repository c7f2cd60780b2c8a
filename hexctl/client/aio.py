"""The asynchronous client, and the endless feed of snapshots a dashboard lives on."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from hexctl.client import protocol
from planner.errors import HexError
from runtime.api.wire import Command, CommandResult, EventRow, Snapshot

POLL_S = 10.0
RETRY_S = (0.2, 0.5, 1.0, 2.0)


class AsyncClient:
    """Talks to one daemon from an event loop. Every call ends: with an answer, or with an error after its deadline."""

    def __init__(
        self, socket: Path, *, transport: httpx.AsyncBaseTransport | None = None, answer_s: float = protocol.ANSWER_S
    ) -> None:
        """`answer_s`: how long any answer may take beyond what it is asked to wait; `transport` replaces the socket, for
        tests."""
        self.socket = socket
        self._answer_s = answer_s
        self._http = httpx.AsyncClient(
            transport=transport or httpx.AsyncHTTPTransport(uds=str(socket)),
            base_url=protocol.BASE_URL,
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def snapshot(self, after: int | None = None, wait_s: float = 0.0) -> Snapshot | None:
        """The newest snapshot. With `after` wait up to `wait_s` seconds for another one; None when there is none."""
        response = await self._send(protocol.snapshot_request(after, wait_s))
        return None if response.status_code == 204 else protocol.read(Snapshot, response, self.socket)

    async def events(self, after: int = 0, limit: int = 200) -> tuple[EventRow, ...]:
        """At most `limit` events above `after`, oldest first."""
        return protocol.read_events(await self._send(protocol.events_request(after, limit)), self.socket)

    async def command(self, command: Command) -> CommandResult:
        """Send a command; RefusedError when the daemon says no."""
        return protocol.read(CommandResult, await self._send(protocol.command_request(command)), self.socket)

    async def feed(self, *, retry_s: tuple[float, ...] = RETRY_S) -> AsyncIterator[Snapshot | HexError]:
        """Snapshots as they come, for ever. While nobody answers the error comes in their place, once a try;
        the waits between tries are `retry_s`, the last one repeated."""
        after: int | None = None
        failures = 0
        while True:
            try:
                snapshot = await self.snapshot(after, POLL_S)
            except HexError as e:
                yield e
                await asyncio.sleep(retry_s[min(failures, len(retry_s) - 1)])
                failures += 1
                after = None
                continue
            failures = 0
            if snapshot is not None:
                after = snapshot.seq
                yield snapshot

    async def _send(self, request: protocol.Request) -> httpx.Response:
        timeout_s = request.wait_s + self._answer_s
        timeout = httpx.Timeout(timeout_s, connect=self._answer_s)
        try:
            return await self._http.request(
                request.method, request.path, params=dict(request.params), content=request.body, timeout=timeout
            )
        except httpx.TransportError as e:
            raise protocol.unreachable(e, self.socket, timeout_s) from e
