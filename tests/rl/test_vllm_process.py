"""The engine's process without vLLM: what the replica's side keeps true, and that nothing outlives the replica.

`tests.rl.toy_core` stands in vLLM's place; warden, wire, loop and engine are the real ones.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from planner.record import replace
from runtime.backends.ray.procs import Watched, group_members
from runtime.errors import ConfigError, DeadlineError, RunError, WeightsError
from runtime.rl.engine.spec import VllmSpec
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.engine.vllm_host.figures import scheduler_level, stats_level
from runtime.rl.engine.vllm_host.wire import Closed, Line, Message
from runtime.rl.types import Append, Lease, SampleId, WeightsRef
from runtime.runs import ProcessMark, mark
from tests.rl.toy_core import BABBLE, CRASH, HANG, SHARE, next_token, shared_name

pytestmark = pytest.mark.kill
TOY = "tests.rl.toy_core"
EOS = 1
SPEC = VllmSpec(model={}, slots=4, max_length=64, eos_ids=frozenset({EOS}), seed=0, token_s=120.0)


def ref(version: int, path: str = "good") -> WeightsRef:
    return WeightsRef(lineage=0, version=version, path=path, digest=f"d{version}")


def lease(group: int, *, tokens: tuple[int, ...] = (), longest: int = 8, first: int = 3, epoch: int = 1) -> Lease:
    return Lease(
        sample=SampleId(group, 0), epoch=epoch, prompt_tokens=(first, group), tokens=tokens, max_new_tokens=longest
    )


@pytest.fixture
def engine() -> Iterator[VllmEngine]:
    made = VllmEngine(SPEC, program=TOY)
    yield made
    made.close()


def drive(made: VllmEngine, trace: dict[SampleId, list[Append]], *, steps: int | None = None) -> None:
    while made.held() and steps != 0:
        for append in told(made):
            had = trace.setdefault(append.sample, [])
            assert not had or append.start == had[-1].start + len(had[-1].tokens)
            had.append(append)
        steps = None if steps is None else steps - 1


def told(made: VllmEngine) -> tuple[Append, ...]:
    """The next step that tells something: on a busy machine one may end before the process has had its turn."""
    while not (appends := made.step()):
        pass
    return appends


def expected(one: Lease, appends: list[Append]) -> list[int]:
    """By the toy's rule, each token under the version its append says."""
    tokens = [*one.prompt_tokens, *one.tokens]
    for append in appends:
        for token in append.tokens:
            assert token == next_token(tokens, append.version)
            tokens.append(token)
        assert set(append.logprobs) <= {-float(append.version)}
    return tokens[len(one.prompt_tokens) :]


def ended(group: tuple[ProcessMark, ...], seconds: float = 60.0) -> tuple[ProcessMark, ...]:
    """Those of the group that still live after so long."""
    with Watched(group) as watched:
        return watched.wait(seconds)


# ---- the replica's side


def test_tokens_keep_the_version_of_the_weights_that_made_them(engine: VllmEngine) -> None:
    """Steps under way when weights are swapped are told under the old version; nothing is lost, nothing told twice."""
    engine.load_weights(ref(0))
    leases = [lease(g, longest=12) for g in range(3)]
    engine.add(leases)
    trace: dict[SampleId, list[Append]] = {}
    drive(engine, trace, steps=3)
    engine.load_weights(ref(5))
    drive(engine, trace, steps=3)
    engine.load_weights(ref(6))
    drive(engine, trace)
    for one in leases:
        appends = trace[one.sample]
        assert len(expected(one, appends)) == 12
        assert sorted({a.version for a in appends}) == [0, 5, 6]
        assert [a.finished for a in appends if a.finished] == ["length"]
    assert engine.stats().decoded_tokens == 36
    assert engine.stats().updates == 3
    assert engine.stats().plain_step_s == 0.5 * engine.stats().plain_steps > engine.stats().plain_host_s > 0


def test_keep_goes_on_where_it_was() -> None:
    made = VllmEngine(replace(SPEC, kv_on_update="keep"), program=TOY)
    try:
        made.load_weights(ref(0))
        one = lease(2, longest=12)
        made.add([one])
        trace: dict[SampleId, list[Append]] = {}
        drive(made, trace, steps=2)
        prefilled = made.stats().prefill_tokens
        made.load_weights(ref(1))
        drive(made, trace)
        assert len(expected(one, trace[one.sample])) == 12
        assert made.stats().prefill_tokens == prefilled
    finally:
        made.close()


def test_the_process_is_told_how_many_to_run(engine: VllmEngine) -> None:
    engine.load_weights(ref(0))
    engine.limit(1)
    engine.add([lease(g) for g in range(3)])
    assert (engine.free_slots(), engine.stats().slots) == (0, 1)
    while engine.held():
        assert len(engine.step()) <= 1
    engine.limit(None)
    engine.add([lease(g) for g in range(10, 14)])
    assert max(len(told(engine)) for _ in range(3)) == 4


def test_it_stops_when_it_is_not_asked(engine: VllmEngine) -> None:
    """A replica that may not decode gets at most the steps it had leave for."""
    engine.load_weights(ref(0))
    engine.add([lease(1, longest=60)])
    told(engine)
    told(engine)
    threading.Event().wait(0.3)
    assert len(drain_steps(engine)) <= SPEC.ahead


def drain_steps(engine: VllmEngine) -> list[Any]:
    """What the process had told of its own accord."""
    found = []
    while (message := engine._process.receive(0.0)) is not None:
        found.append(message)
    return found


def told_ahead(engine: VllmEngine, seconds: float = 30.0) -> bool:
    """Whether the process has told more than was taken: read with the step before it, or still in the socket."""
    line = engine._process._line
    return bool(line._buffer or select.select([line._end], [], [], seconds)[0])


def test_aborted_samples_are_silent_and_come_back(engine: VllmEngine) -> None:
    engine.load_weights(ref(0))
    engine.add([lease(1, longest=40), lease(2, longest=40)])
    trace: dict[SampleId, list[Append]] = {}
    drive(engine, trace, steps=4)
    assert engine.abort([SampleId(1, 0), SampleId(9, 9)]) == (SampleId(1, 0),)
    so_far = tuple(t for a in trace[SampleId(1, 0)] for t in a.tokens)
    for _ in range(4):
        assert {a.sample for a in engine.step()} <= {SampleId(2, 0)}
    again = lease(1, tokens=so_far, longest=40, epoch=2)
    engine.add([again])
    resumed: dict[SampleId, list[Append]] = {}
    drive(engine, resumed)
    assert resumed[SampleId(1, 0)][0].start == len(so_far)
    assert len(expected(again, resumed[SampleId(1, 0)])) == 40


def test_refused_weights_leave_it_without_a_version_and_its_samples_waiting(engine: VllmEngine) -> None:
    engine.load_weights(ref(0))
    one = lease(4, longest=9)
    engine.add([one])
    trace: dict[SampleId, list[Append]] = {}
    drive(engine, trace, steps=2)
    with pytest.raises(WeightsError, match="hash"):
        engine.load_weights(ref(1, "bad"))
    assert (engine.version, engine.digest, engine.step(), engine.held()) == (None, None, (), (one.sample,))
    engine.load_weights(ref(2))
    drive(engine, trace)
    assert len(expected(one, trace[one.sample])) == 9


def test_a_sample_that_ends_as_weights_are_swapped_is_held_until_it_was_told(engine: VllmEngine) -> None:
    """A replica takes a step only while its engine holds something: were it not held, nobody would hear of its end."""
    engine.load_weights(ref(0))
    one = lease(1, longest=2)
    engine.add([one])
    trace: dict[SampleId, list[Append]] = {}
    drive(engine, trace, steps=1)
    engine.load_weights(ref(1))  # the process tells all that is left of it
    assert engine.held() == (one.sample,)
    drive(engine, trace)
    assert len(expected(one, trace[one.sample])) == 2
    assert [(a.finished, a.version) for a in trace[one.sample]][-1] == ("length", 0)
    assert engine.held() == engine.step() == ()


def test_a_sample_that_ended_as_weights_were_swapped_can_be_given_back(engine: VllmEngine) -> None:
    engine.load_weights(ref(0))
    one = lease(1, longest=2)
    engine.add([one])
    told(engine)
    engine.load_weights(ref(1))
    assert engine.abort([one.sample]) == (one.sample,)
    assert engine.held() == engine.step() == ()


def test_it_generates_after_every_sleep_though_steps_were_under_way(engine: VllmEngine) -> None:
    """The leave that those steps took is counted: after as many sleeps as it may be steps ahead it would have none left."""
    one = lease(1, longest=40)
    engine.add([one])
    trace: dict[SampleId, list[Append]] = {}
    for version in range(SPEC.ahead + 1):
        engine.load_weights(ref(version))
        drive(engine, trace, steps=3)
        assert trace[one.sample][-1].version == version
        assert told_ahead(engine)
        engine.sleep()
        engine.wake()
    engine.load_weights(ref(9))
    drive(engine, trace)
    assert len(expected(one, trace[one.sample])) == 40


def test_sleeping_leaves_no_version(engine: VllmEngine) -> None:
    engine.load_weights(ref(0))
    engine.add([lease(1)])
    assert engine.sleep() is False
    engine.wake()
    assert engine.version is None
    assert engine.step() == ()
    engine.load_weights(ref(0))
    assert told(engine)


# ---- deadlines


def test_an_engine_that_hangs_is_reported_and_ended() -> None:
    made = VllmEngine(replace(SPEC, token_s=1.0), program=TOY)
    made.load_weights(ref(0))
    made.add([lease(1, first=HANG)])
    group = group_members(made.process_group)
    with pytest.raises(DeadlineError, match="generate a token"):
        drive(made, {})
    assert ended(group) == ()


def test_an_engine_that_is_stopped_does_not_load_for_ever() -> None:
    made = VllmEngine(replace(SPEC, load_s=1.0), program=TOY)
    os.kill(made.facts["pid"], signal.SIGSTOP)
    group = group_members(made.process_group)
    with pytest.raises(DeadlineError, match="load the weights within 1 s"):
        made.load_weights(ref(0))
    assert ended(group) == ()
    made.close()


def test_a_failure_is_told_in_its_own_words() -> None:
    with pytest.raises(RunError, match="this seed does not start"):
        VllmEngine(replace(SPEC, seed=666), program=TOY)
    made = VllmEngine(SPEC, program=TOY)
    made.load_weights(ref(0))
    made.add([lease(1, first=CRASH)])
    with pytest.raises(RunError, match="the toy crashed"):
        drive(made, {})


def test_a_failure_that_nobody_had_read_is_told_when_a_command_finds_the_engine_ended() -> None:
    made = VllmEngine(SPEC, program=TOY)
    members = group_members(made.process_group)
    made._process.send({"kind": "nonsense"})
    assert ended(members) == ()
    with pytest.raises(RunError, match="does not know this command"):
        made.limit(1)


def test_an_engine_killed_from_outside_is_noticed() -> None:
    made = VllmEngine(SPEC, program=TOY)
    made.load_weights(ref(0))
    made.add([lease(1, longest=50)])
    os.kill(made.facts["pid"], signal.SIGKILL)
    with pytest.raises(RunError, match="ended"):
        drive(made, {})


# ---- nothing outlives the replica

REPLICA = """
import sys
from runtime.rl.engine.vllm_engine import VllmEngine
from tests.rl.test_vllm_process import SPEC, TOY, lease, ref, told
from tests.rl.toy_core import BABBLE
made = VllmEngine(SPEC, program=TOY)
made.load_weights(ref(0))
made.add([lease(1, first=BABBLE, longest=60)])
told(made)
print(made.process_group, made.facts["pid"], flush=True)
sys.stdin.read()
"""


def start_replica(source: str = REPLICA) -> tuple["subprocess.Popen[str]", int, int]:
    """A process with an engine of its own; its engine's process group and pid."""
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    )
    assert process.stdout is not None
    group, pid = map(int, process.stdout.readline().split())
    return process, group, pid


@pytest.mark.parametrize("victim", ["replica", "warden"])
def test_kill_9_of_replica_or_warden_leaves_no_engine(victim: str) -> None:
    """The engine has a child of its own that nobody told to die: the warden's end takes it when the replica is killed."""
    replica, group, engine_pid = start_replica()
    try:
        members = group_members(group)
        assert {group, engine_pid} < {m.pid for m in members}
        assert os.getpgid(engine_pid) == group != os.getpgid(replica.pid)
        engine = tuple(m for m in members if m.pid in {group, engine_pid})
        os.kill(replica.pid if victim == "replica" else group, signal.SIGKILL)
        assert ended(members if victim == "replica" else engine) == ()
    finally:
        replica.kill()
        replica.wait(60.0)
        for m in group_members(group):
            with Watched([m]) as left:
                left.signal(signal.SIGKILL)


def test_closing_twice_is_harmless_and_ends_everything() -> None:
    made = VllmEngine(SPEC, program=TOY)
    made.load_weights(ref(0))
    made.add([lease(1, first=BABBLE)])
    told(made)
    members = group_members(made.process_group)
    assert len(members) >= 2
    made.close()
    made.close()
    assert ended(members) == ()
    assert mark(made.process_group) is None


@pytest.mark.parametrize("how", ["close", "kill the engine", "stop the warden"])
def test_shared_memory_ends_with_the_engine(how: str) -> None:
    """A killed process removes nothing: what knows of its shared memory must outlive it by a moment."""
    made = VllmEngine(SPEC, program=TOY)
    made.load_weights(ref(0))
    made.add([lease(1, first=SHARE, longest=60)])
    told(made)
    shared = Path("/dev/shm", shared_name(made.facts["pid"]))
    members = group_members(made.process_group)
    assert shared.exists()
    if how == "kill the engine":
        os.kill(made.facts["pid"], signal.SIGKILL)
        assert ended(members) == ()
    elif how == "stop the warden":
        os.kill(made.process_group, signal.SIGTERM)
        assert ended(members) == ()
    made.close()
    assert ended(members) == ()
    assert not shared.exists()


# ---- wire and figures


def test_frames_survive_two_full_buffers() -> None:
    """Both sides send more than any buffer holds at the same time, and both arrive."""
    ours, theirs = (Line(s) for s in socket.socketpair())
    big = {"kind": "add", "requests": [[1, list(range(300_000)), 4]]}
    arrived: list[Message | None] = []

    def speak(line: Line) -> None:
        line.send(big)
        arrived.append(line.receive(60.0))

    other = threading.Thread(target=speak, args=(theirs,))
    other.start()
    speak(ours)
    other.join(60.0)
    assert arrived == [big, big]
    theirs.close()
    with pytest.raises(Closed):
        ours.receive(60.0)
    ours.close()


class _Named:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


def test_figures_under_their_old_and_new_names() -> None:
    new = _Named(num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.5)
    old = _Named(num_running_reqs=3, num_waiting_reqs=2, gpu_cache_usage=0.5)
    scraped = {
        "vllm:num_requests_running": 3,
        "vllm:num_requests_waiting": 2,
        "vllm:gpu_cache_usage_perc": 0.5,
    }
    for stats in (new, old, scraped):
        assert stats_level(stats) == {"running": 3.0, "waiting": 2.0, "kv_used": 0.5}
    assert stats_level({}) == {"running": None, "waiting": None, "kv_used": None}
    scheduler = _Named(running=[1, 2], waiting=[3], skipped_waiting=[4], kv_cache_manager=_Named(usage=0.25))
    assert scheduler_level(scheduler) == {"running": 2, "waiting": 2, "kv_used": 0.25}
    pool = _Named(running=[], waiting=[], kv_cache_manager=_Named(block_pool=_Named(get_usage=lambda: 0.75)))
    assert scheduler_level(pool) == {"running": 0, "waiting": 0, "kv_used": 0.75}
    assert scheduler_level(_Named()) == {"running": None, "waiting": None, "kv_used": None}


def test_a_spec_that_vllm_cannot_serve_is_refused() -> None:
    for changes in ({"dtype": "float64"}, {"slots": 0}, {"kv_on_update": "drop"}):
        with pytest.raises(ConfigError):
            replace(SPEC, **changes)
