"""What one transaction will write. Nothing touches the file before `write`, which is one commit and one fsync."""

import json
import sqlite3
from collections import Counter

from runtime.rl.arrays import pack_tokens
from runtime.rl.ledger.rows import GroupRow, ReplicaRow, SampleRow, StepRow
from runtime.rl.types import SampleId, WeightsRef

Segment = tuple[int, int, int, int, int, bytes, bytes]  # group, member, start, epoch, version, tokens, logprobs


class Draft:
    """Changed rows, by key: the last change wins."""

    def __init__(self) -> None:
        self.samples: dict[SampleId, SampleRow] = {}
        self.advanced: dict[SampleId, SampleRow] = {}  # not in `samples`: got tokens, and nothing else of them changed
        self.groups: dict[int, GroupRow] = {}
        self.segments: dict[SampleId, list[Segment]] = {}
        self.steps: dict[int, StepRow] = {}
        self.replicas: dict[tuple[str, int], ReplicaRow] = {}
        self.generations: list[WeightsRef] = []
        self.meta: dict[str, str] = {}
        self.counters: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()
        self.prune_steps_below: int | None = None  # token data of samples applied in earlier steps goes
        self.prune_dead: list[SampleId] = []

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not (
            self.samples
            or self.advanced
            or self.groups
            or self.segments
            or self.steps
            or self.replicas
            or self.generations
            or self.meta
            or self.counters
            or self.wasted
        )

    def put(self, row: SampleRow, *, advanced: bool = False) -> None:
        """A changed sample; `advanced`: only by tokens."""
        sample = row.id
        if advanced and sample not in self.samples:
            self.advanced[sample] = row
        else:
            self.samples[sample] = row
            self.advanced.pop(sample, None)

    def write(self, db: sqlite3.Connection) -> None:
        """Write everything in one transaction. On any error nothing is written and the error goes up."""
        db.execute("BEGIN IMMEDIATE")
        try:
            self._write_rows(db)
            self._write_totals(db)
            self._prune(db)
            db.execute("COMMIT")
        except BaseException:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise

    def _write_rows(self, db: sqlite3.Connection) -> None:
        if self.groups:
            db.executemany(
                "INSERT INTO groups VALUES (?, ?, ?, ?, ?)",
                [(g.ordinal, g.slot, pack_tokens(g.prompt_tokens), g.prompt, g.answer) for g in self.groups.values()],
            )
        if self.samples:
            db.executemany(
                "INSERT OR REPLACE INTO samples VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                list(self.samples.values()),
            )
        if self.advanced:  # most rows of a flush: no index is touched
            db.executemany(
                "UPDATE samples SET length = ?, hops = ?, oldest = ?, newest = ? WHERE grp = ? AND member = ?",
                [(r.length, r.hops, r.oldest, r.newest, r.group, r.member) for r in self.advanced.values()],
            )
        if self.segments:
            db.executemany(
                "INSERT INTO segments VALUES (?, ?, ?, ?, ?, ?, ?)",
                [s for many in self.segments.values() for s in many],
            )
        for s in self.steps.values():
            db.execute(
                "INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    s.step, s.state, s.lineage, s.ids_hash, json.dumps(s.ids), s.eta,
                    json.dumps(dict(s.figures)), json.dumps(dict(s.metrics)),
                ),
            )  # fmt: skip
        for r in self.replicas.values():
            db.execute(
                "INSERT OR REPLACE INTO replicas VALUES (?, ?, ?, ?, ?, ?, ?)",
                (r.replica, r.epoch, r.seq, r.received, r.order, int(r.forgotten), int(r.counted)),
            )
        for w in self.generations:
            db.execute(
                "INSERT OR REPLACE INTO generations VALUES (?, ?, ?, ?)", (w.lineage, w.version, w.path, w.digest)
            )

    def _write_totals(self, db: sqlite3.Connection) -> None:
        for key, text in self.meta.items():
            db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, text))
        for table, counts in (("counters", self.counters), ("wasted", self.wasted)):
            column = "value" if table == "counters" else "tokens"
            for name, n in counts.items():
                db.execute(
                    f"INSERT INTO {table} VALUES (?, ?) ON CONFLICT DO UPDATE SET {column} = {column} + excluded.{column}",
                    (name, n),
                )

    def _prune(self, db: sqlite3.Connection) -> None:
        """Drop token data nobody can ask for again. Lengths, weights and totals stay, so the identity stays exact."""
        if self.prune_steps_below is not None:
            db.execute(
                "DELETE FROM segments WHERE grp IN (SELECT grp FROM samples WHERE step < ? AND step >= ?)",
                (self.prune_steps_below, self.prune_steps_below - 4),
            )
            db.execute(
                "UPDATE groups SET prompt_tokens = NULL, prompt = NULL, answer = NULL WHERE ordinal IN"
                " (SELECT grp FROM samples WHERE step < ? AND step >= ?)",
                (self.prune_steps_below, self.prune_steps_below - 4),
            )
        for sample in self.prune_dead:
            db.execute("DELETE FROM segments WHERE grp = ? AND member = ?", (sample.group, sample.member))
