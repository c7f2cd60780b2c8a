"""The replica's loop against a flow that keeps the journal's rules, over a line that loses, delays and repeats."""

import itertools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.record import replace
from runtime.errors import RunError
from runtime.rl.counter import TokenCounter, read_counter
from runtime.rl.exchange import LoopTiming, Unflushed
from runtime.rl.pacing import KindPacing
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.types import ExchangeReply, ExchangeRequest, SampleId, WeightsRef
from tests.rl.rollout_world import Desk, Line, Pending, ToyEngine, VirtualClock, World, append, length_of, token_of

# ---- a quiet line


def test_everything_is_decoded_once_and_journalled() -> None:
    world = World(work=20)
    world.run(60.0)
    assert world.desk.finished == {SampleId(g, m) for g in range(20) for m in range(2)}
    world.check_journal()
    assert world.engine.decoded == world.desk.tokens
    assert world.desk.refused == 0
    seqs = [r.seq for r in world.desk.requests]
    assert seqs == list(range(1, len(seqs) + 1))
    assert all(r.pid == os.getpid() and r.replica == "r0" for r in world.desk.requests)


def test_when_a_replica_speaks() -> None:
    """Long samples: every 250 ms. A finished one waiting: 100 ms. 32 tokens of one sample: at once. Idle: every 100 ms."""
    for step_s, slots, wanted in [(0.05, 1, 0.25), (0.002, 1, 32 * 0.002)]:
        world = World(step_s=step_s, slots=slots)
        world.desk.pending = [SampleId(0, 5)] * 1  # 58 tokens
        world.run(0.2)
        world.run(0.2 + 56 * step_s)
        busy = [r for r in world.desk.applied if r.appends]
        assert length_of(SampleId(0, 5)) == 58
        longest = max(len(a.tokens) for r in busy for a in r.appends)
        assert longest == pytest.approx(wanted / step_s, abs=1.01)
    idle = World()
    idle.run(10.0)
    assert 95 <= len(idle.desk.requests) <= 105


def test_a_finished_sample_does_not_wait_for_the_long_flush() -> None:
    world = World(step_s=0.02)
    world.desk.pending = [SampleId(0, 0)]  # 3 tokens
    world.run(0.4)
    assert world.desk.finished == {SampleId(0, 0)}
    finished = next(r for r in world.desk.applied if any(a.finished for a in r.appends))
    before = world.desk.applied[world.desk.applied.index(finished) - 1]
    assert finished.seq == before.seq + 1
    assert world.clock.now < 0.45


def test_a_finished_sample_does_not_cut_the_segments_of_those_that_run() -> None:
    """A short sample ends every now and then; a long one beside it is still journalled in pieces of 250 ms."""
    world = World(step_s=0.05, slots=2)
    long = SampleId(0, 5)  # 58 tokens
    world.desk.pending = [long, *(SampleId(12 * i, 0) for i in range(14))]  # 3 tokens each
    world.run(4.0)
    assert long in world.desk.finished
    pieces = [len(a.tokens) for r in world.desk.applied for a in r.appends if a.sample == long]
    assert len([r for r in world.desk.applied if any(a.finished for a in r.appends)]) > 10
    assert max(pieces) <= 6
    assert len(pieces) <= 58 / 5 + 2


# ---- a broken line


def test_with_two_unacknowledged_it_decodes_on_to_the_end_of_its_tail() -> None:
    """A flush has five or six tokens a sample: 250 ms at 50 ms a token. The first two get through, two wait for ever, then come ten
    tokens of each of the samples that still run and no more."""
    long = [SampleId(g, m) for g in range(40) for m in range(2) if length_of(SampleId(g, m)) > 40][:8]
    world = World(fates=["ok", "ok", "ok"], then="mute", timing=LoopTiming(tail_tokens=10))
    world.desk.pending = list(long)
    world.run(20.0)
    decoded = world.engine.decoded
    level = world.loop.level()
    assert (level.unacknowledged, level.held, level.unflushed_tokens) == (2, 8, 8 * 10)
    assert world.line.most == 2
    assert [len(r.appends) for r in world.desk.applied][-1] == 8  # the last that got through
    waiting = sum(len(a.tokens) for flight in world.loop._exchanges._flights for a in flight.request.appends)
    assert waiting in range(2 * 8 * 5, 2 * 8 * 6 + 1)
    assert decoded == world.desk.tokens + waiting + 8 * 10
    world.run(25.0)
    assert world.engine.decoded == decoded
    age = world.loop.level().token_age_s
    assert age is not None
    assert age > 20


def test_an_exchange_that_failed_is_repeated_with_the_same_content_before_any_other() -> None:
    world = World(work=3, fates=["ok", "ok", "down", "lost", "answer_lost", "lost"])
    world.run(30.0)
    by_seq: dict[int, set[ExchangeRequest]] = {}
    for request in world.desk.requests:
        by_seq.setdefault(request.seq, set()).add(request)
    assert all(len(same) == 1 for same in by_seq.values())
    assert len(world.desk.requests) > len(by_seq)
    assert [r.seq for r in world.desk.applied] == list(range(1, len(world.desk.applied) + 1))
    world.check_journal()
    assert len(world.desk.finished) == 6


def test_an_exchange_that_is_never_answered_is_sent_again_after_its_deadline() -> None:
    world = World(work=1, fates=["ok", "mute", "mute"], timing=LoopTiming(answer_s=5.0))
    world.run(4.0)
    assert not world.desk.finished
    world.run(12.0)
    assert len(world.desk.finished) == 2
    world.check_journal()


def test_a_slow_answer_does_not_stop_decoding() -> None:
    """Flow answers after 0.4 s, short samples end all the time: two exchanges are nearly always unacknowledged. No step waits:
    one takes 10 ms, so that in 4 s no fewer than 99 of 100 could have been made."""
    world = World(then="slow", step_s=0.01, slots=4)
    world.desk.pending = [SampleId(g, m) for g in range(1200) for m in range(2) if length_of(SampleId(g, m)) < 12]
    world.desk.slots = 400
    world.run(1.0)
    began, decoded = world.clock.now, world.engine.decoded
    world.run(began + 4.0)
    assert world.engine.decoded - decoded >= 0.99 * 4 * 4.0 / 0.01
    assert world.line.most == 2
    world.check_journal()


def test_with_flow_gone_decoding_ends_with_the_tail() -> None:
    """One exchange that cannot be sent is not two unacknowledged; what gathers behind it is bounded all the same."""
    long = [SampleId(g, m) for g in range(40) for m in range(2) if length_of(SampleId(g, m)) > 40][:3]
    world = World(fates=["ok", "ok"], then="down", timing=LoopTiming(tail_tokens=20))
    world.desk.pending = list(long)
    world.run(60.0)
    level = world.loop.level()
    assert (level.unacknowledged, level.held, level.unflushed_tokens) == (1, 3, 3 * 20)


def test_a_refill_takes_from_one_exchange_to_the_answer_of_the_next() -> None:
    """Idle: an exchange every 100 ms, answered after 5 ms, so what ended right after one has its successor after 105 ms. An
    outage of seconds does not change the median of the last eight."""
    world = World()
    assert world.loop._exchanges.refill_s is None
    world.run(5.0)
    assert world.desk.requests[0].refill_s is None
    assert world.desk.requests[-1].refill_s == pytest.approx(0.105)
    world.line.fates = ["down"] * 6
    world.run(20.0)
    assert world.desk.requests[-1].refill_s == pytest.approx(0.105)


def test_retries_wait_longer_and_longer() -> None:
    world = World(then="down")
    attempts: list[float] = []
    send = world.line.send

    class Counting:
        def send(self, request: ExchangeRequest) -> Pending:
            attempts.append(world.clock.now)
            return send(request)

    world.loop = ReplicaLoop(world.engine, Counting(), replica="r0", epoch=1, clock=world.clock, wait=world.clock.wait)
    world.run(20.0)
    gaps = [b - a for a, b in itertools.pairwise(attempts)]
    assert gaps[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6])
    assert gaps[5:] == pytest.approx([2.0] * len(gaps[5:]))


FATES = st.lists(st.sampled_from(["ok", "slow", "late", "lost", "answer_lost", "down"]), max_size=40)
EVENTS = st.lists(
    st.tuples(st.floats(0.05, 1.0), st.sampled_from(["drain", "serve", "weights", "cancel", "broken"])), max_size=8
)


@given(
    fates=FATES,
    events=EVENTS,
    work=st.integers(1, 6),
    slots=st.integers(1, 5),
    tail_tokens=st.sampled_from([1, 7, 32, 64]),
)
def test_whatever_the_line_does_nothing_is_lost_or_doubled(
    fates: list[str], events: list[tuple[float, str]], work: int, slots: int, tail_tokens: int
) -> None:
    world = World(work=work, fates=fates, slots=slots, timing=LoopTiming(tail_tokens=tail_tokens))
    desk, cancelled = world.desk, 0
    for after, event in events:
        world.run(world.clock.now + after)
        version = 0 if desk.weights is None else desk.weights.version
        if event in ("drain", "serve"):
            desk.order = "drain" if event == "drain" else "serve"
        elif event in ("weights", "broken"):
            world.engine.broken |= {version + 1} if event == "broken" else set()
            desk.weights = WeightsRef(lineage=0, version=version + 1, path="", digest=f"d{version + 1}")
        elif desk.leased:
            sample = min(desk.leased)
            desk.leased.discard(sample)
            desk.cancel.append(sample)
            desk.epochs[sample] += 1
            desk.pending.append(sample)
            cancelled += 1
    world.engine.broken.clear()
    desk.order = "serve"
    world.run(world.clock.now + 250.0, finished=2 * work)
    assert len(desk.finished) == 2 * work
    world.check_journal()
    assert world.line.most <= 2
    assert world.engine.decoded >= desk.tokens
    assert cancelled or world.engine.decoded == desk.tokens  # only a cancel may cost tokens
    for versions in desk.versions.values():
        assert versions == sorted(versions)


# ---- orders


def busy_world() -> World:
    world = World(work=10)
    world.run(1.03)
    assert len(world.engine.held()) >= 6
    return world


def test_drain_gives_everything_back_after_its_tokens() -> None:
    world = busy_world()
    world.desk.order = "drain"
    decoded_at = world.clock.now
    world.run(decoded_at + 0.6)
    assert world.loop.level().phase == "drained"
    assert world.engine.held() == ()
    assert world.desk.leased == set()
    assert world.engine.decoded == world.desk.tokens
    world.check_journal()
    held_before = world.engine.decoded
    world.run(world.clock.now + 3.0)
    assert world.engine.decoded == held_before
    assert world.loop.level().phase == "drained"
    world.desk.order = "serve"
    world.run(world.clock.now + 60.0)
    assert len(world.desk.finished) == 20
    world.check_journal()


def test_leases_that_cross_a_drain_order_go_back() -> None:
    world = World(work=4)
    world.run(0.02)
    world.desk.order = "drain"
    answer = world.desk.answers[max(world.desk.answers)]
    world.desk.answers.clear()
    world.desk.requests.clear()
    lease = world.desk.lease(SampleId(3, 1))
    world.loop._apply(replace(answer, order="drain", leases=(lease,)), True)
    assert lease.sample in world.loop._released
    assert world.engine.held() == ()


def test_cancel_comes_before_a_new_lease_of_the_same_sample() -> None:
    world = busy_world()
    sample = world.engine.held()[0]
    world.desk.leased.discard(sample)
    world.desk.cancel.append(sample)
    world.desk.pending.insert(0, sample)
    world.run(60.0)
    assert world.desk.refused == 0 or world.desk.epochs[sample] == 2
    assert world.desk.epochs[sample] == 2
    assert len(world.desk.finished) == 20
    world.check_journal()


@pytest.mark.parametrize("who", ["flow", "host"])
def test_stop_flushes_and_ends(who: str) -> None:
    world = busy_world()
    if who == "flow":
        world.desk.order = "stop"
    else:
        world.loop.stop()
    assert not world.run(5.0)
    assert world.clock.now < 1.6
    level = world.loop.level()
    assert (level.phase, level.failure, level.held, level.unflushed_tokens) == ("stopped", "", 0, 0)
    assert world.engine.decoded == world.desk.tokens
    assert world.desk.leased == set()


def test_stop_without_flow_ends_after_its_goodbye_and_says_so() -> None:
    world = busy_world()
    world.line.then = "down"
    world.loop.stop()
    assert not world.run(20.0)
    assert 5.9 < world.clock.now < 6.6
    assert "did not acknowledge" in world.loop.level().failure


def test_a_replica_that_was_given_up_ends_at_once() -> None:
    world = busy_world()
    world.desk.gone = True
    tokens = world.desk.tokens
    assert not world.run(10.0)
    assert world.clock.now < 1.6
    assert world.desk.tokens == tokens
    assert world.loop.level().phase == "stopped"


# ---- weights


def test_new_weights_are_reported_at_once_and_stamp_what_follows() -> None:
    world = busy_world()
    world.desk.weights = WeightsRef(lineage=0, version=1, path="v1", digest="d1")
    world.run(1.5)
    assert world.engine.loads == 2
    first = next(r for r in world.desk.applied if r.version == 1)
    assert first.digest == "d1"
    assert world.clock.now < 1.6
    for request in world.desk.applied:  # no token of a version before the request that reports it
        assert all(a.version <= (request.version or 0) for a in request.appends)
    world.run(60.0)
    assert any(set(v) == {0, 1} for v in world.desk.versions.values())
    assert all(v == sorted(v) for v in world.desk.versions.values())


def test_weights_that_fail_are_reported_and_tried_again_later() -> None:
    world = busy_world()
    world.engine.broken.add(1)
    world.desk.weights = WeightsRef(lineage=0, version=1, path="v1", digest="d1")
    world.run(1.4)
    decoded = world.engine.decoded
    assert (world.loop.level().version, world.loop.level().phase) == (None, "starting")
    assert "hash does not match" in world.loop.level().failure
    assert world.desk.applied[-1].version is None
    world.run(8.0)
    assert world.engine.decoded == decoded
    assert 4 <= world.engine.loads <= 6  # once a reload_s, not once an answer
    world.engine.broken.clear()
    world.run(11.0)
    assert world.loop.level().version == 1
    assert world.loop.level().failure == ""
    assert world.engine.decoded > decoded


def test_nothing_is_decoded_before_the_first_weights() -> None:
    world = World(work=2)
    world.desk.weights = None
    world.run(2.0)
    assert world.loop.level().phase == "starting"
    assert world.engine.decoded == 0


# ---- pace, level, failure


def test_a_paced_replica_keeps_its_declared_speed() -> None:
    pacing = KindPacing(decode_step_s=0.08, prefill_tokens_per_s=1e4, train_tokens_per_s=1e3)
    world = World(work=40, slots=4, step_s=0.01, pacing=pacing)
    world.run(20.0)
    level = world.loop.level()
    assert world.engine.decoded == pytest.approx(20 / 0.08 * 4, rel=0.08)
    assert level.stats.decode_tokens_per_s == pytest.approx(4 / 0.08, rel=0.1)
    assert level.stats.decode_running == pytest.approx(4, rel=0.1)
    assert level.stats.host_lag_share == pytest.approx(0, abs=0.02)
    assert level.host_bound is False
    slow = World(work=40, slots=4, step_s=0.1, pacing=pacing)
    slow.run(20.0)
    assert slow.loop.level().host_bound is True
    assert slow.desk.applied[-1].stats.host_lag_share == pytest.approx(0.2, abs=0.03)
    assert World().loop.level().host_bound is None


class SlowLine(Line):
    """Every exchange takes the replica 20 ms to put together."""

    def send(self, request: ExchangeRequest) -> Pending:
        self.clock.now += 0.02
        return super().send(request)


def test_busy_time_has_what_decoding_takes_and_no_rest() -> None:
    """10 steps of 50 ms with an exchange among them, then 30 s of rest: what comes between two steps counts, rest does not."""
    clock = VirtualClock()
    engine, desk = ToyEngine(clock, slots=1), Desk(slots=1)
    loop = ReplicaLoop(engine, SlowLine(desk, clock), replica="r0", epoch=1, clock=clock, wait=clock.wait)
    desk.pending = [SampleId(0, 5)]  # 58 tokens
    sent = 0
    while not desk.finished:
        loop.tick()
        if engine.decoded == 1:
            sent = len(desk.requests)  # of those before the first step none is part of it
    between = len([r for r in desk.requests[sent:] if r.appends]) - 1  # the last one comes after the last step
    busy = loop.level().stats
    assert (busy.decode_steps, busy.decoded_tokens) == (58, 58)
    assert busy.busy_s == pytest.approx(58 * 0.05 + between * 0.02, abs=0.021)
    assert between >= 8
    while clock.now < 60:
        loop.tick()
    after = loop.level().stats
    assert (after.decode_steps, after.busy_s) == (busy.decode_steps, busy.busy_s)


def test_a_paced_replicas_busy_steps_are_as_long_as_its_pace() -> None:
    pacing = KindPacing(decode_step_s=0.08, prefill_tokens_per_s=1e4, train_tokens_per_s=1e3)
    clock = VirtualClock()
    engine, desk = ToyEngine(clock, slots=4, step_s=0.01), Desk(work=60, slots=4)
    line = SlowLine(desk, clock)
    loop = ReplicaLoop(engine, line, replica="r0", epoch=1, pacing=pacing, clock=clock, wait=clock.wait)
    while clock.now < 30:
        loop.tick()
    stats = loop.level().stats
    assert stats.busy_s / stats.decode_steps == pytest.approx(0.08, rel=0.02)


def test_a_failing_engine_ends_the_loop_and_is_named() -> None:
    world = busy_world()
    world.engine.fails = True
    with pytest.raises(RunError, match="out of memory"):
        world.loop.run()
    assert world.loop.level().phase == "failed"
    assert "out of memory" in world.loop.level().failure


def test_an_engine_that_ends_while_nothing_may_be_decoded_is_noticed() -> None:
    world = World(work=20, fates=["ok", "ok", "ok"], then="mute", timing=LoopTiming(tail_tokens=4))
    world.run(2.0)
    assert world.loop.level().unacknowledged == 2
    assert world.loop.level().held
    world.engine.ended = True
    with pytest.raises(RunError, match="process ended"):
        world.loop.run()
    assert world.loop.level().phase == "failed"


def test_a_flow_that_fails_on_what_it_is_sent_is_not_asked_for_ever() -> None:
    world = World(work=20, fates=["ok"] * 5, then="fails")
    with pytest.raises(RunError, match="flow failed 5 times"):
        world.loop.run()
    assert world.clock.now < 10.0
    assert "IndexError" in world.loop.level().failure
    assert world.loop.level().phase == "failed"


def test_a_flow_that_fails_now_and_then_is_asked_again() -> None:
    world = World(work=20, fates=["ok", "fails", "fails", "fails", "fails"] * 8)
    world.run(120.0, finished=40)
    assert len(world.desk.finished) == 40
    world.check_journal()


def test_in_a_thread_with_real_waits() -> None:
    """The same loop with the real clock, waiting on events; stop ends it."""
    done = threading.Event()
    desk = Desk(work=3)

    class Direct:
        def send(self, request: ExchangeRequest) -> "Answered":
            reply = desk.exchange(request)
            if len(desk.finished) == 6:
                done.set()
            return Answered(reply)

    class Answered:
        def __init__(self, reply: ExchangeReply) -> None:
            self.reply = reply

        def done(self) -> bool:
            return True

        def result(self, timeout_s: float) -> ExchangeReply:
            return self.reply

    loop = ReplicaLoop(ToyEngine(VirtualClock()), Direct(), replica="r0", epoch=1)
    thread = threading.Thread(target=loop.run)
    thread.start()
    assert done.wait(60)
    loop.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert loop.level().phase == "stopped"


# ---- counter and buffer


def test_the_counter_outlives_kill_nine(tmp_path: Path) -> None:
    path = tmp_path / "counters" / "r0-1"
    assert read_counter(path) == 0
    program = (
        "import os, signal, sys; from pathlib import Path; from runtime.rl.counter import TokenCounter;"
        "c = TokenCounter(Path(sys.argv[1])); c.set(7); c.set(2**40 + 5); os.kill(os.getpid(), signal.SIGKILL)"
    )
    ended = subprocess.run([sys.executable, "-c", program, str(path)], timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert read_counter(path) == 2**40 + 5
    path.write_bytes(b"123")  # a full disk: what was decoded is not known, which must not hold anything up
    assert read_counter(path) == 0
    path.write_bytes(b"123456789")
    with pytest.raises(RunError, match="8 bytes"):
        read_counter(path)


def test_the_loop_counts_what_it_decodes(tmp_path: Path) -> None:
    clock = VirtualClock()
    engine, desk = ToyEngine(clock), Desk(work=2)
    counter = TokenCounter(tmp_path / "c")
    loop = ReplicaLoop(engine, Line(desk, clock), replica="r0", epoch=1, counter=counter, clock=clock, wait=clock.wait)
    while len(desk.finished) < 4:
        loop.tick()
    assert read_counter(tmp_path / "c") == engine.decoded == desk.tokens
    counter.close()


@given(
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), st.booleans()), max_size=60),
    ended=st.sets(st.integers(0, 3)),
)
def test_unflushed_joins_runs_of_one_version_and_loses_nothing(
    steps: list[tuple[int, int, bool]], ended: set[int]
) -> None:
    unflushed = Unflushed()
    lengths: dict[SampleId, int] = {}
    versions: dict[SampleId, list[int]] = {}
    for member, version, drop in steps:
        sample = SampleId(0, member)
        if drop:
            unflushed.drop([sample])
            lengths.pop(sample, None)
            versions.pop(sample, None)
        start = lengths.get(sample, 0)
        unflushed.add(append(sample, start, 1, version=version))
        lengths[sample] = start + 1
        versions.setdefault(sample, []).append(version)
    assert unflushed.tokens == sum(lengths.values())
    assert unflushed.longest == max(lengths.values(), default=0)
    for member in ended:
        sample = SampleId(0, member)
        start = lengths.get(sample, 0)
        unflushed.add(append(sample, start, 1, version=9, finished=True))
        lengths[sample] = start + 1
        versions.setdefault(sample, []).append(9)
    running = sum(n for s, n in lengths.items() if s.member not in ended)
    finished = unflushed.take_finished()
    assert {a.sample.member for a in finished} == ended
    assert (unflushed.tokens, unflushed.finished) == (running, 0)
    taken = (*finished, *unflushed.take())
    assert (unflushed.tokens, unflushed.longest, bool(unflushed)) == (0, 0, False)
    for sample, length in lengths.items():
        mine = [a for a in taken if a.sample == sample]
        assert [v for a in mine for v in [a.version] * len(a.tokens)] == versions[sample]
        assert [t for a in mine for t in a.tokens] == [token_of(sample, i) for i in range(length)]
        assert all(a.version != b.version for a, b in itertools.pairwise(mine))
        assert all(b.start == a.start + len(a.tokens) for a, b in itertools.pairwise(mine))
