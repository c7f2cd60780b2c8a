"""The asynchronous client, for the dashboard."""

from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from hexctl.client import protocol
from runtime.api.wire import Command, CommandResult, EventRow, Snapshot


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

    async def _send(self, request: protocol.Request) -> httpx.Response:
        timeout_s = request.wait_s + self._answer_s
        timeout = httpx.Timeout(timeout_s, connect=self._answer_s)
        try:
            return await self._http.request(
                request.method, request.path, params=dict(request.params), content=request.body, timeout=timeout
            )
        except httpx.TransportError as e:
            raise protocol.unreachable(e, self.socket, timeout_s) from e
