"""Flow and its trainer, call by call: reserve, apply, publish, settle."""

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from planner.record import replace
from runtime.errors import RefusedError
from runtime.rl.ledger import audit
from runtime.rl.rewards.items import RewardResult
from runtime.rl.types import (
    Applied,
    ChannelOffer,
    CheckpointMark,
    EngineStats,
    RunLimits,
    SampleId,
    TrainerHello,
    WeightsRef,
)
from tests.rl.flow_desk import SLOTS, Desk, whole


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.flow.close()


# Training


def test_a_trainer_that_still_publishes_is_told_nothing_but_a_batch(desk: Desk) -> None:
    desk.start()
    assert desk.flow.next_batch("t", 1, ahead=True).order == "wait"
    desk.exchange()
    desk.finish_all(desk.exchange().leases, 0)
    ahead = desk.flow.next_batch("t", 1, ahead=True).batch
    assert ahead is not None
    assert desk.ask().batch == ahead, "asking again gives the same"
    desk.train(0)
    for order in ("quiesce", "stop"):
        desk.flow.set_trainer_order(1, 1, order)
        assert desk.flow.next_batch("t", 1, ahead=True).order == "wait"
        assert desk.flow.status().trainer_state == "training", "it is not gone before it has published"
    assert desk.ask().order == "stop"


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


def test_a_step_tells_the_plain_steps_of_the_engines_meanwhile(desk: Desk) -> None:
    def told(steps: int, seconds: float, host_s: float) -> EngineStats:
        return EngineStats(slots=SLOTS, plain_steps=steps, plain_step_s=seconds, plain_host_s=host_s)

    desk.start()
    desk.exchange(stats=told(1000, 99.0, 99.0))  # before flow knew it
    leases = desk.exchange(stats=told(1010, 99.08, 99.05)).leases
    leases = desk.exchange(stats=told(1020, 99.20, 99.11), appends=tuple(whole(x, 0) for x in leases)).leases
    desk.answer()
    desk.train(0)
    desk.exchange(stats=told(1024, 99.22, 99.13), appends=tuple(whole(x, 0) for x in leases))
    desk.answer()
    desk.train(1)
    first, second = (json.loads(line) for line in (desk.folder / "metrics.jsonl").read_text().splitlines())
    assert (first["engine_step_s"], first["engine_host_s"]) == (pytest.approx(0.01), pytest.approx(0.0055))
    assert (second["engine_step_s"], second["engine_host_s"]) == (pytest.approx(0.005), pytest.approx(0.005))


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
    # The other checkpoint may have published its version: ours is left behind in another lineage.
    assert (welcome.load_step, welcome.lineage) == (None, 1)
    again = desk.ask(2).batch
    assert batch is not None
    assert again is not None
    assert (again.step, again.ids_hash, again.samples) == (batch.step, batch.ids_hash, batch.samples)


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


def test_steps_in_no_checkpoint_are_made_again_from_the_same_batches_and_counted_once(desk: Desk) -> None:
    """A checkpoint every third step: a crash after two more leaves two to be made again."""
    desk.start()
    leases = desk.serve()
    batches = []
    for step in range(4):
        desk.finish_all(leases, step)
        batches.append(desk.train(step, checkpointed=step == 1))
        leases = desk.serve()
    before = desk.flow.status()
    counted = trained_samples(desk)
    assert counted == sum(len(b.samples) for b in batches)

    welcome = desk.hello(2, (CheckpointMark(step=1, ids_hash=batches[1].ids_hash),))
    assert (welcome.load_step, welcome.load_lineage, welcome.lineage) == (1, 0, 1)
    assert desk.flow.status().steps_done == 2
    desk.publish(2, epoch=2, lineage=1)
    assert [desk.train(step, 2, lineage=1) for step in (2, 3)] == batches[2:]
    after = desk.flow.status()
    assert (after.trained_tokens, after.masked_tokens) == (before.trained_tokens, before.masked_tokens)
    assert after.spans_two_versions_share == before.spans_two_versions_share
    assert trained_samples(desk) == counted
    whole_ = audit(desk.folder / "ledger.db")
    assert whole_.faults == ()
    assert whole_.balanced


def trained_samples(desk: Desk) -> int:
    """The run's count, as the ledger keeps it."""
    with closing(sqlite3.connect(f"file:{desk.folder / 'ledger.db'}?mode=ro", uri=True)) as ledger:
        return int(ledger.execute("SELECT value FROM counters WHERE name = 'trained_samples'").fetchone()[0])


@pytest.mark.parametrize(("order", "state"), [("quiesce", "quiesced"), ("stop", "absent")])
def test_a_trainer_with_steps_in_no_checkpoint_saves_before_it_is_called_gone(
    desk: Desk, order: str, state: str
) -> None:
    desk.start()
    desk.finish_all(desk.serve(), 0)
    desk.train(0, checkpointed=False)
    desk.flow.set_trainer_order(1, 1, order)
    assert desk.ask().order == order
    assert desk.flow.status().trainer_state == "training", "it saves"
    assert desk.ask().order == order
    assert desk.flow.status().trainer_state == state


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


# Weights that went straight to engines


OFFER = ChannelOffer(host="127.0.0.1", port=4711, token="t", trainer_epoch=1)


def test_what_is_at_the_engines_is_served_and_what_is_on_disk_is_for_the_others(desk: Desk) -> None:
    desk.flow.hello(TrainerHello(trainer="t", epoch=1, pid=1, complete=(), channel=OFFER))
    first = desk.publish(0)
    reply = desk.exchange("a")
    assert (reply.weights, reply.direct, reply.channel) == (first, None, OFFER)
    held = desk.finish_all(desk.serve("a"), 0, "a")
    assert held
    batch = desk.ask().batch
    assert batch is not None
    desk.flow.applied(Applied(step=0, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={}))
    direct = WeightsRef(lineage=0, version=1, path="w1", digest="packed")
    desk.flow.published(direct, 1, stored=False)
    assert desk.flow.status().weights == direct
    reply = desk.exchange("b")  # a joiner, and whoever missed the transfer
    assert (reply.weights, reply.direct) == (first, direct)

    # A replica that swapped is trusted with tokens of the version at once; flow's restart forgets nothing.
    desk.weights["a"] = direct
    desk.reopen()
    reply = desk.exchange("a")
    assert (reply.weights, reply.direct, reply.channel) == (first, direct, OFFER)
    assert not reply.cancel
    desk.weights["a"] = direct
    generated = desk.flow.status().generated_tokens
    desk.exchange("a", appends=(whole(held[0], 1),))
    assert desk.flow.status().generated_tokens == generated + 2
    assert desk.flow.status().wasted_tokens == {}

    desk.flow.published(direct, 1)
    reply = desk.exchange("b")
    assert (reply.weights, reply.direct) == (direct, None)


def test_a_generation_comes_to_disk_at_any_later_time_and_never_goes_back(desk: Desk) -> None:
    desk.start()
    refs = [WeightsRef(lineage=0, version=v, path=f"w{v}", digest=f"p{v}") for v in range(4)]
    for step in range(3):
        desk.finish_all(desk.serve("a") or desk.serve("a"), step, "a")
        batch = desk.ask().batch
        assert batch is not None
        desk.flow.applied(Applied(step=step, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={}))
        desk.flow.published(refs[step + 1], 1, stored=False)
        desk.weights["a"] = refs[step + 1]
    with pytest.raises(RefusedError):
        desk.flow.published(replace(refs[2], digest="other"), 1)
    with pytest.raises(RefusedError):
        desk.flow.published(refs[2], 1, stored=False)  # announced long ago: only its coming to disk is news
    desk.flow.published(refs[2], 1)
    desk.flow.published(refs[1], 1)  # later than a newer one
    reply = desk.flow.exchange(desk.request("b"))
    assert (reply.weights, reply.direct) == (refs[2], refs[3])
    assert desk.hello(2, tuple(_mark(desk, s) for s in range(3))).published == refs[2], (
        "the newest is to be published anew"
    )
    desk.flow.published(refs[3], 2)
    assert desk.flow.exchange(desk.request("b")).direct is None


def _mark(desk: Desk, step: int) -> CheckpointMark:
    row = next(r for r in desk.flow._state.ledger.step_rows(9) if r.step == step)
    return CheckpointMark(step=step, ids_hash=row.ids_hash)


def test_a_run_is_not_over_before_its_last_weights_are_on_disk(desk: Desk) -> None:
    desk.start()
    desk.flow.set_limits(1, RunLimits(steps=1))
    desk.finish_all(desk.serve(), 0)
    batch = desk.ask().batch
    assert batch is not None
    desk.flow.applied(Applied(step=0, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={}))
    ref = WeightsRef(lineage=0, version=1, path="w1", digest="packed")
    desk.flow.published(ref, 1, stored=False)
    assert not desk.flow.status().finished
    desk.flow.published(ref, 1)
    assert desk.flow.status().finished
