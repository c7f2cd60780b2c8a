"""The ledger: hand-made histories, damage to the file, a process that is killed."""

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.errors import LedgerError
from runtime.rl.ledger import KEEP_STEPS, MAX_HOPS, GroupRow, Ledger, ReplicaRow, Span, audit, hash_ids
from runtime.rl.types import Append, FinishReason, SampleId, WeightsRef


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.db"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    made = Ledger(path)
    yield made
    made.close()


def admit(ledger: Ledger, n: int = 1, members: int = 2) -> None:
    with ledger.transaction():
        for _ in range(n):
            ordinal = ledger.book.frontier
            group = GroupRow(
                ordinal=ordinal, slot=ledger.book.next_slot, prompt_tokens=(5, 6), prompt="12=", answer="12"
            )
            ledger.admit(group, members)


def lease(ledger: Ledger, sample: SampleId, replica: str = "a") -> int:
    with ledger.transaction():
        return ledger.lease(sample, replica=replica, replica_epoch=1, seq=1).epoch


def append(
    ledger: Ledger,
    sample: SampleId,
    tokens: Sequence[int],
    *,
    start: int = 0,
    epoch: int = 1,
    version: int = 0,
    finished: FinishReason | None = None,
    replica: str = "a",
) -> str:
    with ledger.transaction():
        a = Append(
            sample=sample, epoch=epoch, start=start, tokens=tuple(tokens), logprobs=tuple(-t / 10 for t in tokens),
            version=version, finished=finished,
        )  # fmt: skip
        return ledger.append(a, replica=replica, replica_epoch=1)


def done(ledger: Ledger, ordinal: int, *, version: int = 0, members: int = 2, tokens: int = 3) -> None:
    for m in range(members):
        sample = SampleId(ordinal, m)
        epoch = lease(ledger, sample)
        append(ledger, sample, range(1, tokens + 1), epoch=epoch, version=version, finished="eos")
        with ledger.transaction():
            ledger.reward(sample, float(m))


def train(ledger: Ledger, step: int, ordinal: int) -> None:
    ids = tuple(r.id for r in ledger.book.alive(ordinal))
    weights = {s: [1.0] * ledger.book.samples[s].length for s in ids}
    with ledger.transaction():
        ledger.reserve(step, ids, eta=4, weights=weights)
    with ledger.transaction():
        ledger.apply(step, figures={}, metrics={"loss": 0.5})


def whole(ledger: Ledger) -> None:
    found = audit(ledger.path)
    assert found.faults == ()
    assert found.balanced


def test_a_sample_through_two_replicas_and_two_versions(ledger: Ledger) -> None:
    admit(ledger)
    s = SampleId(0, 0)
    lease(ledger, s, "a")
    assert append(ledger, s, [1, 2]) == "ok"
    assert append(ledger, s, [3], start=2, version=1) == "ok"
    with ledger.transaction():
        ledger.suspend(s, counts=True)
    assert lease(ledger, s, "b") == 2
    assert append(ledger, s, [9], start=3) == "zombie", "the old holder, with the old epoch"
    assert append(ledger, s, [9], start=3, epoch=2) == "zombie", "the old holder, guessing the epoch"
    assert append(ledger, s, [3], start=2, epoch=2, replica="b") == "duplicate"
    assert append(ledger, s, [5], start=4, epoch=2, replica="b") == "gap"
    assert append(ledger, s, [4], start=3, epoch=2, version=1, replica="b", finished="eos") == "ok"
    t = ledger.trajectories([s])[s]
    assert t.tokens == (1, 2, 3, 4)
    assert t.versions == (0, 0, 1, 1)
    assert t.logprobs == (-0.1, -0.2, -0.3, -0.4)
    assert t.spans == (
        Span(start=0, length=2, version=0, epoch=1),
        Span(start=2, length=1, version=1, epoch=1),
        Span(start=3, length=1, version=1, epoch=2),
    )
    found = audit(ledger.path)
    assert (found.generated, found.in_flight, found.wasted) == (8, 4, {"zombie": 2, "duplicate": 1, "gap": 1})
    whole(ledger)


def test_only_leases_without_progress_lead_to_a_dead_letter(ledger: Ledger) -> None:
    admit(ledger)
    s, t = SampleId(0, 0), SampleId(0, 1)
    for hop in range(10):
        epoch = lease(ledger, s)
        append(ledger, s, [1], start=hop, epoch=epoch)
        with ledger.transaction():
            assert ledger.suspend(s, counts=True).state == "SUSPENDED"
    for _ in range(10):
        lease(ledger, t)
        with ledger.transaction():
            assert ledger.suspend(t, counts=False).state == "SUSPENDED", "given back in good order"
    for hop in range(MAX_HOPS):
        lease(ledger, s)
        with ledger.transaction():
            state = ledger.suspend(s, counts=True).state
        assert state == ("DEAD_LETTER" if hop == MAX_HOPS - 1 else "SUSPENDED")
    found = audit(ledger.path)
    assert found.wasted == {"no_progress": 10}
    assert found.samples["DEAD_LETTER"] == 1
    whole(ledger)


def test_the_batch_hash_depends_on_step_and_ids_alone() -> None:
    ids = [SampleId(1, 0), SampleId(0, 1)]
    assert hash_ids(3, ids) == hash_ids(3, reversed(ids))
    assert len({hash_ids(3, ids), hash_ids(4, ids), hash_ids(3, ids[:1]), hash_ids(3, [SampleId(10, 1)])}) == 4


def test_what_a_step_may_not_do(ledger: Ledger) -> None:
    admit(ledger, 2)
    done(ledger, 0)
    ids = (SampleId(0, 0), SampleId(0, 1))
    weights = {s: [1.0, 0.0, 1.0] for s in ids}

    def reserve(step: int, which: tuple[SampleId, ...]) -> None:
        with ledger.transaction():
            ledger.reserve(step, which, eta=0, weights={**weights, SampleId(1, 0): []})

    def apply(step: int) -> None:
        with ledger.transaction():
            ledger.apply(step, figures={}, metrics={})

    with pytest.raises(LedgerError, match="PENDING"):
        reserve(0, (*ids, SampleId(1, 0)))
    reserve(0, ids)
    with pytest.raises(LedgerError, match="already reserved"):
        reserve(0, ids)
    with pytest.raises(LedgerError, match="RESERVED"):
        reserve(1, ids)
    with pytest.raises(LedgerError, match="not the next"):
        apply(1)
    apply(0)
    with pytest.raises(LedgerError):
        apply(0)
    found = audit(ledger.path)
    assert (found.trained, found.masked) == (4, 2)
    whole(ledger)


def test_a_given_up_group_leaves_its_slot_to_the_next(ledger: Ledger) -> None:
    admit(ledger, 3)
    lease(ledger, SampleId(1, 0))
    append(ledger, SampleId(1, 0), [1, 2])
    with ledger.transaction():
        ledger.give_up(1, "stale")
    assert ledger.book.next_slot == 2
    admit(ledger)
    assert ledger.book.groups[3].slot == 2
    assert audit(ledger.path).wasted == {"stale": 2}
    whole(ledger)


def test_tokens_of_old_steps_are_dropped_and_the_sums_stay(ledger: Ledger, path: Path) -> None:
    for step in range(KEEP_STEPS + 3):
        admit(ledger)
        done(ledger, step)
        train(ledger, step, step)
    db = sqlite3.connect(path)
    kept = [g for (g,) in db.execute("SELECT DISTINCT grp FROM segments ORDER BY grp")]
    db.close()
    assert kept == list(range(3, KEEP_STEPS + 3))
    before = audit(path)
    assert before.trained == 6 * (KEEP_STEPS + 3)
    ledger.close()
    again = Ledger(path)
    assert (again.book.trained, again.book.counters["generated"]) == (before.trained, before.generated)
    assert [r.metrics for r in again.step_rows(2)] == [{"loss": 0.5}] * 2
    whole(again)
    again.close()


def test_a_ledger_told_to_keep_more_steps_takes_more_back(path: Path) -> None:
    ledger = Ledger(path, keep_steps=2 * KEEP_STEPS)
    for step in range(2 * KEEP_STEPS + 1):
        admit(ledger)
        done(ledger, step)
        train(ledger, step, step)
    with pytest.raises(LedgerError, match="no longer kept"):
        ledger.fork(0)
    ledger.fork(1)
    assert sorted(ledger.book.reserved) == list(range(1, 2 * KEEP_STEPS + 1))
    row = ledger.book.reserved[1]
    assert ledger.trajectories(row.ids)[row.ids[0]].tokens == (1, 2, 3)
    whole(ledger)
    ledger.close()


def test_a_fork_takes_back_what_is_still_kept_and_nothing_else(ledger: Ledger) -> None:
    for step in range(KEEP_STEPS + 2):
        admit(ledger)
        done(ledger, step)
        train(ledger, step, step)
    with ledger.transaction():
        ledger.publish(WeightsRef(lineage=0, version=KEEP_STEPS + 2, path="w", digest="d"))
    with pytest.raises(LedgerError, match="no longer kept"):
        ledger.fork(1)
    ledger.fork(2)
    assert (ledger.lineage, ledger.book.applied, sorted(ledger.book.reserved)) == (1, 2, list(range(2, KEEP_STEPS + 2)))
    assert ledger.published is None
    whole(ledger)
    row = ledger.book.reserved[2]
    assert ledger.trajectories(row.ids)[row.ids[0]].tokens == (1, 2, 3)
    with ledger.transaction():
        ledger.apply(2, figures={}, metrics={})
    assert ledger.book.applied == 3
    whole(ledger)


def test_memory_of_replicas_and_generations_survives(ledger: Ledger, path: Path) -> None:
    ref = WeightsRef(lineage=0, version=3, path="w3", digest="d3")
    with ledger.transaction():
        ledger.set_replica(ReplicaRow(replica="a", epoch=2, seq=7, received=99, order="drain"))
        ledger.publish(ref)
        ledger.count("redone", 4)
    ledger.close()
    again = Ledger(path)
    assert again.published == ref
    assert again.book.replicas["a", 2] == ReplicaRow(replica="a", epoch=2, seq=7, received=99, order="drain")
    assert again.book.counters["redone"] == 4
    again.close()


def test_a_write_that_fails_half_way_leaves_nothing_behind(ledger: Ledger, path: Path) -> None:
    """The rows before the one that SQLite refuses were already written in the transaction."""
    admit(ledger)
    refused: Any = object()

    def write() -> None:
        with ledger.transaction():
            ledger.lease(SampleId(0, 0), replica="a", replica_epoch=1, seq=1)
            ledger.set_meta("k", refused)

    with pytest.raises(LedgerError):
        write()
    assert ledger.book.states["LEASED"] == 0
    assert "k" not in ledger.book.meta
    ledger.close()
    again = Ledger(path)
    assert again.book.states["LEASED"] == 0
    whole(again)
    again.close()


def test_nothing_is_written_outside_a_transaction_or_in_two_at_once(ledger: Ledger) -> None:
    with pytest.raises(LedgerError, match="inside a transaction"):
        ledger.count("redone", 1)

    def nested() -> None:
        with ledger.transaction(), ledger.transaction():
            pass

    with pytest.raises(LedgerError, match="already open"):
        nested()


def test_a_ledger_has_one_writer(ledger: Ledger, path: Path) -> None:
    with pytest.raises(LedgerError, match="another process writes this ledger"):
        Ledger(path)
    ledger.close()
    Ledger(path).close()


def test_files_that_cannot_be_a_ledger(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(b"not a database, but long enough to have a header" * 100)
    with pytest.raises(LedgerError, match="not a database"):
        Ledger(garbage)
    with pytest.raises(LedgerError, match="hint"):
        Ledger(tmp_path / "no" / "such" / "folder.db")
    old = tmp_path / "old.db"
    db = sqlite3.connect(old)
    db.execute("PRAGMA user_version=99")
    db.close()
    with pytest.raises(LedgerError, match="another version of hexctl"):
        Ledger(old)


_WRITER = """
import sys
from pathlib import Path
from runtime.rl.ledger import GroupRow, Ledger
from runtime.rl.types import Append, SampleId

ledger = Ledger(Path(sys.argv[1]))
with ledger.transaction():
    ledger.admit(GroupRow(ordinal=0, slot=0, prompt_tokens=(1,), prompt="", answer=""), 2)
    ledger.lease(SampleId(0, 0), replica="a", replica_epoch=1, seq=1)
n = 0
while True:
    with ledger.transaction():
        append = Append(sample=SampleId(0, 0), epoch=1, start=n, tokens=(n, n + 1), logprobs=(0.0, 0.0), version=0)
        assert ledger.append(append, replica="a", replica_epoch=1) == "ok"
    n += 2
    print(n, flush=True)
"""


@pytest.mark.kill
def test_everything_acknowledged_is_there_after_kill_9(path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    acknowledged = 0
    while acknowledged < 60:
        acknowledged = int(writer.stdout.readline())
    os.kill(writer.pid, signal.SIGKILL)
    acknowledged = int(([str(acknowledged), *writer.stdout.read().split()])[-1])
    writer.wait(60)
    writer.stdout.close()
    ledger = Ledger(path)
    tokens = ledger.tokens(SampleId(0, 0))
    assert tokens == tuple(range(len(tokens)))
    assert len(tokens) in (acknowledged, acknowledged + 2)
    whole(ledger)
    ledger.close()


_LIMITED = """
import resource, signal, sys
from pathlib import Path
from runtime.errors import LedgerError
from runtime.rl.ledger import GroupRow, Ledger
from runtime.rl.types import Append, SampleId

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger(Path(sys.argv[1]))
with ledger.transaction():
    ledger.admit(GroupRow(ordinal=0, slot=0, prompt_tokens=(1,), prompt="", answer=""), 2)
    ledger.lease(SampleId(0, 0), replica="a", replica_epoch=1, seq=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
n, failed = 0, 0
while failed < 3:
    try:
        with ledger.transaction():
            append = Append(sample=SampleId(0, 0), epoch=1, start=n, tokens=(7,) * 500, logprobs=(0.0,) * 500, version=0)
            assert ledger.append(append, replica="a", replica_epoch=1) == "ok"
        n += 500
    except LedgerError as e:
        failed += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
with ledger.transaction():
    append = Append(sample=SampleId(0, 0), epoch=1, start=n, tokens=(7,), logprobs=(0.0,), version=0)
    assert ledger.append(append, replica="a", replica_epoch=1) == "ok"
print(n + 1)
"""


def test_a_file_that_cannot_grow_acknowledges_nothing_and_recovers(path: Path) -> None:
    """Real write errors from the kernel (a file size limit), not from SQLite's own accounting."""
    out = subprocess.run(
        [sys.executable, "-c", _LIMITED, str(path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert out.returncode == 0, out.stderr
    ledger = Ledger(path)
    assert ledger.book.samples[SampleId(0, 0)].length == int(out.stdout)
    whole(ledger)
    ledger.close()
