"""The blocking client."""

from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from hexctl.client import protocol
from runtime.api.wire import Command, CommandResult, EventRow, Health, Snapshot


class Client:
    """Talks to one daemon. Every call ends: with an answer, or with an error after its deadline."""

    def __init__(
        self, socket: Path, *, transport: httpx.BaseTransport | None = None, answer_s: float = protocol.ANSWER_S
    ) -> None:
        """`answer_s`: how long any answer may take beyond what it is asked to wait; `transport` replaces the socket, for
        tests."""
        self.socket = socket
        self._answer_s = answer_s
        self._http = httpx.Client(
            transport=transport or httpx.HTTPTransport(uds=str(socket)), base_url=protocol.BASE_URL, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def health(self) -> Health:
        """Who answers."""
        return protocol.read(
            Health, self._send(protocol.Request(method="GET", path="/v1/health", params={})), self.socket
        )

    def snapshot(self, after: int | None = None, wait_s: float = 0.0) -> Snapshot | None:
        """The newest snapshot. With `after` wait up to `wait_s` seconds for another one; None when there is none."""
        response = self._send(protocol.snapshot_request(after, wait_s))
        return None if response.status_code == 204 else protocol.read(Snapshot, response, self.socket)

    def now(self) -> Snapshot:
        """The newest snapshot, at once."""
        return protocol.read(Snapshot, self._send(protocol.snapshot_request(None, 0.0)), self.socket)

    def events(self, after: int = 0, limit: int = 200) -> tuple[EventRow, ...]:
        """At most `limit` events above `after`, oldest first."""
        return protocol.read_events(self._send(protocol.events_request(after, limit)), self.socket)

    def command(self, command: Command) -> CommandResult:
        """Send a command; RefusedError when the daemon says no."""
        return protocol.read(CommandResult, self._send(protocol.command_request(command)), self.socket)

    def _send(self, request: protocol.Request) -> httpx.Response:
        timeout_s = request.wait_s + self._answer_s
        timeout = httpx.Timeout(timeout_s, connect=self._answer_s)
        try:
            return self._http.request(
                request.method, request.path, params=dict(request.params), content=request.body, timeout=timeout
            )
        except httpx.TransportError as e:
            raise protocol.unreachable(e, self.socket, timeout_s) from e
