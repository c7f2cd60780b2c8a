"""The API server: Starlette on a Unix socket that we bind and guard ourselves.

The socket is 0600 in a 0700 folder (a socket uvicorn binds is open to everybody). Every answer is JSON: a wire record
or an ApiError; a traceback stays in the daemon's log. Stopping takes well under a second: long polls are let go at once.
"""

import asyncio
import contextlib
import errno
import json
import logging
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from planner.errors import HexError, InvalidInput, UnknownName
from runtime.api.codec import decode, encode
from runtime.api.wire import SCHEMA_VERSION, ApiError, Command, CommandResult, Health
from runtime.daemon.door import Door
from runtime.errors import ConfigError, DeadlineError, RefusedError, RunError

T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]

MAX_BODY_BYTES = 64 * 1024
MAX_WAIT_S = 60.0
MAX_EVENTS = 1000
COMMAND_DEADLINE_S = 30.0
REMEMBERED_COMMANDS = 512
_LOG = logging.getLogger(__name__)


async def serve(
    door: Door, socket_path: Path, stop: asyncio.Event, *, on_ready: Callable[[], None] = lambda: None
) -> None:
    """Answer on `socket_path` until `stop` is set. RefusedError when another process answers there.

    `on_ready` is called once the socket accepts connections. Signals stay the caller's; nothing goes to stdout.
    """
    sock = bind(socket_path)
    on_ready()
    inode = socket_path.stat().st_ino
    config = uvicorn.Config(
        create_app(door, stop), log_config=None, log_level="warning", access_log=False, lifespan="off", ws="none",
        timeout_keep_alive=75, timeout_graceful_shutdown=1, server_header=False, date_header=False,
    )  # fmt: skip
    server = _Server(config)
    running = asyncio.create_task(server.serve(sockets=[sock]), name="api-server")
    stopping = asyncio.create_task(stop.wait(), name="api-stop")
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        server.leave()
        stopping.cancel()
        with contextlib.suppress(OSError):
            if socket_path.stat().st_ino == inode:  # not a successor's
                socket_path.unlink()
        await running
        sock.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: signals belong to the daemon."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._left = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        """Until told to leave, without uvicorn's ten looks a second at a flag and at a date that no answer carries."""
        await self.on_tick(0)  # the headers of every answer
        await self._left.wait()

    def leave(self) -> None:
        """End soon."""
        self.should_exit = True
        self._left.set()


def bind(path: Path) -> socket.socket:
    """A listening Unix socket at `path`, 0600 in a folder that is ours alone (made when missing).

    A socket file that nobody answers on is replaced. RefusedError: somebody answers, or the folder is another
    user's or open to others; ConfigError: the path is too long for a socket.
    """
    if len(os.fsencode(path)) > 107:
        raise ConfigError(
            "path too long for a Unix socket", where=str(path), got=len(os.fsencode(path)), expected="at most 107 bytes",
            hint="set XDG_RUNTIME_DIR to a shorter folder",
        )  # fmt: skip
    _guard(path.parent)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            sock.bind(str(path))
        except OSError as e:
            if e.errno != errno.EADDRINUSE:
                raise
            _clear(path)
            sock.bind(str(path))
        path.chmod(0o600)
        sock.listen(128)
    except OSError as e:
        sock.close()
        raise RunError("cannot open the control socket", where=str(path), got=e.strerror) from e
    except HexError:
        sock.close()
        raise
    sock.setblocking(False)
    return sock


def _guard(folder: Path) -> None:
    """Make `folder` ours alone."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
        if owner != os.getuid():
            raise RefusedError(
                "the socket's folder belongs to another user",
                where=str(folder),
                got=owner,
                expected=f"uid {os.getuid()}",
            )
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
    except OSError as e:
        raise RunError("cannot make the socket's folder", where=str(folder), got=e.strerror) from e


def _clear(path: Path) -> None:
    """Remove the socket file of a dead daemon."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise RefusedError("not a socket, left alone", where=str(path), hint="move the file away")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except (TimeoutError, BlockingIOError):
            pass  # a full backlog: somebody holds it
    raise RefusedError(
        "socket in use", where=str(path), hint="another daemon serves this run: hexctl attach, or hexctl down first"
    )


def create_app(door: Door, stop: asyncio.Event) -> Starlette:
    """The ASGI application over `door`; long polls end when `stop` is set."""
    api = _Api(door, stop)
    routes = [
        Route("/v1/health", _answers(api.health), methods=["GET"]),
        Route("/v1/snapshot", _answers(api.snapshot), methods=["GET"]),
        Route("/v1/events", _answers(api.events), methods=["GET"]),
        Route("/v1/commands", _answers(api.command), methods=["POST"]),
    ]
    return Starlette(routes=routes, exception_handlers={404: _no_such_path, 405: _no_such_method})


class _Api:
    def __init__(self, door: Door, stop: asyncio.Event) -> None:
        self._door = door
        self._stop = stop
        self._commands: dict[str, tuple[Command, asyncio.Task[CommandResult]]] = {}

    async def health(self, request: Request) -> Response:
        run = self._door.snapshot().run
        return _json(Health(run=run.id, state=run.state, pid=os.getpid(), hexctl_version=run.hexctl_version))

    async def snapshot(self, request: Request) -> Response:
        after = _number(request, "after", None, -1, float("inf"))
        wait_s = _number(request, "wait_s", 0.0, 0.0, MAX_WAIT_S)
        newest = self._door.snapshot()
        # Another number than the client's, smaller ones too: a restarted daemon counts anew.
        if after is None or newest.seq != int(after):
            return _json(newest)
        later = await self._unless_stopping(self._door.wait_snapshot(int(after), float(wait_s or 0.0)))
        return Response(status_code=204) if later is None else _json(later)

    async def events(self, request: Request) -> Response:
        after = _number(request, "after", 0, -1, float("inf"))
        limit = _number(request, "limit", 200, 1, MAX_EVENTS)
        rows = self._door.events(int(after or 0), int(limit or 1))
        return Response(b"[" + b",".join(encode(row) for row in rows) + b"]", media_type="application/json")

    async def command(self, request: Request) -> Response:
        command = decode(Command, await _body(request), where="POST /v1/commands")
        if not command.key:
            raise ConfigError(
                "key is empty", where="POST /v1/commands", expected="a text of the client's own, for repeats"
            )
        task = self._once(command)
        done, _ = await asyncio.wait({task}, timeout=COMMAND_DEADLINE_S)
        if not done:
            raise DeadlineError(
                f"{command.name} is still being carried out",
                got=f"{COMMAND_DEADLINE_S:.0f} s",
                hint="repeat it with the same key",
            )
        return _json(task.result())

    def _once(self, command: Command) -> asyncio.Task[CommandResult]:
        """The one task of this key. A failure of ours is forgotten, so that a repeat tries again; a refusal stays."""
        known = self._commands.get(command.key)
        if known is not None:
            first, task = known
            if first != command:
                raise RefusedError("this key was used for another command", got=command.key, hint="use a new key")
            if not task.done() or task.exception() is None or isinstance(task.exception(), RefusedError):
                return task
        task = asyncio.create_task(self._carry_out(command), name=f"command-{command.name}")
        self._commands[command.key] = (command, task)
        while len(self._commands) > REMEMBERED_COMMANDS:
            self._commands.pop(next(iter(self._commands)))
        return task

    async def _carry_out(self, command: Command) -> CommandResult:
        return await self._door.command(command)

    async def _unless_stopping(self, wait: Awaitable[T]) -> T | None:
        """The result, or None as soon as the server stops."""
        work = asyncio.ensure_future(wait)
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({work, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else None
        finally:
            work.cancel()
            stopping.cancel()


def _json(value: object) -> Response:
    return Response(encode(value), media_type="application/json")


def _error(status: int, code: str, error: HexError | str, hint: str = "") -> Response:
    if isinstance(error, HexError):
        message, _, rest = str(error).partition("\nhint: ")
        hint = hint or rest
    else:
        message = error
    return Response(
        encode(ApiError(code=code, message=message, hint=hint)), status_code=status, media_type="application/json"
    )


def _answers(handler: Handler) -> Handler:
    """The handler with every exception turned into an ApiError."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedError as e:
            return _error(409, str(getattr(e, "code", "refused")), e)
        except _UnsupportedSchema as e:
            return _error(400, "unsupported_schema", e)
        except UnknownName as e:
            return _error(404, "not_found", e)
        except (ConfigError, InvalidInput) as e:
            return _error(400, "bad_request", e)
        except HexError as e:
            _LOG.warning("%s %s: %s", request.method, request.url.path, e)
            return _error(500, "internal", e)
        except Exception:  # noqa: BLE001  (the one place that must answer whatever happened)
            _LOG.exception("%s %s failed", request.method, request.url.path)
            return _error(500, "internal", "the daemon failed at this request", "its log says more: logs/daemon.log")

    return answer


class _UnsupportedSchema(ConfigError):
    pass


async def _body(request: Request) -> bytes:
    """The body, bounded; refuses another schema before anything else is looked at."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ConfigError("body too large", got=f"over {MAX_BODY_BYTES} bytes", expected="a command")
    version = _schema_version(bytes(body))
    if version is not None and version != SCHEMA_VERSION:
        raise _UnsupportedSchema(
            "the client speaks another schema", got=version, expected=f"schema_version {SCHEMA_VERSION}",
            hint="use the same hexctl version as the daemon",
        )  # fmt: skip
    return bytes(body)


def _schema_version(body: bytes) -> object:
    try:
        decoded = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return decoded.get("schema_version") if isinstance(decoded, dict) else None


def _number(request: Request, name: str, default: float | None, low: float, high: float) -> float | None:
    """A query parameter as a number within [low, high]."""
    raw = request.query_params.get(name)
    if raw is None:
        return default
    try:
        value = float(raw)
    except ValueError:
        value = float("nan")
    if not low <= value <= high or value == float("inf"):
        raise ConfigError(f"bad {name}", got=raw, expected=f"a number from {low:g} to {high:g}")
    return value


async def _no_such_path(request: Request, error: Exception) -> Response:
    return _error(404, "not_found", f"no such path: {request.url.path}", "this daemon serves /v1")


async def _no_such_method(request: Request, error: Exception) -> Response:
    return _error(405, "bad_request", f"{request.method} is not for {request.url.path}")
