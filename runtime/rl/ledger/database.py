"""The ledger's SQLite file: schema and connection. WAL and synchronous=FULL: a commit is on disk."""

import fcntl
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from runtime.errors import LedgerError

SCHEMA = 1
_TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE wasted (reason TEXT PRIMARY KEY, tokens INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    ordinal INTEGER PRIMARY KEY, slot INTEGER NOT NULL, prompt_tokens BLOB, prompt TEXT, answer TEXT
);
CREATE TABLE samples (
    grp INTEGER, member INTEGER, state TEXT NOT NULL, epoch INTEGER NOT NULL, replica TEXT NOT NULL,
    replica_epoch INTEGER NOT NULL, lease_seq INTEGER NOT NULL, lease_length INTEGER NOT NULL, length INTEGER NOT NULL,
    hops INTEGER NOT NULL, finish TEXT, reward REAL, step INTEGER, reason TEXT NOT NULL, trained INTEGER NOT NULL,
    masked INTEGER NOT NULL, oldest INTEGER, newest INTEGER, PRIMARY KEY (grp, member)
) WITHOUT ROWID;
CREATE INDEX live ON samples (grp) WHERE state NOT IN ('APPLIED', 'DEAD_LETTER');
CREATE INDEX by_step ON samples (step) WHERE step IS NOT NULL;
CREATE TABLE segments (
    grp INTEGER, member INTEGER, start INTEGER, epoch INTEGER NOT NULL, version INTEGER NOT NULL,
    tokens BLOB NOT NULL, logprobs BLOB NOT NULL, PRIMARY KEY (grp, member, start)
) WITHOUT ROWID;
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, state TEXT NOT NULL, lineage INTEGER NOT NULL, ids_hash TEXT NOT NULL, ids TEXT NOT NULL,
    eta INTEGER NOT NULL, figures TEXT NOT NULL, metrics TEXT NOT NULL
);
CREATE TABLE replicas (
    replica TEXT, epoch INTEGER, seq INTEGER NOT NULL, received INTEGER NOT NULL, ord TEXT NOT NULL,
    forgotten INTEGER NOT NULL, counted INTEGER NOT NULL, PRIMARY KEY (replica, epoch)
) WITHOUT ROWID;
CREATE TABLE generations (
    lineage INTEGER, version INTEGER, path TEXT NOT NULL, digest TEXT NOT NULL, PRIMARY KEY (lineage, version)
) WITHOUT ROWID;
"""


def connect(path: Path) -> sqlite3.Connection:
    """Open (making it when missing) the ledger at `path` for its one writer. LedgerError when it cannot be used."""
    with guarded(path):
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("PRAGMA locking_mode=NORMAL")
        (schema,) = db.execute("PRAGMA user_version").fetchone()
        if schema == 0:
            db.executescript(f"BEGIN IMMEDIATE;{_TABLES}PRAGMA user_version={SCHEMA};COMMIT;")
        elif schema != SCHEMA:
            db.close()
            raise LedgerError(
                "the ledger was written by another version of hexctl",
                where=str(path),
                got=schema,
                expected=f"schema {SCHEMA}",
                hint="end the run with the version that began it, or start a new run",
            )
    return db


def lock(path: Path) -> IO[bytes]:
    """Hold the ledger's lock for as long as the returned file is open: one writer. The kernel lets go of it when the
    process dies. LedgerError when another has it."""
    try:
        file = path.with_name(path.name + ".lock").open("ab")
    except OSError as e:
        raise LedgerError(
            "the ledger cannot be used", where=str(path), got=e.strerror, hint="the run folder must be writable"
        ) from e
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        file.close()
        raise LedgerError(
            "another process writes this ledger", where=str(path), hint="a run has one flow; end the other one first"
        ) from e
    return file


def connect_reader(path: Path) -> sqlite3.Connection:
    """A second connection that only reads."""
    with guarded(path):
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA query_only=ON")
    return db


@contextmanager
def guarded(path: Path) -> Iterator[None]:
    """Turn SQLite's errors into LedgerError with a hint that fits."""
    try:
        yield
    except sqlite3.Error as e:
        text = str(e)
        if "full" in text:
            hint = "free disk space; nothing is acknowledged until the ledger can be written"
        elif "locked" in text:
            hint = "another process has this run's ledger open"
        elif "readonly" in text or "unable to open" in text:
            hint = "the run folder must be writable"
        else:
            hint = "look at the disk (dmesg); the ledger keeps what was acknowledged"
        raise LedgerError("the ledger cannot be used", where=str(path), got=text, hint=hint) from e
