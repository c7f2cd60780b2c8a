"""Flow and its replicas, call by call: who gets work, what the journal takes, when a lease ends."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from planner.errors import InvalidInput
from planner.record import replace
from runtime.errors import LedgerError, RefusedError
from runtime.rl.ledger import ReplicaRow, audit
from runtime.rl.types import EngineStats, SampleId, WeightsRef
from tests.rl.flow_desk import EOS, SLOTS, Desk, piece


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


@pytest.mark.parametrize("logprob", [float("nan"), float("-inf"), float("inf")])
def test_a_logprob_that_is_no_number_is_not_journalled_and_another_replica_tries(desk: Desk, logprob: float) -> None:
    """An engine whose arithmetic failed: with one such token no gradient of the whole step would be finite."""
    desk.start()
    leases = desk.serve()
    one = leases[0]
    bad = piece(one, [6], 0, start=1)._replace(logprobs=(logprob,))
    answer = desk.exchange(appends=(piece(one, [5], 0), bad))
    assert one.sample in answer.cancel
    assert desk.flow.status().wasted_tokens == {"not_finite": 1}
    desk.exchange("b")
    again = {x.sample: x for x in desk.exchange("b").leases}
    assert again[one.sample].tokens == (5,)
    desk.flow.close()
    found = audit(desk.folder / "ledger.db")
    assert (found.faults, found.balanced) == ((), True)


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


def test_a_replica_is_given_no_more_than_the_plan_allots_it_and_is_told(tmp_path: Path) -> None:
    """16 slots of which the plan wants 6: a fourth of them while nothing is measured, then all 6, never more. Another plan says 10,
    and flow counts with it once the replica says that it has as many; an older daemon's word is refused."""
    desk = Desk(tmp_path, eta=30, max_new_tokens=99)
    desk.flow.allot(1, {"a": 6})
    desk.start()
    assert desk.exchange().slots == 6
    leases = dict.fromkeys(desk.exchange(stats=stats(6)).leases, 0)
    assert len(leases) == 2

    def on(slots: int) -> int | None:
        """Each sample gets a token, the replica says what it has room for; returns what it is told."""
        appends = tuple(piece(lease, [5], 0, start=at) for lease, at in leases.items())
        reply = desk.exchange(appends=appends, refill_s=0.0, stats=stats(slots))
        leases.update({lease: at + 1 for lease, at in leases.items()} | dict.fromkeys(reply.leases, 0))
        return reply.slots

    told = [on(6) for _ in range(4)]
    assert (told, len(leases)) == ([6] * 4, 6)
    desk.flow.allot(1, {"a": 10, "gone": 3})
    assert (on(6), len(leases)) == (10, 6), "it has said 6"
    assert (on(10), on(10), len(leases)) == (10, 10, 10)
    desk.flow.allot(2, {"a": 4})
    assert (on(10), len(leases)) == (4, 10), "what runs ends where it is"
    with pytest.raises(RefusedError, match="newer daemon"):
        desk.flow.allot(1, {"a": 9})
    with pytest.raises(InvalidInput, match="needs a slot"):
        desk.flow.allot(2, {"a": 0})
    assert [r.allotted for r in desk.flow.status().replicas] == [4]
    desk.reopen()
    assert [r.allotted for r in desk.flow.status().replicas] == [None], "the daemon sees that and says it again"
    desk.flow.close()


def stats(slots: int) -> EngineStats:
    return EngineStats(slots=slots, running=2, decode_tokens_per_s=20.0, decode_running=2.0)


@pytest.mark.parametrize(("refill_s", "held"), [(0.0, 16), (0.01875, 16 + 3), (0.075, 16 + 8), (None, 16 + 16)])
def test_work_ahead_follows_how_long_an_exchange_takes(tmp_path: Path, refill_s: float | None, held: int) -> None:
    """Two samples at 20 tokens/s are 0.1 s a step, so 160 tokens/s with all 16 slots, and a sample is expected to have 3 tokens:
    1 ends in 19 ms, 4 in 75 ms, and twice the root of that may come on top. Not told: 300 ms, which is more than the slots."""
    desk = Desk(tmp_path, eta=30)
    desk.start()
    leases = dict.fromkeys(desk.serve(), 0)
    for _ in range(4):
        appends = tuple(piece(lease, [5], 0, start=at) for lease, at in leases.items())
        leases = {lease: at + 1 for lease, at in leases.items()}
        leases |= dict.fromkeys(desk.exchange(appends=appends, refill_s=refill_s).leases, 0)
    assert len(leases) == held
    assert [r.refill_s for r in desk.flow.status().replicas] == [refill_s]


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


def test_an_older_incarnation_never_supersedes_a_newer_one(desk: Desk) -> None:
    """Also when the newer one has left no trace in the ledger yet, and across a restart."""
    desk.start()
    older = desk.request("a", 1)
    desk.exchange("a", 2)
    assert desk.flow.exchange(older).order == "stop"
    assert desk.exchange("a", 2).leases != ()
    desk.flow.forget_replica(1, "a", 2, 0)
    desk.reopen()
    assert desk.flow.status().replicas == ()
    assert desk.exchange("a", 1).order == "stop"


def test_leases_of_an_incarnation_nobody_knows_are_ended(desk: Desk) -> None:
    desk.start()
    leases = desk.serve()
    ledger = desk.flow._state.ledger
    with ledger.transaction():  # as a ledger might say that was written by a flow with other ideas
        ledger.set_replica(ReplicaRow(replica="a", epoch=2, forgotten=True))
    desk.reopen()
    assert desk.flow.status().samples_by_state["LEASED"] == len(leases)
    desk.flow.tick()
    assert desk.flow.status().samples_by_state["LEASED"] == 0
    assert {x.sample for x in desk.serve("b")} <= {x.sample for x in leases}


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
    big = piece(leases[0], [5], 0)._replace(tokens=(5,) * 20_000, logprobs=(0.0,) * 20_000)
    request = desk.request(appends=(big,))
    with pytest.raises(LedgerError, match="hint: free disk space"):
        desk.flow.exchange(request)
    assert desk.flow.status().generated_tokens == 0
    ledger.connection.execute("PRAGMA max_page_count=1073741823")
    assert desk.flow.exchange(request).ack_seq == request.seq
    assert desk.flow.status().generated_tokens == 20_000
    assert audit(desk.folder / "ledger.db").faults == ()
