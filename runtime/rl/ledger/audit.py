"""Proof of the ledger's promises from one read transaction over the file alone; nothing in memory is trusted."""

import sqlite3
from collections.abc import Mapping
from pathlib import Path

from planner.record import record
from runtime.rl.ledger.database import connect_reader, guarded
from runtime.rl.ledger.rows import STATES


@record
class Audit:
    """Tokens by where they are, samples by state, and what is wrong in words (nothing, when the ledger is whole)."""

    generated: int
    trained: int
    masked: int
    in_flight: int
    wasted: Mapping[str, int]
    redone: int
    samples: Mapping[str, int]
    groups: int
    faults: tuple[str, ...]

    @property
    def balanced(self) -> bool:
        """generated = trained + masked + in flight + sum(wasted), exactly."""
        return self.generated == self.trained + self.masked + self.in_flight + sum(self.wasted.values())


def audit(path: Path) -> Audit:
    """Read the ledger at `path`. LedgerError when it cannot be read."""
    with guarded(path):
        db = connect_reader(path)
        try:
            db.execute("BEGIN")
            return _audit(db)
        finally:
            db.close()


def _audit(db: sqlite3.Connection) -> Audit:
    counters = dict(db.execute("SELECT name, value FROM counters"))
    wasted = dict(db.execute("SELECT reason, tokens FROM wasted"))
    trained, masked = _one(db, "SELECT TOTAL(trained), TOTAL(masked) FROM samples WHERE state = 'APPLIED'")
    (in_flight,) = _one(db, "SELECT TOTAL(length) FROM samples WHERE state NOT IN ('APPLIED', 'DEAD_LETTER')")
    states = dict(db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state"))
    (groups,) = _one(db, "SELECT COUNT(*) FROM groups")
    result = Audit(
        generated=counters.get("generated", 0),
        trained=trained,
        masked=masked,
        in_flight=in_flight,
        wasted=wasted,
        redone=counters.get("redone", 0),
        samples={s: states.get(s, 0) for s in STATES},
        groups=groups,
        faults=tuple(_faults(db)),
    )
    if not result.balanced:
        extra = f"tokens do not add up: generated {result.generated}, accounted for {_accounted(result)}"
        return Audit(
            **{name: getattr(result, name) for name in Audit.__dataclass_fields__} | {"faults": (*result.faults, extra)}
        )
    return result


def _accounted(a: Audit) -> int:
    return a.trained + a.masked + a.in_flight + sum(a.wasted.values())


_CHECKS = (
    ("group ordinals have holes", "SELECT COUNT(*) - COALESCE(MAX(ordinal) + 1, 0) FROM groups"),
    ("samples without a group", "SELECT COUNT(*) FROM samples WHERE grp NOT IN (SELECT ordinal FROM groups)"),
    ("groups without samples", "SELECT COUNT(*) FROM groups WHERE ordinal NOT IN (SELECT grp FROM samples)"),
    (
        "live samples whose journal does not have their length",
        "SELECT COUNT(*) FROM samples s WHERE state NOT IN ('APPLIED', 'DEAD_LETTER') AND length != COALESCE((SELECT"
        " SUM(LENGTH(tokens) / 4) FROM segments g WHERE g.grp = s.grp AND g.member = s.member), 0)",
    ),
    (
        "segments that do not begin where the one before ends",
        "SELECT COUNT(*) FROM (SELECT start, LAG(start + LENGTH(tokens) / 4, 1, 0) OVER (PARTITION BY grp, member"
        " ORDER BY start) AS expected FROM segments) WHERE start != expected",
    ),
    (
        "segments with another number of logprobs than tokens",
        "SELECT COUNT(*) FROM segments WHERE LENGTH(logprobs) != 2 * LENGTH(tokens)",
    ),
    (
        "samples of a step whose weights do not cover them",
        "SELECT COUNT(*) FROM samples WHERE state IN ('RESERVED', 'APPLIED') AND trained + masked != length",
    ),
    (
        "samples of a step that is not recorded",
        "SELECT COUNT(*) FROM samples WHERE step IS NOT NULL AND step NOT IN (SELECT step FROM steps)",
    ),
    (
        "samples and their step disagree",
        "SELECT COUNT(*) FROM samples JOIN steps USING (step) WHERE samples.state != steps.state",
    ),
    ("applied steps have holes", "SELECT COUNT(*) - COALESCE(MAX(step) + 1, 0) FROM steps WHERE state = 'APPLIED'"),
)


def _faults(db: sqlite3.Connection) -> list[str]:
    found = []
    for words, query in _CHECKS:
        (n,) = _one(db, query)
        if n:
            found.append(f"{words}: {n}")
    return found


def _one(db: sqlite3.Connection, query: str) -> tuple[int, ...]:
    return tuple(int(x) for x in db.execute(query).fetchone())
