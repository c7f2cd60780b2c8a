"""The event store: SQLite in WAL mode, append-only, one writer (the loop). An append is durable when it returns."""

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from planner.errors import HexError
from runtime.api import codec
from runtime.core.event import EVENT_TYPES, Event, Stored, kind
from runtime.errors import RunError

SCHEMA = 1


class EventStore:
    """Open with `open_store`. Not shared between threads."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self._db = path, connection

    def append(self, events: Sequence[Event], at_s: float) -> tuple[Stored, ...]:
        """Write events (all or none), fsync, and return them with their sequence numbers. RunError when the disk refuses."""
        if not events:
            return ()
        rows = [(at_s, kind(e), codec.encode(e).decode()) for e in events]
        try:
            with self._db:
                self._db.execute("BEGIN IMMEDIATE")
                stored = [
                    Stored(seq=self._insert(row), at_s=at_s, event=e) for row, e in zip(rows, events, strict=True)
                ]
        except sqlite3.Error as e:
            raise _refused(self.path, e) from e
        return tuple(stored)

    def _insert(self, row: tuple[float, str, str]) -> int:
        cursor = self._db.execute("INSERT INTO events(at_s, kind, json) VALUES (?, ?, ?)", row)
        return int(cursor.lastrowid or 0)

    def read(
        self, after: int = 0, limit: int | None = None, *, without: Sequence[type[Event]] = ()
    ) -> tuple[Stored, ...]:
        """Events with a sequence number above `after`, oldest first; those of the types `without` do not count.

        RunError for one that this version cannot read.
        """
        names = [t.__name__ for t in without]
        others = f"AND kind NOT IN ({', '.join('?' * len(names))})" if names else ""
        try:
            rows = self._db.execute(
                f"SELECT seq, at_s, kind, json FROM events WHERE seq > ? {others} ORDER BY seq LIMIT ?",
                (after, *names, -1 if limit is None else limit),
            ).fetchall()
        except sqlite3.Error as e:
            raise _refused(self.path, e) from e
        return tuple(self._decode(*row) for row in rows)

    def last_seq(self) -> int:
        """Sequence number of the newest event; 0 when there is none."""
        row = self._db.execute("SELECT COALESCE(MAX(seq), 0) FROM events").fetchone()
        return int(row[0])

    def _decode(self, seq: int, at_s: float, name: str, body: str) -> Stored:
        event_type = EVENT_TYPES.get(name)
        if event_type is None:
            raise RunError(
                "an event of an unknown kind",
                where=f"{self.path} seq {seq}",
                got=name,
                hint="the run was written by a newer hexctl",
            )
        try:
            return Stored(seq=seq, at_s=at_s, event=codec.decode(event_type, body))
        except HexError as e:
            raise RunError("an event does not decode", where=f"{self.path} seq {seq}", got=e.what) from e

    def close(self) -> None:
        """Close the file; safe to repeat."""
        self._db.close()

    def __enter__(self) -> "EventStore":
        return self

    def __exit__(
        self, kind_: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_store(path: Path) -> EventStore:
    """Open or make the store at `path`; RunError when the folder is read-only, full, missing or the file is foreign."""
    try:
        db = sqlite3.connect(path, isolation_level=None)
    except sqlite3.Error as e:
        raise _refused(path, e) from e
    try:
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        version = int(db.execute("PRAGMA user_version").fetchone()[0])
        if version not in (0, SCHEMA):
            raise RunError("the event store has another schema", where=str(path), got=version, expected=str(SCHEMA))
        db.execute(
            "CREATE TABLE IF NOT EXISTS events("
            "seq INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, kind TEXT NOT NULL, json TEXT NOT NULL)"
        )
        db.execute(f"PRAGMA user_version={SCHEMA}")
    except sqlite3.Error as e:
        db.close()
        raise _refused(path, e) from e
    except RunError:
        db.close()
        raise
    return EventStore(path, db)


def _refused(path: Path, error: sqlite3.Error) -> RunError:
    damaged = getattr(error, "sqlite_errorcode", None) in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
    hint = (
        "the file is damaged: put it back from a copy"
        if damaged
        else "is the folder writable, and is there space on the disk?"
    )
    return RunError("the event store cannot be written or read", where=str(path), got=str(error), hint=hint)
