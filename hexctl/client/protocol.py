"""What both clients share: requests as values, and what an answer means. No I/O but looking at the socket file."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import httpx

from planner.record import record
from runtime.api.codec import decode, encode
from runtime.api.wire import SCHEMA_VERSION, ApiError, Command, EventRow
from runtime.errors import ConfigError, RefusedError, RunError, UnreachableError

T = TypeVar("T")

BASE_URL = "http://hexctl"  # the host is of no account on a Unix socket
ANSWER_S = 10.0  # for what the daemon answers at once
COMMAND_S = 30.0  # the daemon's own deadline


@record
class Request:
    """One request; the daemon may take `wait_s` seconds longer over it than over others."""

    method: str
    path: str
    params: Mapping[str, str]
    body: bytes | None = None
    wait_s: float = 0.0


def snapshot_request(after: int | None, wait_s: float) -> Request:
    """The newest snapshot; with `after`, only once its number differs, waiting up to `wait_s` seconds."""
    params = {} if after is None else {"after": str(after), "wait_s": f"{wait_s:.3f}"}
    return Request(method="GET", path="/v1/snapshot", params=params, wait_s=wait_s)


def events_request(after: int, limit: int) -> Request:
    """Events above `after`, oldest first."""
    return Request(method="GET", path="/v1/events", params={"after": str(after), "limit": str(limit)})


def command_request(command: Command) -> Request:
    """A command."""
    return Request(method="POST", path="/v1/commands", params={}, body=encode(command), wait_s=COMMAND_S)


def read(cls: type[T], response: httpx.Response, socket: Path) -> T:
    """The record in a good answer; the error in a bad one."""
    check(response, socket)
    try:
        return decode(cls, response.content, where=str(socket))
    except ConfigError as e:
        _same_schema(response.content, socket)
        raise RunError("the daemon's answer does not decode", where=str(socket), got=e.what) from e


def read_events(response: httpx.Response, socket: Path) -> tuple[EventRow, ...]:
    """The events in a good answer."""
    check(response, socket)
    return decode(tuple[EventRow, ...], response.content, where=str(socket))


def check(response: httpx.Response, socket: Path) -> None:
    """Raise what the daemon answered, if that is an error."""
    if response.status_code < 400:
        return
    try:
        error = decode(ApiError, response.content)
    except ConfigError:
        raise RunError(
            "what answers is not a hexctl daemon",
            where=str(socket),
            got=f"HTTP {response.status_code}",
            expected="an ApiError",
        ) from None
    match response.status_code:
        case 409:
            raise RefusedError(error.message, hint=error.hint)
        case 400 | 404 | 405:
            raise ConfigError(error.message, hint=error.hint)
        case _:
            raise RunError(error.message, hint=error.hint)


def _same_schema(body: bytes, socket: Path) -> None:
    try:
        raw = json.loads(body)
    except ValueError:
        return
    version = raw.get("schema_version", SCHEMA_VERSION) if isinstance(raw, dict) else SCHEMA_VERSION
    if version != SCHEMA_VERSION:
        raise RefusedError(
            "the daemon speaks another schema", where=str(socket), got=version, expected=f"schema_version {SCHEMA_VERSION}",
            hint="use the hexctl version that started the run",
        )  # fmt: skip


def unreachable(error: httpx.TransportError, socket: Path, timeout_s: float) -> RunError:
    """Why nobody answers, in words."""
    if isinstance(error, httpx.TimeoutException):
        return UnreachableError(
            f"no answer within {timeout_s:.0f} s",
            where=str(socket),
            hint="the daemon is alive but busy or stopped: hexctl doctor",
        )
    other = foreign_owner(socket)
    if other is not None:
        return RefusedError(
            "this run belongs to another user", where=str(socket), got=f"uid {other}", expected=f"uid {os.getuid()}",
            hint="only the user who started a run may command it",
        )  # fmt: skip
    what = "the daemon closed the connection" if isinstance(error, httpx.RemoteProtocolError) else "no daemon answers"
    return UnreachableError(
        what, where=str(socket), hint="the run itself may well go on: hexctl runs; hexctl up --run ID takes it over"
    )


def foreign_owner(socket: Path) -> int | None:
    """Uid of the other user who owns the socket, or the folder that keeps us from it; None when it is ours or not there."""
    shut_out = False
    for path in (socket, *socket.parents):
        try:
            owner = path.stat().st_uid
        except PermissionError:
            shut_out = True
            continue
        except OSError:
            continue
        return owner if owner != os.getuid() and (shut_out or path == socket) else None
    return None
