"""The event store: durable, append-only, clear when it cannot be had."""

import os
import sqlite3
from pathlib import Path

import pytest

from runtime.core.event import RunEnded
from runtime.core.fleet_event import DeviceJoined, StepOrdered
from runtime.errors import RunError
from runtime.store.events import open_store

EVENTS = (
    DeviceJoined(device="a", kind="k", node="n0", index=0),
    StepOrdered(id="stop-replica:r0:1", unit="r0", epoch=1, plan_rev=1),
    RunEnded(reason="down"),
)


def test_what_was_appended_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    with open_store(path) as store:
        first = store.append(EVENTS[:2], 1.5)
        assert [s.seq for s in first] == [1, 2]
    with open_store(path) as store:
        second = store.append(EVENTS[2:], 2.5)
        assert store.read() == (*first, *second)
        assert store.read(after=1, limit=1) == first[1:]
        assert store.last_seq() == 3
        assert store.append((), 3.0) == ()


def test_a_reader_beside_the_writer_sees_only_whole_appends(tmp_path: Path) -> None:
    with open_store(tmp_path / "events.db") as writer, open_store(tmp_path / "events.db") as reader:
        for i in range(20):
            writer.append(EVENTS, float(i))
            assert len(reader.read()) == 3 * (i + 1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: p, "cannot be written or read"),  # the folder is missing
        (lambda p: p.parent.mkdir() or p.write_bytes(b"not a database" * 99), "hint: the file is damaged"),
        (lambda p: p.parent.mkdir() or foreign(p), "another schema"),
    ],
)
def test_what_is_no_store_is_refused_with_its_path(tmp_path: Path, make: object, message: str) -> None:
    path = tmp_path / "run" / "events.db"
    make(path)  # type: ignore[operator]
    with pytest.raises(RunError, match=message) as e:
        open_store(path)
    assert str(path) in str(e.value)


def foreign(path: Path) -> None:
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version=7")
    db.close()


def test_an_event_of_a_newer_hexctl_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.db"
    with open_store(path) as store:
        store.append(EVENTS, 1.0)
    db = sqlite3.connect(path)
    db.execute("INSERT INTO events(at_s, kind, json) VALUES (2.0, 'MoonLanded', '{}')")
    db.execute("INSERT INTO events(at_s, kind, json) VALUES (2.0, 'DeviceLost', '{\"device\": 3}')")
    db.commit()
    db.close()
    with open_store(path) as store:
        with pytest.raises(RunError, match=r"unknown kind.*MoonLanded[^\n]*\nhint: .*newer hexctl"):
            store.read(limit=4)
        with pytest.raises(RunError, match="does not decode"):
            store.read(after=4)


def test_a_full_disk_refuses_the_append_and_keeps_what_was(tmp_path: Path) -> None:
    """A limit on the file's size, in a child of its own, stands for the full disk: SQLite sees the same error."""
    path = tmp_path / "events.db"
    with open_store(path) as store:
        store.append(EVENTS, 1.0)
    pid = os.fork()
    if pid == 0:
        import resource
        import signal

        code = 1
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
            with open_store(path) as store:
                for i in range(2000):
                    store.append(EVENTS, float(i))
        except RunError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with open_store(path) as store:
        kept = store.read()
    assert len(kept) >= 3
    assert len(kept) % 3 == 0
