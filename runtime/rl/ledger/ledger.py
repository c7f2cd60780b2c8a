"""The trajectory ledger: nothing lost, nothing trained twice.

Samples go PENDING -> LEASED -> (SUSPENDED -> LEASED)* -> DONE -> RESERVED(step) -> APPLIED(step), or to
DEAD_LETTER(reason). One process writes. Every change belongs to a `transaction()`: one commit, one fsync, after which it
may be acknowledged. When the commit fails nothing has happened: the caller gets a LedgerError, and the next transaction
starts from what the file holds.

Tokens, always exactly: generated = trained + masked + in flight + sum(wasted). `generated` counts every response token
received; refused appends and the tokens of dead letters are wasted(reason).
"""

import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from planner.record import replace
from runtime.errors import LedgerError
from runtime.rl.arrays import pack_logprobs, pack_tokens
from runtime.rl.ledger.book import Book, load_book
from runtime.rl.ledger.database import connect, guarded, lock
from runtime.rl.ledger.draft import Draft
from runtime.rl.ledger.journal import Journal, Trajectory
from runtime.rl.ledger.rows import LEASABLE, GroupRow, ReplicaRow, SampleRow, StepRow, hash_ids
from runtime.rl.types import Append, FinishReason, SampleId, WeightsRef

MAX_HOPS = 3  # leases in a row without a new token before a sample is given up
KEEP_STEPS = (
    4  # applied steps whose tokens stay at least, so that they can be trained again when newer checkpoints are lost
)

Outcome = Literal["ok", "zombie", "duplicate", "gap"]


class Ledger:
    """The one writer of a run's ledger file. Not thread-safe."""

    def __init__(self, path: Path, *, keep_steps: int = KEEP_STEPS) -> None:
        """Open or create. `keep_steps`: applied steps whose tokens stay. LedgerError when the file cannot be used."""
        self._path, self.keep_steps = path, keep_steps
        self._lock = lock(path)
        try:
            self._db = connect(path)
        except LedgerError:
            self._lock.close()
            raise
        self._draft: Draft | None = None
        self._stale = False
        self.commits, self.commit_s = 0, 0.0  # transactions written, and how long that took
        with guarded(path):
            self._book = load_book(self._db)

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def book(self) -> Book:
        """Live rows and totals. Read it, never write it."""
        return self._book

    @property
    def connection(self) -> sqlite3.Connection:
        """The writing connection, for pragmas."""
        return self._db

    def close(self) -> None:
        """Close the file. What was not committed is gone."""
        self._db.close()
        self._lock.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes inside become durable together when the block ends, or none does (LedgerError, or the block's own
        exception)."""
        if self._draft is not None:
            raise LedgerError("a transaction is already open", where=str(self._path))
        if self._stale:
            self._reload()
        self._draft = Draft()
        try:
            yield
            if not self._draft.empty:
                began = time.monotonic()
                with guarded(self._path):
                    self._draft.write(self._db)
                self.commits, self.commit_s = self.commits + 1, self.commit_s + time.monotonic() - began
                for ordinal in {s.group for s, r in self._draft.samples.items() if not r.live}:
                    if ordinal in self._book.members:
                        self._book.forget_settled(ordinal)
        except BaseException:
            if not self._draft.empty:
                self._stale = True
                with suppress(LedgerError):  # then the next transaction tries again
                    self._reload()
            raise
        finally:
            self._draft = None

    # Samples

    def admit(self, group: GroupRow, members: int) -> None:
        """Add a group at the frontier with `members` PENDING samples."""
        if group.ordinal != self._book.frontier:
            raise LedgerError("groups are admitted in order", got=group.ordinal, expected=str(self._book.frontier))
        draft = self._open
        draft.groups[group.ordinal] = group
        ids = tuple(SampleId(group.ordinal, m) for m in range(members))
        self._book.add_group(group, ids)
        for sample in ids:
            self._put(SampleRow(*sample))

    def lease(self, sample: SampleId, *, replica: str, replica_epoch: int, seq: int) -> SampleRow:
        """Give a PENDING or SUSPENDED sample to a replica under a new lease epoch."""
        row = self._row(sample)
        if row.state not in LEASABLE:
            raise LedgerError(f"sample {sample} cannot be leased", got=row.state, expected="PENDING or SUSPENDED")
        return self._put(
            row._replace(
                state="LEASED", epoch=row.epoch + 1, replica=replica, replica_epoch=replica_epoch, lease_seq=seq,
                lease_length=row.length,
            )
        )  # fmt: skip

    def append(
        self, append: Append, *, replica: str, replica_epoch: int, finish: FinishReason | None = None
    ) -> Outcome:
        """Journal tokens. Kept only if the lease is this replica's, its epoch is the append's and `start` is the length;
        otherwise they are counted as generated and wasted(outcome). `finish` overrides the append's own word."""
        n = len(append.tokens)
        if len(append.logprobs) != n:
            raise LedgerError("an append needs one logprob a token", got=len(append.logprobs), expected=str(n))
        row = self._book.samples.get(append.sample)
        held = row is not None and row.state == "LEASED" and row.epoch == append.epoch
        if row is None or not held or (row.replica, row.replica_epoch) != (replica, replica_epoch):
            self.refuse("zombie", n)
            return "zombie"
        if append.start != row.length:
            outcome: Outcome = "duplicate" if append.start + n <= row.length else "gap"
            self.refuse(outcome, n)
            return outcome
        ended = finish or append.finished
        changes: dict[str, object] = {"length": row.length + n}
        if n:
            version = append.version
            self.count("generated", n)
            self._open.segments.setdefault(append.sample, []).append(
                (
                    *append.sample,
                    row.length,
                    row.epoch,
                    version,
                    pack_tokens(append.tokens),
                    pack_logprobs(append.logprobs),
                )
            )
            changes["hops"] = 0
            changes["oldest"] = version if row.oldest is None else min(row.oldest, version)
            changes["newest"] = version if row.newest is None else max(row.newest, version)
        if ended:
            changes |= {"state": "DONE", "finish": ended}
        self._put(row._replace(**changes), advanced=not ended)  # type: ignore[arg-type]
        return "ok"

    def refuse(self, reason: str, tokens: int) -> None:
        """Count tokens that arrived and are not journalled."""
        self.count("generated", tokens)
        self.waste(reason, tokens)

    def suspend(self, sample: SampleId, *, counts: bool) -> SampleRow:
        """End a lease; the sample keeps its tokens and may go on elsewhere. `counts`: a lease that ended so without a new
        token is a failed hop, and the third in a row makes the sample a dead letter."""
        row = self._row(sample)
        if row.state != "LEASED":
            raise LedgerError(f"sample {sample} is not leased", got=row.state)
        hops = 0 if row.length > row.lease_length else row.hops + int(counts)
        row = self._put(row._replace(state="SUSPENDED", hops=hops))
        return self.kill(sample, "no_progress") if hops >= MAX_HOPS else row

    def reward(self, sample: SampleId, value: float) -> None:
        """Record the reward of a DONE sample; a second word is ignored."""
        row = self._book.samples.get(sample)
        if row is not None and row.state == "DONE" and row.reward is None:
            self._put(row._replace(reward=value))

    def kill(self, sample: SampleId, reason: str) -> SampleRow:
        """Give a sample up: its tokens become wasted(reason). RESERVED and APPLIED samples cannot be given up."""
        row = self._row(sample)
        if row.state in ("RESERVED", "APPLIED"):
            raise LedgerError(f"sample {sample} belongs to a step", got=row.state)
        if row.state == "DEAD_LETTER":
            return row
        self.waste(reason, row.length)
        self._open.segments.pop(sample, None)
        self._open.prune_dead.append(sample)
        return self._put(row._replace(state="DEAD_LETTER", reason=reason))

    def give_up(self, ordinal: int, reason: str) -> None:
        """Give up what is left of a group; its slot goes to the next group admitted."""
        for row in self._book.alive(ordinal):
            self.kill(row.id, reason)
        self.count("given_up", 1)

    # Steps

    def reserve(
        self, step: int, ids: Sequence[SampleId], *, eta: int, weights: Mapping[SampleId, Sequence[float]]
    ) -> StepRow:
        """RESERVE(step, ids): the batch is fixed, and so is the weight of every token (1.0 trained, 0.0 masked)."""
        if step in self._book.reserved or step < self._book.applied:
            raise LedgerError(f"step {step} is already reserved or applied")
        ids = tuple(sorted(ids))
        for sample in ids:
            row = self._row(sample)
            if row.state != "DONE" or row.reward is None:
                raise LedgerError(f"sample {sample} cannot be reserved", got=row.state, expected="DONE with a reward")
            trained = weights[sample].count(1.0)
            self._put(row._replace(state="RESERVED", step=step, trained=trained, masked=row.length - trained))
        row_ = StepRow(
            step=step, state="RESERVED", lineage=self.lineage, ids_hash=hash_ids(step, ids), ids=ids, eta=eta
        )
        return self._put_step(row_)

    def apply(self, step: int, *, figures: Mapping[str, object], metrics: Mapping[str, object]) -> StepRow:
        """APPLIED(step): it is made; in a complete checkpoint, or within `keep_steps` in one. Only the lowest reserved step can be
        applied."""
        row = self._book.reserved.get(step)
        if row is None or step != self._book.applied:
            raise LedgerError(f"step {step} is not the next to apply", got=self._book.applied)
        for sample in row.ids:
            self._put(self._row(sample)._replace(state="APPLIED"))
        self._open.prune_steps_below = step + 1 - self.keep_steps
        done = replace(row, state="APPLIED", lineage=self.lineage, figures=dict(figures), metrics=dict(metrics))
        return self._put_step(done)

    def fork(self, step: int) -> None:
        """Checkpoints of `step` and later are lost: reserve those steps again with the same samples, in a new lineage.
        LedgerError when their tokens are no longer kept. A transaction of its own."""
        if step < self._book.applied - self.keep_steps:
            raise LedgerError(
                f"no usable checkpoint holds step {step}, and its tokens are no longer kept",
                where=str(self._path),
                got=f"{self._book.applied} steps applied",
                expected=f"a checkpoint of step {self._book.applied - self.keep_steps - 1} or later",
                hint="bring the checkpoint folder back, or start a new run from the exported weights",
            )
        with guarded(self._path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute("UPDATE samples SET state = 'RESERVED' WHERE step >= ? AND state = 'APPLIED'", (step,))
                self._db.execute("UPDATE steps SET state = 'RESERVED', figures = '{}' WHERE step >= ?", (step,))
                self._db.execute("INSERT OR REPLACE INTO meta VALUES ('lineage', ?)", (str(self.lineage + 1),))
                self._db.execute("DELETE FROM meta WHERE key IN ('published', 'stored')")
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
        self._reload()

    def trajectories(self, ids: Sequence[SampleId]) -> Mapping[SampleId, Trajectory]:
        """Tokens, logprobs and versions of samples, what this transaction appended included."""
        with guarded(self._path):
            return self._journal().read(ids)

    def tokens(self, sample: SampleId) -> tuple[int, ...]:
        """Response tokens so far."""
        with guarded(self._path):
            return self._journal().tokens(sample)

    def step_rows(self, last: int) -> tuple[StepRow, ...]:
        """The newest `last` applied steps, oldest first."""
        with guarded(self._path):
            return self._journal().steps(last)

    def last_steps(self, count: int) -> tuple[tuple[Mapping[str, object], ...], Mapping[str, object]]:
        """Figures of the newest `count` applied steps, oldest first, and metrics of the newest ({} before the first)."""
        with guarded(self._path):
            return self._journal().last(count)

    # Everything else that must survive

    @property
    def lineage(self) -> int:
        """The line of descent of the weights now trained."""
        return int(self._book.meta.get("lineage", "0"))

    @property
    def published(self) -> WeightsRef | None:
        """The newest generation of this lineage that the trainer published."""
        version = self._book.meta.get("published")
        return None if version is None else self._book.generations[self.lineage, int(version)]

    @property
    def stored(self) -> WeightsRef | None:
        """The newest of them that is on disk: it may be older than `published`, which engines got directly."""
        version = self._book.meta.get("stored", self._book.meta.get("published"))
        return None if version is None or version == "none" else self._book.generations[self.lineage, int(version)]

    def publish(self, ref: WeightsRef, *, stored: bool = True) -> None:
        """Record a published generation of the current lineage, or that one published before is on disk now."""
        newest, kept = self.published, self.stored
        if newest is None or ref.version >= newest.version:
            self._open.generations.append(ref)
            self._book.add_generation(ref)
            self.set_meta("published", str(ref.version))
        if stored:
            kept = ref if kept is None or ref.version >= kept.version else kept
        self.set_meta("stored", "none" if kept is None else str(kept.version))

    def set_meta(self, key: str, value: str) -> None:
        """Remember `value` under `key`."""
        self._open.meta[key] = value
        self._book.meta[key] = value

    def count(self, counter: str, n: int) -> None:
        """Add to a counter."""
        if n:
            self._open.counters[counter] += n
            self._book.counters[counter] += n

    def waste(self, reason: str, tokens: int) -> None:
        """Count wasted tokens. A reason is remembered even when no token was lost."""
        self._open.wasted[reason] += tokens
        self._book.wasted[reason] += tokens

    def set_replica(self, row: ReplicaRow) -> None:
        """Insert or replace what is remembered of a replica incarnation."""
        self._open.replicas[row.replica, row.epoch] = row
        self._book.replicas[row.replica, row.epoch] = row

    # Private

    @property
    def _open(self) -> Draft:
        if self._draft is None:
            raise LedgerError("the ledger is changed only inside a transaction", where=str(self._path))
        return self._draft

    def _row(self, sample: SampleId) -> SampleRow:
        row = self._book.samples.get(sample)
        if row is None:
            raise LedgerError(f"sample {sample} is not live", where=str(self._path))
        return row

    def _put(self, row: SampleRow, *, advanced: bool = False) -> SampleRow:
        self._open.put(row, advanced=advanced)
        self._book.put(row)
        return row

    def _put_step(self, row: StepRow) -> StepRow:
        self._open.steps[row.step] = row
        if row.state == "RESERVED":
            self._book.reserved[row.step] = row
        else:
            self._book.reserved.pop(row.step, None)
            self._book.applied = row.step + 1
        return row

    def _journal(self) -> Journal:
        return Journal(self._db, self._draft.segments if self._draft is not None else {})

    def _reload(self) -> None:
        with guarded(self._path):
            self._book = load_book(self._db)
        self._stale = False
