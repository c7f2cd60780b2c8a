"""The ledger's live rows in memory, with the indexes that dispatch and selection need. Rebuilt from the file on open."""

import bisect
import json
import sqlite3
from collections import Counter
from collections.abc import Iterator

from runtime.rl.arrays import unpack_tokens
from runtime.rl.ledger.rows import LEASABLE, TERMINAL, GroupRow, ReplicaRow, SampleRow, StepRow
from runtime.rl.types import SampleId, WeightsRef

_SAMPLE_COLUMNS = (
    "grp, member, state, epoch, replica, replica_epoch, lease_seq, lease_length, length, hops, finish, reward, step,"
    " reason, trained, masked, oldest, newest"
)


class Book:
    """Live groups with all their samples, totals of everything else. Changed only through `put` and the ledger."""

    def __init__(self) -> None:
        self.samples: dict[SampleId, SampleRow] = {}
        self.groups: dict[int, GroupRow] = {}
        self.members: dict[int, tuple[SampleId, ...]] = {}
        self.leasable: list[SampleId] = []  # sorted
        self.held: dict[tuple[str, int], set[SampleId]] = {}
        self.unrewarded: set[SampleId] = set()  # DONE without a reward
        self.complete: list[int] = []  # sorted ordinals of groups the trainer may take
        self.states: Counter[str] = Counter()
        self.in_flight = 0
        self.trained = 0
        self.masked = 0
        self.frontier = 0  # next ordinal to admit
        self.counters: Counter[str] = Counter()
        self.wasted: Counter[str] = Counter()
        self.meta: dict[str, str] = {}
        self.reserved: dict[int, StepRow] = {}
        self.applied = 0  # steps applied: 0 .. applied - 1
        self.replicas: dict[tuple[str, int], ReplicaRow] = {}
        self.generations: dict[tuple[int, int], WeightsRef] = {}
        self.digests: dict[int, set[str]] = {}  # hashes a version was published with, over all lineages

    @property
    def next_slot(self) -> int:
        """Slot of the next group admitted."""
        return self.frontier - self.counters["given_up"]

    def generated_accounted(self) -> int:
        """Tokens by where they are; always the generated ones."""
        return self.trained + self.masked + self.in_flight + sum(self.wasted.values())

    def put(self, row: SampleRow) -> None:
        """Insert or replace a sample and keep every index and total true."""
        sample = row.id
        old = self.samples.get(sample)
        self.samples[sample] = row
        if row.state not in TERMINAL:
            self.in_flight += row.length
        if old is not None:
            if old.state not in TERMINAL:
                self.in_flight -= old.length
            if (old.state, old.reward, old.replica_epoch) == (row.state, row.reward, row.replica_epoch):
                return
            self._forget(old, sample)
        self.states[row.state] += 1
        if row.state in LEASABLE:
            bisect.insort(self.leasable, sample)
        elif row.state == "LEASED":
            self.held.setdefault((row.replica, row.replica_epoch), set()).add(sample)
        elif row.state == "DONE" and row.reward is None:
            self.unrewarded.add(sample)
        elif row.state == "APPLIED":
            self.trained += row.trained
            self.masked += row.masked
        self._recount(row.group)

    def add_group(self, group: GroupRow, members: tuple[SampleId, ...]) -> None:
        """A newly admitted group; its samples are `put` next."""
        self.groups[group.ordinal] = group
        self.members[group.ordinal] = members
        self.frontier = max(self.frontier, group.ordinal + 1)

    def add_generation(self, ref: WeightsRef) -> None:
        """A published generation."""
        self.generations[ref.lineage, ref.version] = ref
        self.digests.setdefault(ref.version, set()).add(ref.digest)

    def forget_settled(self, ordinal: int) -> bool:
        """Drop a group whose samples are all applied or dead from memory. Totals stay."""
        if any(self.samples[m].live for m in self.members[ordinal]):
            return False
        for m in self.members.pop(ordinal):
            del self.samples[m]
        del self.groups[ordinal]
        return True

    def is_complete(self, ordinal: int) -> bool:
        """Whether the trainer may take the group."""
        i = bisect.bisect_left(self.complete, ordinal)
        return i < len(self.complete) and self.complete[i] == ordinal

    def alive(self, ordinal: int) -> tuple[SampleRow, ...]:
        """Samples of a live group that are not dead."""
        return tuple(r for m in self.members[ordinal] if (r := self.samples[m]).state != "DEAD_LETTER")

    def started(self, ordinal: int) -> int | None:
        """Lowest version among a group's tokens; None when it has none."""
        versions = [r.oldest for m in self.members[ordinal] if (r := self.samples[m]).oldest is not None and r.live]
        return min((v for v in versions if v is not None), default=None)

    def selectable(self) -> Iterator[int]:
        """Ordinals of live groups that are not in a reserved step."""
        for ordinal, members in self.members.items():
            states = {self.samples[m].state for m in members}
            if not states <= TERMINAL and "RESERVED" not in states:
                yield ordinal

    def _forget(self, old: SampleRow, sample: SampleId) -> None:
        self.states[old.state] -= 1
        if old.state in LEASABLE:
            i = bisect.bisect_left(self.leasable, sample)
            del self.leasable[i]
        elif old.state == "LEASED":
            key = (old.replica, old.replica_epoch)
            self.held[key].discard(sample)
            if not self.held[key]:
                del self.held[key]
        elif old.state == "DONE":
            self.unrewarded.discard(sample)
        elif old.state == "APPLIED":
            self.trained -= old.trained
            self.masked -= old.masked

    def _recount(self, ordinal: int) -> None:
        ready = self._ready(ordinal)
        i = bisect.bisect_left(self.complete, ordinal)
        present = i < len(self.complete) and self.complete[i] == ordinal
        if ready and not present:
            self.complete.insert(i, ordinal)
        elif present and not ready:
            del self.complete[i]

    def _ready(self, ordinal: int) -> bool:
        """Whether all that live of a group are rewarded, and there are two at least. Asked at every change of a sample, and
        mostly the first that is looked at says no."""
        alive = 0
        for member in self.members[ordinal]:
            row = self.samples.get(member)
            if row is None or row.state != "DONE" or row.reward is None:
                if row is None or row.state != "DEAD_LETTER":
                    return False
            else:
                alive += 1
        return alive >= 2


def load_book(db: sqlite3.Connection) -> Book:
    """Read the whole book from the file: live groups in full, the rest as totals."""
    book = Book()
    book.meta.update(db.execute("SELECT key, value FROM meta"))
    book.counters.update(dict(db.execute("SELECT name, value FROM counters")))
    book.wasted.update(dict(db.execute("SELECT reason, tokens FROM wasted")))
    for lineage, version, path, digest in db.execute("SELECT lineage, version, path, digest FROM generations"):
        book.add_generation(WeightsRef(lineage=lineage, version=version, path=path, digest=digest))
    for replica, epoch, seq, received, order, forgotten, counted in db.execute("SELECT * FROM replicas"):
        book.replicas[replica, epoch] = ReplicaRow(
            replica=replica,
            epoch=epoch,
            seq=seq,
            received=received,
            order=order,
            forgotten=bool(forgotten),
            counted=bool(counted),
        )
    (book.applied,) = db.execute("SELECT COUNT(*) FROM steps WHERE state = 'APPLIED'").fetchone()
    for row in db.execute("SELECT * FROM steps WHERE state = 'RESERVED'"):
        step = step_row(row)
        book.reserved[step.step] = step
    live = {g for (g,) in db.execute("SELECT DISTINCT grp FROM samples WHERE state NOT IN ('APPLIED', 'DEAD_LETTER')")}
    rows: dict[int, list[SampleRow]] = {g: [] for g in sorted(live)}
    for raw in db.execute(
        f"SELECT {_SAMPLE_COLUMNS} FROM samples WHERE grp IN"
        " (SELECT grp FROM samples WHERE state NOT IN ('APPLIED', 'DEAD_LETTER'))"
    ):
        sample = SampleRow(*raw)
        rows[sample.group].append(sample)
    for ordinal, samples in rows.items():
        raw = db.execute(
            "SELECT ordinal, slot, prompt_tokens, prompt, answer FROM groups WHERE ordinal = ?", (ordinal,)
        ).fetchone()
        book.add_group(group_row(raw), tuple(s.id for s in samples))
        for sample in samples:
            book.put(sample)
    _load_totals(db, book)
    return book


def _load_totals(db: sqlite3.Connection, book: Book) -> None:
    """Totals over all rows, replacing what the live rows alone gave."""
    book.states.clear()
    book.states.update(dict(db.execute("SELECT state, COUNT(*) FROM samples GROUP BY state")))
    book.trained, book.masked = db.execute(
        "SELECT COALESCE(SUM(trained), 0), COALESCE(SUM(masked), 0) FROM samples WHERE state = 'APPLIED'"
    ).fetchone()
    (frontier,) = db.execute("SELECT COALESCE(MAX(ordinal) + 1, 0) FROM groups").fetchone()
    book.frontier = frontier


def group_row(raw: tuple[int, int, bytes, str, str]) -> GroupRow:
    """A row of `groups`."""
    ordinal, slot, tokens, prompt, answer = raw
    return GroupRow(ordinal=ordinal, slot=slot, prompt_tokens=unpack_tokens(tokens), prompt=prompt, answer=answer)


def step_row(raw: tuple[int, str, int, str, str, int, str, str]) -> StepRow:
    """A row of `steps`."""
    step, state, lineage, ids_hash, ids, eta, figures, metrics = raw
    return StepRow(
        step=step,
        state="APPLIED" if state == "APPLIED" else "RESERVED",
        lineage=lineage,
        ids_hash=ids_hash,
        ids=tuple(SampleId(g, m) for g, m in json.loads(ids)),
        eta=eta,
        figures=json.loads(figures),
        metrics=json.loads(metrics),
    )
