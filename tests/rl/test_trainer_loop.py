"""The trainer's loop against a fake flow that keeps flow's promises, and breaks the line to it."""

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from planner.record import replace
from runtime.config.schema import AlgorithmSection
from runtime.errors import DeadlineError, LedgerError, RefusedError, RunError, UnreachableError
from runtime.rl.flow.open import kept_steps
from runtime.rl.ledger import KEEP_STEPS
from runtime.rl.model import DecoderConfig, build_seeded
from runtime.rl.pacing import Pacer
from runtime.rl.train import checkpoint
from runtime.rl.train.client import RetryTiming
from runtime.rl.train.loop import Pace, TrainerLoop
from runtime.rl.train.saving import Writes
from runtime.rl.train.schedule import most_unsaved
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import (
    Applied,
    CheckpointMark,
    NextBatch,
    SampleId,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    TrainSample,
    WeightsRef,
)
from runtime.rl.weights import list_generations, read_generation
from runtime.rl.weights.sealed import TensorEntry

QUICK = RetryTiming(first_s=0.001, most_s=0.002)
GIVES_UP = replace(QUICK, deadline_s=0.05)


def batch_of(step: int) -> TrainBatch:
    samples = tuple(
        TrainSample(
            sample=SampleId(step, m),
            prompt_tokens=(3, 4, step % 5),
            tokens=(m, 1),
            logprobs=(-2.0, -1.5),
            versions=(step, step),
            weights=(1.0, 1.0),
            reward=float(m),
            advantage=(-1.0, 1.0)[m],
            finish="eos",
        )
        for m in range(2)
    )
    return TrainBatch(step=step, ids_hash=f"ids-{step}", samples=samples)


class Disk:
    """Writes checkpoints, each once it is told to go on; or is full."""

    def __init__(self, *, full: bool = False) -> None:
        self._full, self._may, self._begun = full, threading.Semaphore(0), threading.Event()
        self._writer = threading.current_thread()

    def go_on(self) -> None:
        """One checkpoint more."""
        self._may.release()

    def wait_begun(self) -> None:
        """Half of the first one that is written beside is there."""
        assert self._begun.wait(60)

    def wait_written(self) -> None:
        """The newest one that is written beside is there, or has failed."""
        self.wait_begun()
        self._writer.join(60)
        assert not self._writer.is_alive()

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
        if threading.current_thread().name != "checkpoint":
            return checkpoint.write(path, tensors)
        with path.open("wb") as file:
            file.write(b"half of it")
        self._writer = threading.current_thread()
        self._begun.set()
        assert self._may.acquire(timeout=60)
        if self._full:
            raise OSError(errno.ENOSPC, "no space left on device")
        return checkpoint.write(path, tensors)


def a_trainer(folder: Path, write: Writes = checkpoint.write, *, of: type[TorchTrainer] = TorchTrainer) -> TorchTrainer:
    shapes = {
        "model_type": "qwen3",
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "head_dim": 8,
    }
    return of(
        build_seeded(DecoderConfig.from_hf(shapes), 0, torch.float64),
        algorithm=AlgorithmSection(),
        temperature=1.0,
        checkpoints=folder / "checkpoints",
        weights=folder / "weights",
        write=write,
    )


class Flow:
    """What flow promises a trainer, in memory: the reserved batch until it is applied, settled at hello, idempotent.

    `fault(call)` runs before each call and may raise; `after(call)` runs when its effect is done and may raise: an answer
    lost on the way. `orders` are given before batches.
    """

    def __init__(self, *, limit: int = 3) -> None:
        self.limit, self.lineage = limit, 0
        self.done = 0  # steps applied
        self.reserved: TrainBatch | None = None
        self.publications: list[WeightsRef] = []
        self.calls: list[str] = []
        self.metrics: dict[int, dict[str, float]] = {}
        self.orders: deque[NextBatch] = deque()
        self.fault: Callable[[str], None] = lambda call: None
        self.after: Callable[[str], None] = lambda call: None
        self.hellos: list[TrainerHello] = []

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        self._enter("hello")
        self.hellos.append(hello)
        if self.reserved is not None and self._mark(self.reserved.step) in hello.complete:
            self.done, self.reserved = self.done + 1, None
        load = self.done - 1 if self.done else None
        assert load is None or self._mark(load) in hello.complete
        self.after("hello")
        return TrainerWelcome(
            load_step=load, lineage=self.lineage, published=self.publications[-1] if self.publications else None
        )

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        self._enter("next_batch")
        if self.orders:
            return self.orders.popleft()
        if self.done >= self.limit:
            return NextBatch(order="stop")
        self.reserved = batch_of(self.done)
        self.after("next_batch")
        return NextBatch(order="train", batch=self.reserved)

    def applied(self, applied: Applied) -> None:
        self._enter("applied")
        if applied.step == self.done:
            assert self.reserved is not None
            assert applied.ids_hash == self.reserved.ids_hash
            self.done, self.reserved = self.done + 1, None
            self.metrics[applied.step] = dict(applied.metrics)
        self.after("applied")

    def published(self, ref: WeightsRef, epoch: int) -> None:
        self._enter("published")
        assert ref.version == self.done, "weights are published only after their step is applied"
        read_generation(ref)
        self.publications.append(ref)
        self.after("published")

    def _mark(self, step: int) -> CheckpointMark:
        return CheckpointMark(step=step, ids_hash=f"ids-{step}", lineage=self.lineage)

    def _enter(self, call: str) -> None:
        self.calls.append(call)
        self.fault(call)


def a_loop(folder: Path, flow: Flow, **changes: object) -> TrainerLoop:
    given: dict[str, object] = {"name": "trainer-1", "epoch": 1, "timing": QUICK}
    trainer = changes.pop("trainer", None) or a_trainer(folder)
    return TrainerLoop(trainer, flow, **(given | changes))  # type: ignore[arg-type]


def test_a_run_in_order(tmp_path):
    flow, ready = Flow(limit=2), []
    loop = a_loop(tmp_path, flow, on_ready=lambda: ready.append(list(flow.calls)))
    assert loop.run() == "stopped by flow"
    step = ["next_batch", "applied", "published"]
    assert flow.calls == ["hello", "published", *step, *step, "next_batch"]
    assert [r.version for r in flow.publications] == [0, 1, 2]
    assert ready == [["hello", "published"]]
    assert flow.hellos[0].pid == os.getpid()
    level = loop.level()
    assert (level.phase, level.version, level.failure) == ("stopped", 2, "")
    assert level.tokens_per_s > 0
    assert flow.metrics[1]["batch_tokens"] == 10
    for name in ("reward_mean", "step_s", "checkpoint_s", "publish_s", "paced_wait_s", "cycle_s"):
        assert name in flow.metrics[1]


class FlowAhead(Flow):
    """A flow that is also asked ahead: its answer comes with the publication, unless that is one of `late`."""

    def __init__(self, *, limit: int, late: tuple[int, ...] = ()) -> None:
        super().__init__(limit=limit)
        self.late = late

    def ask_ahead(self, trainer: str, epoch: int) -> "FlowAhead":
        self.calls.append("ask_ahead")
        return self

    def taken(self) -> TrainBatch | None:
        assert len(self.publications) == self.done + 1, "weights are published before the next step begins"
        if self.done >= self.limit or self.done in self.late:
            return None
        self.reserved = batch_of(self.done)
        return self.reserved


def test_the_next_batch_is_asked_for_while_weights_are_published(tmp_path):
    flow = FlowAhead(limit=4, late=(2,))
    assert a_loop(tmp_path, flow).run() == "stopped by flow"
    made = ["applied", "ask_ahead", "published"]
    assert flow.calls == ["hello", "published", "next_batch", *made, *made, "next_batch", *made, *made, "next_batch"]
    assert sorted(flow.metrics) == [0, 1, 2, 3]
    assert {"wait_s", "train_s", "applied_s"} <= set(flow.metrics[3])


def test_the_checkpoint_is_complete_before_the_step_is_called_applied(tmp_path):
    flow = Flow(limit=3)
    seen = []

    def look(call: str) -> None:
        if call == "applied":
            seen.append(a_trainer(tmp_path).complete_checkpoints()[-1])

    flow.fault = look
    a_loop(tmp_path, flow).run()
    assert seen == [CheckpointMark(step=i, ids_hash=f"ids-{i}") for i in range(3)]


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


@pytest.mark.parametrize("point", range(11))
def test_killed_anywhere_the_next_trainer_ends_with_the_same_weights(tmp_path, point):
    straight = Flow(limit=3)
    a_loop(tmp_path / "straight", straight).run()

    flow, count = Flow(limit=3), iter(range(1000))

    def die(call: str) -> None:
        if next(count) == point:
            raise Killed

    # Even points: killed before flow hears the call; odd: after flow did it, before the answer arrives.
    if point % 2:
        flow.after = die
    else:
        flow.fault = die
    folder = tmp_path / "broken"
    with pytest.raises(Killed):
        a_loop(folder, flow).run()
    flow.fault = flow.after = lambda call: None
    a_loop(folder, flow, epoch=2).run()
    assert flow.done == 3
    # Same versions, same bits; a version may be announced again, never with another hash.
    digests = {(r.version, r.digest) for r in flow.publications}
    assert digests <= {(r.version, r.digest) for r in straight.publications}
    assert flow.publications[-1].digest == straight.publications[-1].digest


def test_flow_away_for_a_while_costs_nothing(tmp_path):
    flow, count = Flow(limit=3), iter(range(1000))

    def flaky(call: str) -> None:
        n = next(count)
        if n % 3 == 1:
            raise UnreachableError("flow is not there")
        if n % 3 == 2:
            raise DeadlineError("flow does not answer")

    flow.fault = flaky
    a_loop(tmp_path, flow).run()
    assert [r.version for r in flow.publications] == [0, 1, 2, 3]


def test_an_answer_lost_on_the_way_is_asked_for_again_not_trained_again(tmp_path):
    flow, lost = Flow(limit=3), set()

    def lose(call: str) -> None:
        key = (call, flow.done)
        if key not in lost:
            lost.add(key)
            raise UnreachableError("the answer was lost")

    flow.after = lose
    a_loop(tmp_path, flow).run()
    assert sorted(flow.metrics) == [0, 1, 2]
    assert {r.version for r in flow.publications} == {0, 1, 2, 3}


def test_flow_away_for_good_ends_with_a_deadline_that_names_the_call(tmp_path):
    flow = Flow()

    def gone(call: str) -> None:
        if call == "applied":
            raise UnreachableError("flow is not there")

    flow.fault = gone
    loop = a_loop(tmp_path, flow, timing=GIVES_UP)
    with pytest.raises(DeadlineError, match="applied of trainer-1"):
        loop.run()
    assert loop.level().phase == "failed"
    assert "applied" in loop.level().failure


@pytest.mark.parametrize("error", [RefusedError("a newer trainer has taken over"), LedgerError("disk full")])
def test_a_refusal_is_an_answer(tmp_path, error):
    flow = Flow()

    def refuse(call: str) -> None:
        if call == "next_batch":
            raise error

    flow.fault = refuse
    with pytest.raises(type(error)):
        a_loop(tmp_path, flow, timing=RetryTiming(deadline_s=1e9)).run()
    assert flow.calls.count("next_batch") == 1


def test_a_checkpoint_every_third_step_is_written_beside_and_one_before_it_leaves(tmp_path):
    disk, whole, said = Disk(), [], []

    class Hears(Flow):
        def applied(self, applied: Applied) -> None:
            said.append(applied.checkpointed)
            super().applied(applied)

    flow = Hears(limit=5)
    trainer = a_trainer(tmp_path, disk)

    def look(call: str) -> None:
        if call != "next_batch":
            return
        if flow.done == 4:
            disk.go_on()
            disk.wait_written()
        whole.append([m.step for m in trainer.complete_checkpoints()])

    flow.fault = look
    a_loop(tmp_path, flow, trainer=trainer, checkpoint_every=3).run()
    assert said == [False] * 5, "the one of step 2 is written while step 3 is made, and sealed after step 4"
    assert whole == [[], [], [], [], [], [2]]
    assert [m.step for m in trainer.complete_checkpoints()] == [2, 4], "the last one as it left"
    assert flow.metrics[4]["checkpoint_write_s"] > 0
    assert [flow.metrics[i]["checkpoint_write_s"] for i in range(4)] == [0.0] * 4

    asked = []
    again = Flow(limit=7)
    again.done = 5

    def quiesce(call: str) -> None:
        if call == "next_batch" and again.done == 7:
            asked.append([m.step for m in a_trainer(tmp_path).complete_checkpoints()])
            if len(asked) == 1:
                again.orders.append(NextBatch(order="quiesce"))

    again.fault = quiesce
    a_loop(tmp_path, again, checkpoint_every=3).run()
    assert asked[-1] == [4, 5, 6], "of step 5, which was due, and of the newest"


def test_a_checkpoint_that_is_due_waits_for_the_one_before(tmp_path):
    """A disk that takes as long as nobody waits for it: three steps are in no complete checkpoint, and never more."""
    disk = Disk()

    class Eager(TorchTrainer):
        """The disk moves when the loop waits for it, and not before."""

        def seal_checkpoint(self) -> float:
            disk.go_on()
            return super().seal_checkpoint()

    flow, trainer, unsaved = Flow(limit=9), a_trainer(tmp_path, disk, of=Eager), []

    def look(call: str) -> None:
        if call == "published":
            newest = max((m.step for m in trainer.complete_checkpoints()), default=-1)
            unsaved.append(flow.done - 1 - newest)

    flow.fault = look
    a_loop(tmp_path, flow, trainer=trainer, checkpoint_every=2).run()
    assert unsaved == [0, 1, 2, 3, 2, 3, 2, 3, 2, 3]
    assert max(unsaved) == most_unsaved(2) == kept_steps(2) - KEEP_STEPS
    assert [m.step for m in trainer.complete_checkpoints()] == [5, 7, 8]


def test_idle_turns_seal_what_is_written(tmp_path):
    disk, flow = Disk(), Flow(limit=2)
    trainer, whole = a_trainer(tmp_path, disk), []

    def look(call: str) -> None:
        if call == "next_batch" and flow.done == 2 and len(whole) < 2:
            whole.append([m.step for m in trainer.complete_checkpoints()])
            flow.orders.append(NextBatch(order="wait"))
            disk.go_on()
            disk.wait_written()

    flow.fault = look
    a_loop(tmp_path, flow, trainer=trainer, checkpoint_every=2).run()
    assert whole == [[], [1]]


def test_a_full_disk_ends_the_trainer_at_the_next_step_and_leaves_nothing(tmp_path):
    disk, flow = Disk(full=True), Flow(limit=5)
    trainer = a_trainer(tmp_path, disk)

    def look(call: str) -> None:
        if call == "next_batch" and flow.done == 2:
            disk.go_on()
            disk.wait_written()

    flow.fault = look
    loop = a_loop(tmp_path, flow, trainer=trainer, checkpoint_every=2)
    with pytest.raises(OSError, match="no space left"):
        loop.run()
    assert (loop.level().phase, flow.done) == ("failed", 2)
    assert "no space left" in loop.level().failure
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_trainer_that_fails_otherwise_leaves_nothing_half_written(tmp_path):
    disk, flow = Disk(), Flow(limit=5)

    def refuse(call: str) -> None:
        if call == "next_batch" and flow.done == 2:
            disk.wait_begun()
            raise RefusedError("a newer trainer has taken over")

    flow.fault = refuse
    with pytest.raises(RefusedError):
        a_loop(tmp_path, flow, trainer=a_trainer(tmp_path, disk), checkpoint_every=2).run()
    assert list((tmp_path / "checkpoints").iterdir()) == []
    disk.go_on()


def test_stop_while_flow_is_away_ends_what_was_begun(tmp_path):
    disk, flow = Disk(), Flow(limit=5)
    trainer = a_trainer(tmp_path, disk)
    loop = a_loop(
        tmp_path, flow, trainer=trainer, checkpoint_every=2, timing=RetryTiming(first_s=600, deadline_s=10_000)
    )

    def away(call: str) -> None:
        if call == "next_batch" and flow.done == 3:
            loop.stop()
            disk.go_on()
            raise UnreachableError("flow is not there")

    flow.fault = away
    assert loop.run() == "asked to stop"
    assert [m.step for m in trainer.complete_checkpoints()] == [1]


def test_orders(tmp_path):
    flow, phases = Flow(limit=1), []
    flow.orders.extend(
        [NextBatch(order="wait", waits_for="a 32nd group"), NextBatch(order="quiesce"), NextBatch(order="train")]
    )
    loop = a_loop(tmp_path, flow)

    def look(call: str) -> None:
        phases.append((call, loop.level().phase, loop.level().waits_for))

    flow.fault = look
    loop.run()
    asked = [(phase, waits) for call, phase, waits in phases if call == "next_batch"]
    assert asked[:3] == [("starting", ""), ("waiting", "a 32nd group"), ("quiesced", "")]
    assert ("applied", "training", "") in phases
    assert flow.done == 1


def test_stop_ends_a_wait_for_flow_at_once(tmp_path):
    flow, asked = Flow(), threading.Event()

    def away(call: str) -> None:
        asked.set()
        raise UnreachableError("flow is not there")

    flow.fault = away
    loop = a_loop(tmp_path, flow, timing=RetryTiming(first_s=600, most_s=600, deadline_s=10_000))
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(loop.run()))
    thread.start()
    assert asked.wait(60)
    loop.stop()
    thread.join(60)
    assert ended == ["asked to stop"]
    assert loop.level().phase == "stopped"


def test_a_step_said_again_after_flow_forgot_it(tmp_path):
    flow = Flow(limit=2)
    again = {"left": 1}

    def forget(call: str) -> None:
        # Flow was restored from a copy older than the last word of the trainer.
        if call == "next_batch" and flow.done == 1 and again["left"]:
            again["left"] = 0
            flow.done = 0

    flow.fault = forget
    a_loop(tmp_path, flow).run()
    assert flow.metrics[0] == {"settled": 1.0}
    assert [r.version for r in flow.publications] == [0, 1, 1, 2]


def test_a_batch_of_another_version_is_an_error(tmp_path):
    flow = Flow()
    flow.orders.append(NextBatch(order="train", batch=batch_of(5)))
    with pytest.raises(RunError, match="another version"):
        a_loop(tmp_path, flow).run()


def test_old_generations_are_collected(tmp_path):
    flow = Flow(limit=6)
    a_loop(tmp_path, flow, weights=tmp_path / "weights", eta=1).run()
    assert [r.version for r in list_generations(tmp_path / "weights")] == [3, 4, 5, 6]


def test_a_lineage_forked_by_flow(tmp_path):
    first = Flow(limit=2)
    a_loop(tmp_path, first).run()

    class Forked(Flow):
        def hello(self, hello: TrainerHello) -> TrainerWelcome:
            self.calls.append("hello")
            return TrainerWelcome(load_step=0, lineage=1, published=first.publications[-1], load_lineage=0)

    flow = Forked(limit=2)
    flow.done, flow.lineage = 1, 1
    a_loop(tmp_path, flow, epoch=2).run()
    assert [(r.lineage, r.version) for r in flow.publications] == [(1, 1), (1, 2)]
    assert flow.publications[-1].version == first.publications[-1].version


class Clock:
    """Time that passes only when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False


def test_paced_steps_last_as_long_as_declared(tmp_path):
    clock, flow = Clock(), Flow(limit=4)
    pace = Pace(pacer=Pacer(clock.wait, clock=clock), step_s=lambda tokens: tokens / 4)
    loop = a_loop(tmp_path, flow, pace=pace, clock=clock)
    loop.run()
    assert clock.now == pytest.approx(4 * 10 / 4)  # 10 tokens a step at 4 tokens/s
    assert loop.level().tokens_per_s == pytest.approx(4.0)
    assert loop.level().lag_share == pytest.approx(0.0)
    assert replace(loop.level(), age_s=0.0).step_s == pytest.approx(2.5)
    assert (loop.level().steps, loop.level().busy_tokens) == (4, 40)
    assert loop.level().busy_s == pytest.approx(10.0)
