"""The ledger against a model in memory: random histories with zombies, duplicates, crashes and a full disk.

Invariants: I1 every ordinal below the frontier is in exactly one state; I2 a sample is applied at most once; I3 the journal
never shrinks and never changes; I4 only the lease's epoch appends; I14 the token identity.
"""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runtime.errors import LedgerError
from runtime.rl.ledger import MAX_HOPS, GroupRow, Ledger, ReplicaRow, audit
from runtime.rl.types import Append, SampleId
from tests.rl.flow_world import scratch

MEMBERS = 2
GROUPS_PER_STEP = 1
ETA = 1


@dataclasses.dataclass
class Sample:
    """What must be true of a sample."""

    state: str = "PENDING"
    epoch: int = 0
    replica: str = ""
    tokens: list[tuple[int, float, int]] = dataclasses.field(default_factory=list)  # token, logprob, version
    at_lease: int = 0
    hops: int = 0
    reward: float | None = None
    step: int | None = None


class LedgerMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.context = scratch()
        self.path: Path = self.context.__enter__() / "ledger.db"
        self.ledger = Ledger(self.path)
        self.samples: dict[SampleId, Sample] = {}
        self.generated = 0
        self.wasted: dict[str, int] = {}
        self.steps = 0
        self.reserved: dict[int, tuple[SampleId, ...]] = {}
        self.applied: list[SampleId] = []
        self.drawn = 0

    def teardown(self) -> None:
        if hasattr(self, "context"):
            self.ledger.close()
            self.context.__exit__(None, None, None)

    def pick(self, data: st.DataObject, *states: str) -> SampleId | None:
        fitting = sorted(s for s, x in self.samples.items() if x.state in states)
        return data.draw(st.sampled_from(fitting)) if fitting else None

    def stream(self, n: int, version: int) -> tuple[tuple[int, ...], tuple[float, ...], list[tuple[int, float, int]]]:
        """Tokens never seen before."""
        made = [(self.drawn + i, -1.0 / (1 + self.drawn + i), version) for i in range(n)]
        self.drawn += n
        return tuple(t for t, _, _ in made), tuple(p for _, p, _ in made), made

    def waste(self, reason: str, n: int) -> None:
        self.wasted[reason] = self.wasted.get(reason, 0) + n

    # Samples

    @rule()
    def admit_one(self) -> None:
        self.admit()

    @rule()
    def crash_now(self) -> None:
        self.crash()

    @rule(data=st.data())
    def reserve_one(self, data: Any) -> None:
        self.reserve(data)

    def admit(self) -> None:
        ordinal = len(self.samples) // MEMBERS
        if ordinal < 12:
            with self.ledger.transaction():
                group = GroupRow(ordinal=ordinal, slot=ordinal, prompt_tokens=(1, 2), prompt="p", answer="a")
                self.ledger.admit(group, MEMBERS)
            self.samples.update({SampleId(ordinal, m): Sample() for m in range(MEMBERS)})

    @rule(data=st.data(), replica=st.sampled_from("ab"))
    def lease(self, data: Any, replica: str) -> None:
        sample = self.pick(data, "PENDING", "SUSPENDED")
        if sample is None:
            return
        with self.ledger.transaction():
            row = self.ledger.lease(sample, replica=replica, replica_epoch=1, seq=1)
        x = self.samples[sample]
        x.state, x.epoch, x.replica, x.at_lease = "LEASED", x.epoch + 1, replica, len(x.tokens)
        assert row.epoch == x.epoch
        assert self.ledger.tokens(sample) == tuple(t for t, _, _ in x.tokens)

    @rule(data=st.data(), n=st.integers(0, 3), version=st.integers(0, 5), end=st.booleans())
    def append(self, data: Any, n: int, version: int, end: bool) -> None:
        sample = self.pick(data, "LEASED")
        if sample is None or (n == 0 and not end):
            return
        x = self.samples[sample]
        tokens, logprobs, made = self.stream(n, version)
        append = Append(
            sample=sample, epoch=x.epoch, start=len(x.tokens), tokens=tokens, logprobs=logprobs, version=version,
            finished="eos" if end else None,
        )  # fmt: skip
        with self.ledger.transaction():
            assert self.ledger.append(append, replica=x.replica, replica_epoch=1) == "ok"
        self.generated += n
        x.tokens += made
        x.state = "DONE" if end else "LEASED"
        x.hops = 0 if n else x.hops

    @rule(
        data=st.data(), n=st.integers(1, 3), epoch=st.integers(-2, 1), shift=st.integers(-2, 2),
        replica=st.sampled_from("abz"), incarnation=st.integers(0, 2),
    )  # fmt: skip
    def stray(self, data: Any, *, n: int, epoch: int, shift: int, replica: str, incarnation: int) -> None:
        """Any append at all: zombies, duplicates, gaps, samples that are over or never were."""
        everything = [*sorted(self.samples), SampleId(99, 0)]
        sample = data.draw(st.sampled_from(everything))
        x = self.samples.get(sample, Sample())
        start = max(0, len(x.tokens) + shift)
        tokens, logprobs, made = self.stream(n, 0)
        append = Append(
            sample=sample, epoch=x.epoch + epoch, start=start, tokens=tokens, logprobs=logprobs, version=0
        )  # fmt: skip
        mine = x.state == "LEASED" and epoch == 0 and (replica, incarnation) == (x.replica, 1)
        if not mine:
            expected = "zombie"
        elif start == len(x.tokens):
            expected = "ok"
        else:
            expected = "duplicate" if start + n <= len(x.tokens) else "gap"
        with self.ledger.transaction():
            assert self.ledger.append(append, replica=replica, replica_epoch=incarnation) == expected
        self.generated += n
        if expected == "ok":
            x.tokens += made
            x.hops = 0
        else:
            self.waste(expected, n)

    @rule(data=st.data(), counts=st.booleans())
    def suspend(self, data: Any, counts: bool) -> None:
        sample = self.pick(data, "LEASED")
        if sample is None:
            return
        with self.ledger.transaction():
            row = self.ledger.suspend(sample, counts=counts)
        x = self.samples[sample]
        x.hops = 0 if len(x.tokens) > x.at_lease else x.hops + counts
        x.state = "SUSPENDED"
        if x.hops >= MAX_HOPS:
            x.state = "DEAD_LETTER"
            self.waste("no_progress", len(x.tokens))
        assert row.state == x.state

    @rule(data=st.data(), value=st.floats(0, 1))
    def reward(self, data: Any, value: float) -> None:
        sample = self.pick(data, "DONE")
        if sample is None:
            return
        with self.ledger.transaction():
            self.ledger.reward(sample, value)
        x = self.samples[sample]
        x.reward = value if x.reward is None else x.reward

    @rule(data=st.data(), versions=st.lists(st.integers(0, 5), min_size=1, max_size=3))
    def run_to_the_end(self, data: Any, versions: list[int]) -> None:
        """The lowest group that is not over, all the way to its rewards."""
        unfinished = ("PENDING", "SUSPENDED", "LEASED")
        if not any(x.state in unfinished for x in self.samples.values()):
            self.admit()
        groups = sorted({s.group for s, x in self.samples.items() if x.state in unfinished})
        for sample in self.alive(groups[0]) if groups else []:
            x = self.samples[sample]
            if x.state in ("PENDING", "SUSPENDED"):
                with self.ledger.transaction():
                    self.ledger.lease(sample, replica="a", replica_epoch=1, seq=1)
                x.state, x.epoch, x.replica, x.at_lease = "LEASED", x.epoch + 1, "a", len(x.tokens)
            if x.state == "LEASED":
                with self.ledger.transaction():
                    for i, version in enumerate(versions):
                        tokens, logprobs, made = self.stream(2, version)
                        append = Append(
                            sample=sample, epoch=x.epoch, start=len(x.tokens), tokens=tokens, logprobs=logprobs,
                            version=version, finished="length" if i == len(versions) - 1 else None,
                        )  # fmt: skip
                        assert self.ledger.append(append, replica=x.replica, replica_epoch=1) == "ok"
                        self.generated += 2
                        x.tokens += made
                x.state, x.hops = "DONE", 0
            if x.reward is None:
                with self.ledger.transaction():
                    self.ledger.reward(sample, 0.5)
                x.reward = 0.5

    # Steps

    def reserve(self, data: Any) -> None:
        """Like the trainer desk: the lowest complete groups."""
        del data
        complete = self.complete()[:GROUPS_PER_STEP]
        assert self.ledger.book.complete[:GROUPS_PER_STEP] == complete
        if len(complete) < GROUPS_PER_STEP or self.reserved:
            return
        step = self.steps
        ids = tuple(s for g in complete for s in self.alive(g))
        weights = {s: [float(step - v <= ETA) for _, _, v in self.samples[s].tokens] for s in ids}
        found = self.ledger.trajectories(ids)
        for s in ids:
            t = found[s]
            assert list(zip(t.tokens, t.logprobs, t.versions, strict=True)) == self.samples[s].tokens
        with self.ledger.transaction():
            row = self.ledger.reserve(step, ids, eta=ETA, weights=weights)
        assert row.ids == tuple(sorted(ids))
        self.reserved[step] = row.ids
        for s in ids:
            self.samples[s].state, self.samples[s].step = "RESERVED", step

    @rule(data=st.data(), crash=st.booleans())
    def apply(self, data: Any, crash: bool) -> None:
        self.reserve(data)
        if crash:
            self.crash()
        for step in list(self.reserved):
            with self.ledger.transaction():
                self.ledger.apply(step, figures={}, metrics={})
            for s in self.reserved.pop(step):
                assert s not in self.applied
                self.applied.append(s)
                self.samples[s].state = "APPLIED"
            self.steps += 1

    # Faults

    def crash(self) -> None:
        """kill -9 between two commits: whatever the process knew is gone, its files are as they are."""
        copy = self.path.with_name("copy.db")
        for suffix in ("", "-wal"):
            source = self.path.with_name(self.path.name + suffix)
            if source.exists():
                shutil.copyfile(source, copy.with_name(copy.name + suffix))
        self.ledger.close()
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        for suffix in ("", "-wal"):
            source = copy.with_name(copy.name + suffix)
            if source.exists():
                source.rename(self.path.with_name(self.path.name + suffix))
        self.ledger = Ledger(self.path)

    @rule(data=st.data())
    def full_disk(self, data: Any) -> None:
        """A commit that finds no room acknowledges nothing and changes nothing."""
        sample = self.pick(data, "LEASED")
        if sample is None:
            return
        x = self.samples[sample]
        (pages,) = self.ledger.connection.execute("PRAGMA page_count").fetchone()
        self.ledger.connection.execute(f"PRAGMA max_page_count={pages}")
        n = 20_000
        append = Append(
            sample=sample, epoch=x.epoch, start=len(x.tokens), tokens=(7,) * n, logprobs=(0.0,) * n, version=0
        )

        def flush() -> None:
            with self.ledger.transaction():
                assert self.ledger.append(append, replica=x.replica, replica_epoch=1) == "ok"
                self.ledger.set_replica(ReplicaRow(replica="q", epoch=1, seq=5))

        with pytest.raises(LedgerError, match="full"):
            flush()
        self.ledger.connection.execute("PRAGMA max_page_count=1073741823")
        with self.ledger.transaction():  # the next one starts from what the file holds
            pass
        assert ("q", 1) not in self.ledger.book.replicas

    @rule(data=st.data())
    def failing_caller(self, data: Any) -> None:
        """An exception in the middle of a transaction undoes it."""
        sample = self.pick(data, "PENDING", "SUSPENDED")
        if sample is None:
            return

        def fail() -> None:
            with self.ledger.transaction():
                self.ledger.lease(sample, replica="a", replica_epoch=1, seq=1)
                self.ledger.count("redone", 5)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        with self.ledger.transaction():
            pass

    # Truth

    def alive(self, group: int) -> list[SampleId]:
        return [s for s, x in sorted(self.samples.items()) if s.group == group and x.state != "DEAD_LETTER"]

    def complete(self) -> list[int]:
        def ready(group: int) -> bool:
            alive = [self.samples[s] for s in self.alive(group)]
            return len(alive) >= 2 and all(x.state == "DONE" and x.reward is not None for x in alive)

        return [g for g in sorted({s.group for s in self.samples}) if ready(g)]

    @invariant()
    def agrees_with_the_model(self) -> None:
        if not hasattr(self, "ledger"):
            return
        states: dict[str, int] = {}
        for x in self.samples.values():
            states[x.state] = states.get(x.state, 0) + 1
        book = self.ledger.book
        assert {s: n for s, n in book.states.items() if n} == states
        assert book.frontier == len(self.samples) // MEMBERS
        assert book.counters["generated"] == self.generated
        assert {r: n for r, n in book.wasted.items() if n} == {r: n for r, n in self.wasted.items() if n}
        live = [x for x in self.samples.values() if x.state not in ("APPLIED", "DEAD_LETTER")]
        assert book.in_flight == sum(len(x.tokens) for x in live)
        used = [self.samples[s] for s in self.applied]
        trained = sum(x.step is not None and x.step - v <= ETA for x in used for _, _, v in x.tokens)
        assert book.trained == trained
        assert book.masked == sum(len(x.tokens) for x in used) - trained
        assert book.generated_accounted() == self.generated
        assert book.leasable == sorted(s for s, x in self.samples.items() if x.state in ("PENDING", "SUSPENDED"))
        assert book.applied == self.steps

    @invariant()
    def what_is_shown_of_the_last_steps_is_what_they_say(self) -> None:
        if not hasattr(self, "ledger"):
            return
        rows = self.ledger.step_rows(3)
        figures, metrics = self.ledger.last_steps(3)
        assert figures == tuple(r.figures for r in rows)
        assert metrics == (rows[-1].metrics if rows else {})

    @invariant()
    def trajectories_of_some_samples_are_those_samples_tokens(self) -> None:
        """However many of a group are asked for, in whichever order."""
        if not hasattr(self, "ledger"):
            return
        asked = [s for s in reversed(tuple(self.ledger.book.samples)) if (s.group + s.member) % 3]
        found = self.ledger.trajectories(asked)
        assert list(found) == asked
        assert {s: t.tokens for s, t in found.items()} == {s: self.ledger.tokens(s) for s in asked}

    @invariant()
    def the_file_is_whole(self) -> None:
        if not hasattr(self, "ledger"):
            return
        found = audit(self.path)
        assert found.faults == ()
        assert found.generated == self.generated
        assert found.groups * MEMBERS == sum(found.samples.values())


LedgerMachine.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 3, stateful_step_count=40, deadline=None
)
test_ledger_machine = LedgerMachine.TestCase
