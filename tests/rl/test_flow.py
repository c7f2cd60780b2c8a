"""Flow call by call: who gets what, what is refused, what survives."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from planner.record import replace
from runtime.config.schema import Config
from runtime.errors import ConfigError, LedgerError, RefusedError
from runtime.paths import RunPaths
from runtime.policy.staleness import StalenessPolicy
from runtime.rl.flow import Flow, FlowFiles, FlowSettings, open_flow
from runtime.rl.ledger import Ledger, audit
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.tasks import CopyTask
from runtime.rl.tokenizer import CharTokenizer
from runtime.rl.types import (
    Append,
    Applied,
    CheckpointMark,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    NextBatch,
    RunLimits,
    SampleId,
    TrainerHello,
    TrainerWelcome,
    WeightsRef,
)

EOS = 1
SLOTS = 16


class Desk:
    """A flow with its callers' words ready to hand."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.now, self.changes = folder, 100.0, 0
        self.items: list[RewardItem] = []
        self.settings = FlowSettings(
            **{
                "policy": StalenessPolicy(eta=settings.pop("eta", 1), prompts_per_step=2, stale="mask"),
                "responses_per_prompt": 2,
                "max_new_tokens": 6,
                "lease_s": 15.0,
                **settings,
            }
        )
        self.seqs: dict[tuple[str, int], int] = {}
        self.weights: dict[str, WeightsRef] = {}
        self.flow = self.open()

    def open(self) -> Flow:
        tokenizer = CharTokenizer()
        return Flow(
            settings=self.settings,
            ledger=Ledger(self.folder / "ledger.db"),
            task=CopyTask(tokenizer, seed=3, min_length=2, max_length=2),
            tokenizer=tokenizer,
            rewards=self,
            files=FlowFiles(
                metrics=self.folder / "metrics.jsonl",
                samples=self.folder / "samples.jsonl",
                evaluations=self.folder / "evaluations.jsonl",
            ),
            clock=lambda: self.now,
            wall=lambda: 1e9 + self.now,
            on_change=self.changed,
        )

    def reopen(self) -> None:
        self.flow.close()
        self.flow = self.open()

    def wait(self, seconds: float) -> None:
        """Let time pass as in a run: the host ticks about once a second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.flow.tick()

    def changed(self) -> None:
        self.changes += 1

    def submit(self, items: Sequence[RewardItem]) -> None:
        self.items += items

    def hello(self, epoch: int = 1, complete: tuple[CheckpointMark, ...] = ()) -> TrainerWelcome:
        return self.flow.hello(TrainerHello(trainer="t", epoch=epoch, pid=1, complete=complete))

    def publish(self, version: int, *, digest: str = "", epoch: int = 1, lineage: int = 0) -> WeightsRef:
        ref = WeightsRef(lineage=lineage, version=version, path=f"w{version}", digest=digest or f"d{lineage}.{version}")
        self.flow.published(ref, epoch)
        return ref

    def start(self) -> None:
        self.hello()
        self.publish(0)

    def request(self, replica: str = "a", epoch: int = 1, **changes: Any) -> ExchangeRequest:
        weights = self.weights.get(replica)
        key = (replica, epoch)
        self.seqs[key] = changes.pop("seq", self.seqs.get(key, 0) + 1)
        return ExchangeRequest(
            **{
                "replica": replica,
                "epoch": epoch,
                "seq": self.seqs[key],
                "version": None if weights is None else weights.version,
                "digest": None if weights is None else weights.digest,
                "stats": EngineStats(slots=SLOTS, running=2, decode_tokens_per_s=20.0),
                **changes,
            }
        )

    def exchange(self, replica: str = "a", epoch: int = 1, **changes: Any) -> ExchangeReply:
        reply = self.flow.exchange(self.request(replica, epoch, **changes))
        if reply.weights is not None:
            self.weights[replica] = reply.weights
        return reply

    def serve(self, replica: str = "a", epoch: int = 1) -> tuple[Lease, ...]:
        """Load the weights, then take leases."""
        return self.exchange(replica, epoch).leases + self.exchange(replica, epoch).leases

    def answer(self, reward: float = 1.0) -> None:
        """All verifiers at once."""
        items, self.items = self.items, []
        self.flow.rewarded([RewardResult(sample=i.sample, reward=reward + i.sample.member) for i in items])

    def finish_all(self, leases: Sequence[Lease], version: int, replica: str = "a") -> tuple[Lease, ...]:
        """Answer every lease with two tokens, until a step's worth of groups is complete; returns new leases."""
        reply = self.exchange(replica, appends=tuple(whole(x, version) for x in leases))
        self.answer()
        return reply.leases

    def ask(self, epoch: int = 1) -> NextBatch:
        return self.flow.next_batch("t", epoch)

    def train(self, step: int, epoch: int = 1) -> None:
        answer = self.ask(epoch)
        assert answer.batch is not None, answer
        assert answer.batch.step == step
        self.flow.applied(
            Applied(step=step, ids_hash=answer.batch.ids_hash, trainer_epoch=epoch, metrics={"loss": 2.0})
        )
        self.publish(step + 1, epoch=epoch)


def piece(lease: Lease, tokens: Sequence[int], version: int, start: int | None = None, **changes: Any) -> Append:
    return Append(
        sample=lease.sample, epoch=lease.epoch, start=len(lease.tokens) if start is None else start,
        tokens=tuple(tokens), logprobs=(-0.5,) * len(tokens), version=version, **changes,
    )  # fmt: skip


def whole(lease: Lease, version: int) -> Append:
    return piece(lease, [5, EOS], version, finished="eos")


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.flow.close()


# Who gets work


def test_nobody_gets_work_before_it_reports_published_weights_with_their_hash(desk: Desk) -> None:
    assert desk.exchange().leases == ()
    desk.start()
    first = desk.exchange()
    assert (first.leases, first.weights) == ((), WeightsRef(lineage=0, version=0, path="w0", digest="d0.0"))
    desk.weights["a"] = replace(first.weights or desk.publish(0), digest="half-new")
    assert desk.exchange().leases == ()
    assert not desk.flow.status().replicas[0].verified
    assert "no replica serves verified weights" in desk.flow.status().waits
    desk.weights["a"] = WeightsRef(lineage=0, version=0, path="w0", digest="d0.0")
    assert desk.exchange().leases != ()


def test_a_replica_whose_update_failed_loses_its_samples_and_its_tokens_are_not_trusted(desk: Desk) -> None:
    desk.start()
    leases = desk.serve()
    one = leases[0]
    bad = desk.exchange(digest="half-new", version=0, appends=(piece(one, [5], 0),))
    assert {x.sample for x in leases} <= set(bad.cancel)
    status = desk.flow.status()
    assert status.wasted_tokens == {"unverified": 1}
    assert status.samples_by_state["LEASED"] == 0
    assert desk.exchange("b").leases == ()
    assert {x.sample for x in desk.exchange("b").leases} & {x.sample for x in leases}


def test_eta_zero_gives_a_group_only_to_its_own_version(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eta=0)
    desk.start()
    leases = desk.serve()
    assert {x.sample.group for x in leases} == {0, 1}
    assert desk.finish_all(leases, 0) == ()
    desk.train(0)
    lagging = desk.exchange()
    assert lagging.leases == (), "it reported version 0 in this call"
    desk.weights["a"] = lagging.weights or desk.weights["a"]
    assert {x.sample.group for x in desk.exchange().leases} == {2, 3}


def test_new_replicas_begin_slowly(desk: Desk) -> None:
    desk.start()
    assert len(desk.serve()) == SLOTS // 4


def test_a_stopped_drained_or_superseded_replica_gets_nothing_and_is_told_so(desk: Desk) -> None:
    desk.start()
    leases = desk.serve()
    desk.flow.set_order(1, "a", 1, "drain")
    drain = desk.exchange(appends=(piece(leases[0], [5], 0),))
    assert (drain.order, drain.leases) == ("drain", ())
    released = desk.exchange(released=tuple(x.sample for x in leases))
    assert released.leases == ()
    status = desk.flow.status()
    assert (status.samples_by_state["LEASED"], status.in_flight_tokens) == (0, 1)
    resumed = next(x for x in desk.serve("b") if x.sample == leases[0].sample)
    assert (resumed.tokens, resumed.epoch) == ((5,), 2)
    desk.flow.set_order(1, "b", 2, "serve")
    late = desk.exchange("b", 1, appends=(piece(resumed, [6], 0),))
    assert (late.order, late.ack_seq, late.cancel) == ("stop", 0, (resumed.sample,))
    assert desk.flow.status().wasted_tokens == {"zombie": 1}


def test_being_given_back_in_good_order_is_no_failed_attempt(desk: Desk) -> None:
    desk.start()
    sample = desk.serve()[0].sample
    for _ in range(5):
        desk.flow.set_order(1, "a", 1, "drain")
        desk.exchange(released=tuple(sorted(desk.flow._state.held(desk.flow._state.replicas.get("a", 1)))))  # type: ignore[arg-type]
        desk.flow.set_order(1, "a", 1, "serve")
        assert sample in {x.sample for x in desk.exchange().leases}
    assert desk.flow.status().samples_by_state["DEAD_LETTER"] == 0


def test_a_poison_prompt_becomes_a_dead_letter_and_its_group_goes_on_or_not(tmp_path: Path) -> None:
    desk = Desk(tmp_path, responses_per_prompt=3)
    desk.start()
    leases = {x.sample: x for x in desk.serve()}
    poison = SampleId(0, 0)
    for epoch in range(1, 4):
        assert poison in leases
        desk.flow.forget_replica(1, "a", epoch, 0)
        leases = {x.sample: x for x in desk.serve("a", epoch + 1)}
    status = desk.flow.status()
    assert status.samples_by_state["DEAD_LETTER"] == 4, "all that were held three times without a token"
    assert status.admitted_groups > 2, "a group that is lost leaves its slot to the next"
    assert audit(tmp_path / "ledger.db").faults == ()
    assert poison not in leases


# The journal


def test_a_repeated_flush_is_acknowledged_again_with_the_same_leases_and_not_applied_again(desk: Desk) -> None:
    desk.start()
    desk.exchange()
    request = desk.request()
    first, again = desk.flow.exchange(request), desk.flow.exchange(request)
    assert first.leases == again.leases != ()
    assert first.ack_seq == again.ack_seq == request.seq
    flush = desk.request(appends=(piece(first.leases[0], [5, 6], 0),))
    desk.flow.exchange(flush)
    desk.flow.exchange(flush)
    assert desk.flow.status().generated_tokens == 2
    assert desk.flow.status().wasted_tokens == {}


def test_a_reply_lost_with_flow_itself_is_given_again_by_the_next_flow(desk: Desk) -> None:
    desk.start()
    desk.exchange()
    request = desk.request()
    lost = desk.flow.exchange(request)
    desk.reopen()
    again = desk.flow.exchange(request)
    assert again.leases == lost.leases != ()


def test_flushes_are_applied_in_order(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    seq = desk.seqs["a", 1]
    early = desk.exchange(seq=seq + 2, appends=(piece(lease, [7], 0, start=1),))
    assert early.ack_seq == seq
    assert desk.exchange(seq=seq + 1, appends=(piece(lease, [6], 0),)).ack_seq == seq + 1
    assert desk.exchange(seq=seq + 2, appends=(piece(lease, [7], 0, start=1),)).ack_seq == seq + 2
    assert desk.flow.status().wasted_tokens == {}


def test_a_response_is_over_at_its_last_token_even_if_the_word_for_it_was_lost(desk: Desk) -> None:
    desk.start()
    ends, full, goes_on, *_ = desk.serve()
    desk.exchange(appends=(piece(ends, [5, EOS], 0), piece(full, [5] * 6, 0), piece(goes_on, [5], 0)))
    assert {(i.sample, i.response, i.finish) for i in desk.items} == {
        (ends.sample, "3", "eos"),
        (full.sample, "333333", "length"),
    }


def test_a_gap_takes_the_lease_away(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    reply = desk.exchange(appends=(piece(lease, [5], 0, start=3),))
    assert lease.sample in reply.cancel
    assert lease.sample not in {x.sample for x in reply.leases}, "never in the answer that cancels it"
    assert desk.flow.status().wasted_tokens == {"gap": 1}


def test_a_silent_replica_loses_its_leases_after_the_lease_period(desk: Desk) -> None:
    desk.start()
    leases = desk.serve()
    desk.exchange(appends=(piece(leases[0], [5], 0),))
    desk.wait(14.9)
    assert desk.flow.status().samples_by_state["LEASED"] > 0
    desk.wait(0.2)
    status = desk.flow.status()
    assert (status.samples_by_state["LEASED"], status.in_flight_tokens) == (0, 1)
    woken = desk.exchange(appends=(piece(leases[0], [6], 0, start=1),))
    assert leases[0].sample in woken.cancel
    assert desk.flow.status().wasted_tokens == {"zombie": 1}


def test_a_sample_that_gets_no_token_from_a_lively_replica_goes_on_elsewhere(desk: Desk) -> None:
    desk.start()
    stuck, *others = desk.serve()
    cancelled: set[SampleId] = set()
    for n in range(7):
        desk.wait(10.1)
        appends = tuple(piece(x, [5], 0, start=n) for x in others) if n < 6 else ()
        reply = desk.exchange(appends=appends)
        cancelled |= set(reply.cancel)
        assert not {x.sample for x in reply.leases} & set(reply.cancel)
    assert stuck.sample in cancelled
    assert not cancelled & {x.sample for x in others}


def test_a_pause_of_flow_itself_costs_nobody_a_lease(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    desk.now += 300.0
    desk.flow.tick()
    desk.wait(14.0)
    assert desk.exchange(appends=(piece(lease, [5], 0),)).cancel == ()
    assert desk.flow.status().in_flight_tokens == 1


def test_leases_are_extended_once_when_flow_itself_was_away(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    desk.now += 60.0
    desk.reopen()
    desk.wait(14.0)
    assert desk.exchange(appends=(piece(lease, [5], 0),)).cancel == ()
    assert desk.flow.status().in_flight_tokens == 1


def test_tokens_lost_with_a_replica_are_counted_as_redone_once(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    desk.exchange(appends=(piece(lease, [5, 6], 0),))
    desk.flow.forget_replica(1, "a", 1, decoded_tokens=9)
    desk.flow.forget_replica(1, "a", 1, decoded_tokens=9)
    status = desk.flow.status()
    assert (status.redone_tokens, status.generated_tokens, status.in_flight_tokens) == (7, 2, 2)
    assert status.replicas == ()


def test_what_was_lost_is_counted_even_when_the_next_incarnation_came_first(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    desk.exchange(appends=(piece(lease, [5, 6], 0),))
    desk.exchange("a", 2)
    desk.flow.forget_replica(1, "a", 1, decoded_tokens=9)
    assert desk.flow.status().redone_tokens == 7
    assert [r.epoch for r in desk.flow.status().replicas] == [2]


def test_a_full_disk_acknowledges_nothing_and_the_same_flush_goes_through_later(desk: Desk) -> None:
    desk.start()
    leases = desk.serve()
    ledger = desk.flow._state.ledger
    (pages,) = ledger.connection.execute("PRAGMA page_count").fetchone()
    ledger.connection.execute(f"PRAGMA max_page_count={pages}")
    big = replace(piece(leases[0], [5], 0), tokens=(5,) * 20_000, logprobs=(0.0,) * 20_000)
    request = desk.request(appends=(big,))
    with pytest.raises(LedgerError, match="hint: free disk space"):
        desk.flow.exchange(request)
    assert desk.flow.status().generated_tokens == 0
    ledger.connection.execute("PRAGMA max_page_count=1073741823")
    assert desk.flow.exchange(request).ack_seq == request.seq
    assert desk.flow.status().generated_tokens == 20_000
    assert audit(desk.folder / "ledger.db").faults == ()


# Training


def test_a_step_from_leases_to_metrics(desk: Desk) -> None:
    desk.start()
    assert desk.ask().order == "wait"
    assert desk.ask().waits_for == "2 more complete groups"
    assert desk.flow.status().waits == "no replica serves verified weights (version 0)"
    desk.exchange()
    leases = desk.exchange().leases
    assert desk.flow.status().waits == "trainer waits for 2 more complete groups"
    changes = desk.changes
    desk.finish_all(leases, 0)
    assert desk.changes > changes
    batch = desk.ask().batch
    assert batch is not None
    assert [s.sample for s in batch.samples] == [SampleId(g, m) for g in (0, 1) for m in (0, 1)]
    assert [s.reward for s in batch.samples] == [1.0, 2.0, 1.0, 2.0]
    assert sum(s.advantage for s in batch.samples[:2]) == pytest.approx(0.0)
    assert batch.samples[0].advantage < 0
    assert all(s.weights == (1.0, 1.0) and s.versions == (0, 0) for s in batch.samples)
    assert desk.ask().batch == batch, "the same until it is applied"
    desk.train(0)
    status = desk.flow.status()
    assert (status.steps_done, status.trained_tokens, status.staleness_max, status.reward_mean) == (1, 8, 0, 1.5)
    (row,) = [json.loads(line) for line in (desk.folder / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["version"], row["loss"], row["trained_tokens"]) == (0, 1, 2.0, 8)
    assert (row["trained_tokens_per_s"], row["usd_per_mtok"]) == (0.0, None), "one step is no rate yet"
    samples = [json.loads(line) for line in (desk.folder / "samples.jsonl").read_text().splitlines()]
    assert [(s["group"], s["member"], s["response"], s["versions"]) for s in samples] == [
        (0, 0, "3", [[2, 0]]),
        (0, 1, "3", [[2, 0]]),
    ]
    assert samples[0]["prompt"] == samples[0]["answer"] + "="


def test_money_per_token_follows_the_rate(desk: Desk) -> None:
    desk.start()
    leases = desk.finish_all(desk.serve(), 0)
    desk.flow.set_cost(1, 3.6)
    desk.train(0)
    desk.now += 2.0
    desk.finish_all(leases, 0)
    desk.train(1)
    row = json.loads((desk.folder / "metrics.jsonl").read_text().splitlines()[1])
    assert row["trained_tokens_per_s"] == pytest.approx(8 / 2.0)
    assert row["usd_per_mtok"] == pytest.approx(3.6 / 3600 / 4.0 * 1e6)


def test_applied_twice_is_applied_once_and_another_batch_is_refused(desk: Desk) -> None:
    desk.start()
    desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    assert batch is not None
    word = Applied(step=0, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={})
    with pytest.raises(RefusedError, match="another batch"):
        desk.flow.applied(replace(word, ids_hash="f" * 32))
    with pytest.raises(RefusedError, match="not reserved"):
        desk.flow.applied(replace(word, step=3))
    desk.flow.applied(word)
    desk.flow.applied(word)
    with pytest.raises(RefusedError, match="another batch"):
        desk.flow.applied(replace(word, ids_hash="f" * 32))
    assert desk.flow.status().trained_tokens == 8
    assert len((desk.folder / "metrics.jsonl").read_text().splitlines()) == 1


def test_an_older_trainer_is_refused_everything(desk: Desk) -> None:
    desk.start()
    desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    assert batch is not None
    desk.hello(epoch=2)
    calls = (
        lambda: desk.ask(1),
        lambda: desk.hello(1),
        lambda: desk.publish(0, epoch=1),
        lambda: desk.flow.applied(Applied(step=0, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={})),
    )
    for call in calls:
        with pytest.raises(RefusedError, match="newer trainer"):
            call()
    assert desk.ask(2).batch == batch, "the new one runs the same samples"
    desk.reopen()
    with pytest.raises(RefusedError, match="newer trainer"):
        desk.ask(1)
    assert desk.flow.status().trainer_epoch == 2


def test_only_the_weights_after_the_last_applied_step_are_published_once(desk: Desk) -> None:
    desk.start()
    desk.publish(0)
    for version in (1, 5):
        with pytest.raises(RefusedError, match="not the weights after"):
            desk.publish(version)
    with pytest.raises(RefusedError, match="another hash"):
        desk.publish(0, digest="other")
    with pytest.raises(RefusedError, match="not the weights after"):
        desk.publish(0, lineage=1)


@pytest.mark.parametrize("lost", ["before the checkpoint", "before APPLIED", "before the publication"])
def test_a_trainer_that_dies_within_a_step_settles_it_at_its_next_hello(desk: Desk, lost: str) -> None:
    desk.start()
    desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    assert batch is not None
    marks = () if lost == "before the checkpoint" else (CheckpointMark(step=0, ids_hash=batch.ids_hash),)
    if lost == "before the publication":
        desk.flow.applied(Applied(step=0, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={}))
    welcome = desk.hello(2, marks)
    assert welcome.load_step == (0 if marks else None)
    assert (welcome.lineage, welcome.published) == (0, WeightsRef(lineage=0, version=0, path="w0", digest="d0.0"))
    assert desk.flow.status().steps_done == len(marks)
    if not marks:
        assert desk.ask(2).batch == batch
    rows = (desk.folder / "metrics.jsonl").read_text().splitlines() if marks else []
    assert len(rows) == len(marks)
    assert audit(desk.folder / "ledger.db").faults == ()


def test_a_checkpoint_of_other_samples_does_not_settle_a_step(desk: Desk) -> None:
    desk.start()
    desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    welcome = desk.hello(2, (CheckpointMark(step=0, ids_hash="0" * 32),))
    assert (welcome.load_step, welcome.lineage) == (None, 0)
    assert desk.ask(2).batch == batch


def test_checkpoints_ahead_of_the_ledger_are_left_behind_in_another_lineage(desk: Desk) -> None:
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    assert batch is not None
    desk.train(0)
    marks = (CheckpointMark(step=0, ids_hash=batch.ids_hash), CheckpointMark(step=9, ids_hash="0" * 32))
    welcome = desk.hello(2, marks)
    assert (welcome.load_step, welcome.load_lineage, welcome.lineage, welcome.published) == (0, 0, 1, None)
    stale = desk.exchange(appends=tuple(whole(x, 0) for x in held))
    assert stale.leases == (), "weights of the old lineage are not routable"
    assert desk.flow.status().wasted_tokens == {}, "but what they made is good"
    desk.publish(1, epoch=2, lineage=1)
    assert desk.exchange().weights == WeightsRef(lineage=1, version=1, path="w1", digest="d1.1")
    assert desk.exchange().leases != ()


def test_quiesce_and_stop_come_at_a_step_boundary(desk: Desk) -> None:
    desk.start()
    desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    desk.flow.set_trainer_order(1, 1, "quiesce")
    assert desk.ask().order == "quiesce"
    assert desk.flow.status().trainer_state == "quiesced"
    desk.flow.set_trainer_order(1, 1, "train")
    assert desk.ask().batch == batch
    desk.flow.set_trainer_order(1, 1, "stop")
    assert desk.ask().order == "stop"
    desk.hello(2)
    assert desk.ask(2).batch == batch, "the order was for the trainer before"
    desk.flow.forget_trainer(1, 2)
    assert desk.flow.status().trainer_state == "absent"
    assert desk.flow.status().waits == "no trainer"


def test_the_step_limit_ends_the_run_when_the_last_weights_are_out(desk: Desk) -> None:
    desk.start()
    desk.flow.set_limits(1, RunLimits(steps=1))
    leases = desk.serve()
    assert {x.sample.group for x in leases} == {0, 1}, "nothing is begun that will not be trained"
    desk.finish_all(leases, 0)
    batch = desk.ask().batch
    assert batch is not None
    desk.flow.applied(Applied(step=0, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={}))
    assert not desk.flow.status().finished
    desk.publish(1)
    assert desk.flow.status().finished
    assert desk.ask().order == "stop"


def test_a_late_or_second_reward_changes_nothing(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    desk.exchange(appends=(whole(lease, 0),))
    (item,) = desk.items
    desk.flow.rewarded([RewardResult(sample=item.sample, reward=0.25)])
    desk.flow.rewarded(
        [RewardResult(sample=item.sample, reward=0.75), RewardResult(sample=SampleId(77, 0), reward=1.0)]
    )
    assert desk.flow._state.ledger.book.samples[item.sample].reward == 0.25


def test_a_verifier_error_counts_and_gives_zero(desk: Desk) -> None:
    desk.start()
    lease = desk.serve()[0]
    desk.exchange(appends=(whole(lease, 0),))
    desk.flow.rewarded([RewardResult(sample=lease.sample, reward=0.0, error="timeout")])
    assert desk.flow._state.ledger.book.counters["reward_errors"] == 1
    assert desk.flow._state.ledger.book.samples[lease.sample].reward == 0.0


def test_unrewarded_samples_are_verified_again_after_a_restart_and_lost_lines_are_written(desk: Desk) -> None:
    desk.start()
    leases = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange(appends=(whole(leases[0], 0),))
    waiting = [i.sample for i in desk.items]
    assert waiting
    (desk.folder / "metrics.jsonl").unlink()  # as if flow had died before it wrote the line
    desk.items = []
    desk.reopen()
    assert [i.sample for i in desk.items] == waiting
    (row,) = [json.loads(line) for line in (desk.folder / "metrics.jsonl").read_text().splitlines()]
    assert (row["step"], row["loss"], row["trained_tokens"]) == (0, 2.0, 8)


# The daemon


def test_an_older_daemon_is_refused_everything(desk: Desk) -> None:
    desk.flow.expect_replica(5, "a", 1)
    flow = desk.flow
    calls = (
        lambda: flow.expect_replica(4, "a", 1),
        lambda: flow.set_order(4, "a", 1, "stop"),
        lambda: flow.forget_replica(4, "a", 1, 0),
        lambda: flow.set_trainer_order(4, 1, "stop"),
        lambda: flow.forget_trainer(4, 1),
        lambda: flow.set_limits(4, RunLimits(steps=1)),
        lambda: flow.set_cost(4, 1.0),
        lambda: flow.finish(4),
    )
    for call in calls:
        with pytest.raises(RefusedError, match="newer daemon"):
            call()
    desk.reopen()
    with pytest.raises(RefusedError, match="newer daemon"):
        desk.flow.expect_replica(4, "a", 1)
    assert [r.order for r in desk.flow.status().replicas] == ["serve"]


def test_orders_survive_a_restart_of_flow(desk: Desk) -> None:
    desk.start()
    desk.flow.set_order(1, "a", 1, "drain")
    desk.reopen()
    assert desk.exchange().order == "drain"


def test_a_replica_that_only_the_ledger_remembers_is_shown_no_longer_and_may_come_back(desk: Desk) -> None:
    desk.start()
    desk.flow.set_order(1, "a", 1, "drain")
    leases = desk.serve("b")
    desk.reopen()
    assert {r.replica for r in desk.flow.status().replicas} == {"a", "b"}
    desk.wait(70.0)
    status = desk.flow.status()
    assert (status.replicas, status.samples_by_state["LEASED"]) == ((), 0)
    assert desk.exchange("a").order == "drain"
    late = desk.exchange("b", appends=(piece(leases[0], [5], 0),))
    assert (late.order, late.ack_seq, late.cancel) == ("serve", desk.seqs["b", 1], (leases[0].sample,))
    assert {r.replica for r in desk.flow.status().replicas} == {"a", "b"}


# Evaluation


def test_evaluation_takes_a_small_share_and_is_dropped_at_the_end(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eval_every_steps=1, eval_prompts=8)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange(appends=tuple(whole(x, 0) for x in held))
    reply = desk.exchange()
    probes = [x for x in reply.leases if x.sample.group < 0]
    assert len(probes) == SLOTS // 8
    before = desk.flow.status()
    desk.exchange(appends=tuple(whole(p, 1) for p in probes))
    after = desk.flow.status()
    assert before.generated_tokens == after.generated_tokens, "evaluation is not in the ledger"
    assert audit(tmp_path / "ledger.db").faults == ()
    desk.flow.finish(1)
    late = desk.exchange(appends=(whole(replace(probes[0], epoch=probes[0].epoch + 1), 1),))
    assert (late.order, late.leases) == ("drain", ())
    desk.answer()
    assert not (tmp_path / "evaluations.jsonl").exists()
    desk.exchange(released=tuple(sorted(desk.flow._state.held(desk.flow._state.replicas.get("a", 1)))))  # type: ignore[arg-type]
    desk.ask()
    assert desk.flow.status().finished


def test_a_probe_that_gets_no_token_is_leased_again(tmp_path: Path) -> None:
    desk = Desk(tmp_path, eval_every_steps=1, eval_prompts=1)
    desk.start()
    held = desk.finish_all(desk.serve(), 0)
    desk.train(0)
    desk.exchange(appends=tuple(whole(x, 0) for x in held))
    (probe,) = [x for x in desk.serve() if x.sample.group < 0]
    given: list[Lease] = []
    for _ in range(8):
        desk.wait(10.0)
        replies = desk.exchange(), desk.exchange("b")  # its holder speaks, but says nothing of it
        given += [x for reply in replies for x in reply.leases if x.sample == probe.sample]
    assert [x.epoch > probe.epoch for x in given] == [True]
    late = desk.exchange(appends=(piece(probe, [5], 1),))
    assert probe.sample in late.cancel, "the old lease is over"


# Building it


def config(tmp_path: Path, **task: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"source": "seeded", "path": "m"},
            "task": {"source": "copy", "reward_timeout": "4 s", **task},
            "algorithm": {"mode": "sync", "eta": 4, "prompts_per_step": 3, "stale_policy": "wait"},
        }
    )


def test_flow_from_a_configuration_and_a_run_folder(desk: Desk, tmp_path: Path) -> None:
    paths = RunPaths(folder=tmp_path / "run", short=tmp_path / "s")
    paths.folder.mkdir()
    flow = open_flow(config(tmp_path), paths, CharTokenizer(), desk, clock=lambda: desk.now)
    status = flow.status()
    assert (status.eta, status.steps_done, status.waits) == (0, 0, "no trainer")
    assert paths.ledger.exists()
    flow.close()
    with pytest.raises(ConfigError, match="planning only"):
        open_flow(replace_task(config(tmp_path)), paths, CharTokenizer(), desk)


def replace_task(c: Config) -> Config:
    return c.model_copy(update={"task": None})


def test_flow_needs_neither_torch_nor_ray() -> None:
    code = "import sys, runtime.rl.flow, runtime.rl.rewards; print([m for m in ('torch', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
