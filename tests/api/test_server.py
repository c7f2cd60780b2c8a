"""The server on real Unix sockets: guarded, bounded, and gone in less than a second."""

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hexctl.client import AsyncClient, Client
from planner.errors import HexError
from runtime.api.codec import encode
from runtime.api.wire import Command, EventRow, Snapshot
from runtime.daemon.server import bind, create_app
from runtime.errors import ConfigError, RefusedError, RunError, UnreachableError
from tests.api.doors import MemoryDoor, Served, served


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "s" / "api.sock"


@pytest.fixture
def server(path: Path) -> Iterator[Served]:
    with served(path) as s:
        yield s


@pytest.fixture
def client(server: Served) -> Iterator[Client]:
    with Client(server.path) as c:
        yield c


@pytest.fixture
def raw(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(server.path)), base_url="http://x", timeout=60) as c:
        yield c


def test_only_the_owner_may_enter(server: Served) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(server.path.parent.stat().st_mode) == 0o700


def test_an_open_folder_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    bind(folder / "api.sock").close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_snapshot_now_and_as_it_changes(server: Served, client: Client) -> None:
    first = client.now()
    assert first.run.id == "local-7f3a"
    assert client.snapshot(after=first.seq, wait_s=0.0) is None
    got: list[Snapshot | None] = []
    poll = threading.Thread(target=lambda: got.append(client.snapshot(after=first.seq, wait_s=50)))
    poll.start()
    assert server.door.waiting.wait(60)
    server.put(infeasible="too small")
    poll.join(60)
    assert got
    assert got[0] is not None
    assert (got[0].seq, got[0].infeasible) == (first.seq + 1, "too small")


def test_a_daemon_that_counts_anew_is_answered_at_once(client: Client) -> None:
    snapshot = client.snapshot(after=9_999, wait_s=30)
    assert snapshot is not None
    assert snapshot.seq == 1


def test_health(client: Client) -> None:
    health = client.health()
    assert (health.run, health.state, health.pid) == ("local-7f3a", "running", os.getpid())


def test_events_are_bounded(server: Served, client: Client) -> None:
    server.door.rows = [EventRow(seq=i, at_s=float(i), level="info", kind="k", message="é[b]") for i in range(1, 30)]
    assert [e.seq for e in client.events(after=3, limit=4)] == [4, 5, 6, 7]
    with pytest.raises(ConfigError, match="bad limit"):
        client.events(limit=100_000)


def test_commands_and_refusals(client: Client) -> None:
    assert client.command(Command(name="cordon", key="a", device="n0/gpu1")).message == "cordon done"
    with pytest.raises(RefusedError, match="no longer open, got 1, expected 4"):
        client.command(Command(name="approve", key="b", plan_rev=1))
    with pytest.raises(ConfigError, match="no such device") as caught:
        client.command(Command(name="drain", key="c", device="n9/gpu9"))
    assert caught.value.hint == "hexctl gpus lists them"


def test_a_repeated_key_answers_as_the_first_did(server: Served, client: Client) -> None:
    command = Command(name="replan", key="same")
    assert client.command(command) == client.command(command)
    refused = Command(name="approve", key="r", plan_rev=1)
    for _ in range(2):
        with pytest.raises(RefusedError):
            client.command(refused)
    assert [c.key for c in server.door.commands] == ["same", "r"]
    with pytest.raises(RefusedError, match="another command"):
        client.command(Command(name="down", key="same"))


def test_a_repeat_while_the_first_is_under_way_joins_it() -> None:
    async def scene() -> tuple[object, object, int]:
        door = MemoryDoor()
        door.slow = asyncio.Event()
        transport = httpx.ASGITransport(app=create_app(door, asyncio.Event()))
        async with AsyncClient(Path("none"), transport=transport) as client:
            tasks = [asyncio.create_task(client.command(Command(name="replan", key="k"))) for _ in range(2)]
            while not door.commands:
                await asyncio.sleep(0)
            door.slow.set()
            a, b = await asyncio.gather(*tasks)
            return a, b, len(door.commands)

    a, b, count = asyncio.run(scene())
    assert a == b
    assert count == 1


def test_our_own_failure_shows_no_traceback_and_may_be_repeated(
    server: Served, client: Client, raw: httpx.Client
) -> None:
    body = encode(Command(name="replan", key="k", reason="boom"))
    for _ in range(2):
        answer = raw.post("/v1/commands", content=body)
        assert answer.status_code == 500
        assert answer.json()["code"] == "internal"
        assert "secret" not in answer.text
        assert "Traceback" not in answer.text
    assert len(server.door.commands) == 2
    with pytest.raises(RunError, match="failed at this request"):
        client.command(Command(name="replan", key="k2", reason="boom"))


BAD = [
    (b"", "bad_request"), (b"{", "bad_request"), (b"[]", "bad_request"), (b"\xff", "bad_request"),
    (b"{}", "bad_request"), (b'{"name":"explode","key":"k"}', "bad_request"), (b'{"name":"down","key":""}', "bad_request"),
    (b'{"name":"down","key":"k","devise":1}', "bad_request"), (b"x" * 70_000, "bad_request"), (b"[" * 60_000, "bad_request"),
    (b'{"schema_version":2,"name":"fly","key":"k"}', "unsupported_schema"),
    (b'{"schema_version":"1","name":"down","key":"k"}', "unsupported_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "code"), BAD, ids=range(len(BAD)))
def test_bad_bodies(server: Served, raw: httpx.Client, body: bytes, code: str) -> None:
    answer = raw.post("/v1/commands", content=body)
    assert (answer.status_code, answer.json()["code"]) == (400, code)
    assert not server.door.commands


@pytest.mark.parametrize(
    ("method", "url", "status"),
    [
        ("GET", "/v1/snapshot?after=x", 400), ("GET", "/v1/snapshot?after=1&wait_s=-1", 400),
        ("GET", "/v1/snapshot?after=1&wait_s=nan", 400), ("GET", "/v1/snapshot?after=inf", 400),
        ("GET", "/v1/events?limit=0", 400), ("GET", "/v2/snapshot", 404), ("GET", "/", 404),
        ("POST", "/v1/snapshot", 405), ("GET", "/v1/commands", 405),
    ],
)  # fmt: skip
def test_bad_requests(raw: httpx.Client, method: str, url: str, status: int) -> None:
    answer = raw.request(method, url)
    assert answer.status_code == status
    assert set(answer.json()) == {"code", "message", "hint"}


def test_two_servers_on_one_socket(server: Served, client: Client) -> None:
    with pytest.raises(RefusedError, match="socket in use"), served(server.path):
        pass
    assert client.now().seq == 1  # the first goes on


def test_the_socket_file_of_a_dead_server_is_replaced(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with served(path), Client(path) as c:
        assert c.now().seq == 1
    assert not path.exists()


def test_a_file_that_is_no_socket_is_left_alone(path: Path) -> None:
    path.parent.mkdir(mode=0o700)
    path.write_text("precious")
    with pytest.raises(RefusedError, match="not a socket"):
        bind(path)
    assert path.read_text() == "precious"


def test_a_path_too_long(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long"):
        bind(tmp_path / ("x" * 100) / "api.sock")


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot make the socket's folder"):
        bind(tmp_path / "file" / "s" / "api.sock")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make another user's folder")
def test_a_folder_of_another_user(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o700)
    os.chown(folder, 12345, 12345)
    with pytest.raises(RefusedError, match="belongs to another user"):
        bind(folder / "api.sock")


def test_stops_within_a_second_with_long_polls_open(path: Path) -> None:
    """Of five times once at least: on a busy machine any of them may have to wait for its turn as long."""
    assert any(stopped_after_s(path) < 1.0 for _ in range(5))


def stopped_after_s(path: Path) -> float:
    """How long a server with an open poll takes to end; it is gone then, and so is the poll."""
    with served(path) as s, Client(path) as c:
        done = threading.Event()

        def poll() -> None:
            with contextlib.suppress(HexError):
                c.snapshot(after=1, wait_s=50)
            done.set()

        threading.Thread(target=poll, daemon=True).start()
        assert s.door.waiting.wait(60)
        began = time.monotonic()
        s.end_soon()
        s.thread.join(60)
        seconds = time.monotonic() - began
        assert done.wait(40)
    assert not path.exists()
    return seconds


def test_nobody_answers(path: Path) -> None:
    with Client(path) as c, pytest.raises(UnreachableError, match="no daemon answers") as caught:
        c.now()
    assert caught.value.hint


def test_silence_ends_at_the_deadline(path: Path) -> None:
    sock = bind(path)  # listens, never accepts
    try:
        with Client(path, answer_s=0.2) as c, pytest.raises(UnreachableError, match=r"no answer within"):
            c.now()
    finally:
        sock.close()


def test_what_answers_is_not_a_daemon(path: Path) -> None:
    async def teapot(scope: object, receive: object, send: object) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})  # type: ignore[operator]
        await send({"type": "http.response.body", "body": b"short and stout"})  # type: ignore[operator]

    async def ask() -> None:
        async with AsyncClient(path, transport=httpx.ASGITransport(app=teapot)) as c:  # type: ignore[arg-type]
            await c.snapshot()

    with pytest.raises(RunError, match="not a hexctl daemon"):
        asyncio.run(ask())


def test_another_schema_is_named(path: Path) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=json.dumps({"schema_version": 2, "news": 1}))

    with Client(path, transport=httpx.MockTransport(answer)) as c, pytest.raises(RefusedError, match="another schema"):
        c.now()


def test_the_asynchronous_client_polls_commands_and_reads(server: Served) -> None:
    async def scene() -> tuple[int, str, int, int]:
        async with AsyncClient(server.path) as client:
            first = await client.snapshot(-1, 5.0)
            assert first is not None
            poll = asyncio.create_task(client.snapshot(first.seq, 50.0))
            await asyncio.to_thread(server.door.waiting.wait, 60)
            answer = await client.command(Command(name="cordon", key="k", device="n0/gpu1"))
            await asyncio.to_thread(server.put, infeasible="changed")
            second = await poll
            assert second is not None
            return first.seq, answer.message, second.seq, len(await client.events())

    assert asyncio.run(scene()) == (1, "cordon done", 2, 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_is_refused(server: Served) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from hexctl.client import Client\n"
        "from planner.errors import HexError\n"
        "Client(Path(sys.argv[1])).now()  # as ourselves, so that every module is loaded\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "try:\n    Client(Path(sys.argv[1])).now()\n"
        "except HexError as e:\n    print(type(e).__name__, e)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(server.path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("RefusedError")
    assert "belongs to another user" in done.stdout
