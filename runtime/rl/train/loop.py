"""The life of a trainer: ask flow for a batch, train, checkpoint, say so, publish.

Order of a step: RESERVE(k, ids) by flow -> compute -> checkpoint(k) whose manifest holds the ids' hash -> APPLIED(k) ->
publish. Killed between any two, the next trainer's hello lets flow settle or repeat exactly this step.

With a checkpoint every n > 1 steps it is written beside the training: a step that is due costs the copy of its state, and the one
before, if it is still being written, is waited for. So at most 2 n - 1 applied steps (`schedule.most_unsaved`) are in no complete
checkpoint. A crash loses none of them: they are made again, from the same batches and in a new lineage. A trainer that is asked to
wait or to leave saves first.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from planner.record import record
from runtime.errors import RunError
from runtime.rl.train.client import AsksAhead, Interrupted, PendingBatch, RetryTiming, TrainerFlow, patiently
from runtime.rl.train.schedule import checkpoint_due
from runtime.rl.types import Applied, CheckpointMark, StepMetrics, TrainBatch, TrainerHello, WeightsRef
from runtime.rl.weights import collect
from runtime.rl.weights.publisher import DirectPublisher
from runtime.rl.weights.sender import WeightsSource

T = TypeVar("T")
TrainerPhase = Literal["starting", "waiting", "training", "quiesced", "stopped", "failed"]
RATE_STEPS = 10  # tokens/s is over the last steps
IDLE_S = 0.05  # at least between two questions that brought no batch


class TrainerWork(WeightsSource, Protocol):
    """What the loop needs of a trainer: `runtime.rl.protocols.Trainer`, its place on disk, its weights one by one."""

    def complete_checkpoints(self) -> tuple[CheckpointMark, ...]: ...

    def restore(self, step: int | None, *, lineage: int, load_lineage: int | None = None) -> None: ...

    def train_step(self, batch: TrainBatch) -> StepMetrics: ...

    def save_checkpoint(self, ids_hash: str) -> str: ...

    def begin_checkpoint(self, ids_hash: str) -> bool: ...

    @property
    def checkpoint_written(self) -> bool: ...

    def seal_checkpoint(self) -> float: ...

    def drop_checkpoint(self) -> None: ...

    def publish(self) -> WeightsRef: ...

    def idle(self) -> None: ...


class StepPacer(Protocol):
    """Holds work to a declared speed (`runtime.rl.pacing.Pacer`)."""

    @property
    def lag_share(self) -> float | None: ...

    def begin(self) -> None: ...

    def charge(self, seconds: float) -> None: ...

    def idle(self) -> None: ...


@record
class Pace:
    """A pacer and what a step on so many tokens (prompts and responses) takes at the declared speed, in seconds."""

    pacer: StepPacer
    step_s: Callable[[int], float]


@record
class TrainerLevel:
    """A trainer as it is now, for its host process."""

    phase: TrainerPhase
    version: int
    lineage: int
    tokens_per_s: float  # prompt and response tokens over the last steps, their whole cycle; 0 before the first
    step_s: float | None  # of the last step: gradients, update, checkpoint and pace
    lag_share: float | None  # paced: how far behind its clock
    waits_for: str = ""
    age_s: float = 0.0  # since the loop last moved
    failure: str = ""
    steps: int = 0  # made here
    busy_s: float = 0.0  # of those steps, their whole cycle: gradients to publication, pace included, no wait for data
    busy_tokens: int = 0  # prompt and response tokens of those steps


class TrainerLoop:
    """Runs one trainer against flow until it is told to stop. `run` in one thread; `stop` and `level` from any."""

    def __init__(
        self,
        trainer: TrainerWork,
        flow: TrainerFlow,
        *,
        name: str,
        epoch: int,
        weights: Path | None = None,
        direct: DirectPublisher | None = None,
        eta: int = 0,
        checkpoint_every: int = 1,
        pace: Pace | None = None,
        timing: RetryTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        on_ready: Callable[[], None] | None = None,
    ) -> None:
        """`weights`: where generations older than version - eta - 2 are removed after each publication.
        `direct`: sends weights straight to engines; without it they go by disk alone. `checkpoint_every`: steps between two
        checkpoints; 1: each is complete before its step is called applied, else it is written beside the training. `on_ready` is
        called once, when the first weights are published."""
        self._trainer, self._flow, self._name, self._epoch = trainer, flow, name, epoch
        self._weights, self._direct, self._eta, self._pace = weights, direct, eta, pace
        self._checkpoint_every = checkpoint_every
        self._unsaved = ""  # ids_hash of the newest step when it is in no complete checkpoint
        self._begun: tuple[int, str] | None = None  # step and ids_hash of the checkpoint that is being written
        self._write_s = 0.0  # how long one was written that was sealed since the last step
        self._timing, self._clock, self._on_ready = timing or RetryTiming(), clock, on_ready
        self._stop_asked = threading.Event()
        self._phase: TrainerPhase = "starting"
        self._waits_for, self._failure = "", ""
        self._moved_at = clock()
        self._last: tuple[int, str] | None = None  # step and ids_hash of the newest step made here
        self._cycles: deque[tuple[float, int]] = deque(maxlen=RATE_STEPS)  # (seconds, tokens)
        self._step_s: float | None = None
        self._publish_s = self._applied_s = 0.0
        self._idle_since = clock()  # end of the last step's publication
        self._published: dict[str, float] = {}  # figures of the last publication
        self._steps, self._busy_s, self._busy_tokens = 0, 0.0, 0
        self._ahead: PendingBatch | None = None  # asked for while weights are published

    def run(self) -> str:
        """Train until flow or `stop` ends it; returns how it ended. What goes wrong is raised, and said in the level."""
        try:
            self._live()
        except BaseException as e:
            self._failure = f"{type(e).__name__}: {e}"
            self._enter("failed")
            self._trainer.drop_checkpoint()
            raise
        self._enter("stopped")
        return "asked to stop" if self._stop_asked.is_set() else "stopped by flow"

    def stop(self) -> None:
        """End at the next step boundary. Returns at once."""
        self._stop_asked.set()

    def level(self) -> TrainerLevel:
        """As it is now."""
        seconds, tokens = sum(s for s, _ in self._cycles), sum(n for _, n in self._cycles)
        return TrainerLevel(
            phase=self._phase,
            version=self._trainer.version,
            lineage=self._trainer.lineage,
            tokens_per_s=tokens / seconds if seconds > 0 else 0.0,
            step_s=self._step_s,
            lag_share=self._pace.pacer.lag_share if self._pace else None,
            waits_for=self._waits_for,
            age_s=max(0.0, self._clock() - self._moved_at),
            failure=self._failure,
            steps=self._steps,
            busy_s=self._busy_s,
            busy_tokens=self._busy_tokens,
        )

    def _live(self) -> None:
        try:
            self._start()
            while not self._stop_asked.is_set() and self._turn():
                pass
            self._tell_stored(wait=True)
            self._save()
        except Interrupted:
            self._seal(wait=True)  # flow is away and was not told of the newest steps, but what was begun is ended

    def _start(self) -> None:
        hello = TrainerHello(
            trainer=self._name,
            epoch=self._epoch,
            pid=os.getpid(),
            complete=self._trainer.complete_checkpoints(),
            channel=None if self._direct is None else self._direct.offer,
        )
        welcome = self._ask("hello", lambda: self._flow.hello(hello))
        self._trainer.restore(welcome.load_step, lineage=welcome.lineage, load_lineage=welcome.load_lineage)
        known = welcome.published
        if known is None or (known.lineage, known.version) != (self._trainer.lineage, self._trainer.version):
            self._publish()
        if self._on_ready is not None:
            self._on_ready()

    def _turn(self) -> bool:
        """One question to flow and what follows from it. False when flow says stop."""
        self._tell_stored()
        asked_at = self._clock()
        ahead, self._ahead = self._ahead, None
        batch = None if ahead is None else ahead.taken()
        if batch is not None:
            self._waits_for = ""
            self._step(batch)
            return True
        answer = self._ask("next_batch", lambda: self._flow.next_batch(self._name, self._epoch))
        if answer.order == "stop":
            return False
        if answer.order == "train" and answer.batch is not None:
            self._waits_for = ""
            self._step(answer.batch)
            return True
        if self._pace is not None:
            self._pace.pacer.idle()
        if answer.order == "quiesce":
            self._save()
        self._seal(wait=False)
        self._trainer.idle()
        self._waits_for = answer.waits_for
        self._enter("quiesced" if answer.order == "quiesce" else "waiting")
        # Flow normally holds the question for a while; if it does not, it is not asked in a tight circle.
        self._stop_asked.wait(max(0.0, IDLE_S - (self._clock() - asked_at)))
        return True

    def _step(self, batch: TrainBatch) -> None:
        self._enter("training")
        if (batch.step, batch.ids_hash) == self._last and batch.step == self._trainer.version - 1:
            # Flow forgot our word (it was restored from an older record): the step is made, so say it again.
            self._settle(batch, {"settled": 1.0})
            return
        if batch.step != self._trainer.version:
            raise RunError("flow gave a batch for another version", got=batch.step, expected=str(self._trainer.version))
        started = self._clock()
        wait_s = started - self._idle_since
        if self._pace is not None:
            self._pace.pacer.begin()
        metrics = dict(self._trainer.train_step(batch))
        trained_at = self._clock()
        self._last, self._unsaved = (batch.step, batch.ids_hash), batch.ids_hash
        self._checkpoint(due=checkpoint_due(batch.step, self._checkpoint_every))
        saved_at = self._clock()
        tokens = sum(len(s.prompt_tokens) + len(s.tokens) for s in batch.samples)
        if self._pace is not None:
            self._pace.pacer.charge(self._pace.step_s(tokens))
        self._step_s = self._clock() - started
        metrics |= {
            "checkpoint_s": saved_at - trained_at,  # stood still for it
            "checkpoint_write_s": self._write_s,  # of one that was sealed since the step before, beside the training; else 0
            "paced_wait_s": self._clock() - saved_at,
            "wait_s": wait_s,  # for the batch, its way here included
            "train_s": trained_at - started,
            "applied_s": self._applied_s,  # of the step before, like
            "publish_s": self._publish_s,
            **self._published,
            "cycle_s": self._step_s,
            "batch_tokens": float(tokens),
        }
        self._write_s = 0.0
        self._settle(batch, metrics)
        cycle_s = self._clock() - started
        self._cycles.append((cycle_s, tokens))
        self._steps, self._busy_s, self._busy_tokens = (
            self._steps + 1,
            self._busy_s + cycle_s,
            self._busy_tokens + tokens,
        )

    def _settle(self, batch: TrainBatch, metrics: StepMetrics) -> None:
        applied = Applied(
            step=batch.step,
            ids_hash=batch.ids_hash,
            trainer_epoch=self._epoch,
            metrics=metrics,
            checkpointed=not self._unsaved,
        )
        asked_at = self._clock()
        self._ask("applied", lambda: self._flow.applied(applied))
        self._applied_s = self._clock() - asked_at
        if isinstance(self._flow, AsksAhead):
            self._ahead = self._flow.ask_ahead(self._name, self._epoch)
        self._publish()

    def _checkpoint(self, *, due: bool) -> None:
        """After a step: seal what is written by now; save, or begin to, when a checkpoint is due."""
        if self._checkpoint_every == 1:
            self._save()
            return
        self._seal(wait=due)  # the bound on steps in no checkpoint holds since a due one waits for the one before
        if not due:
            return
        if self._trainer.begin_checkpoint(self._unsaved):
            self._begun = self._last
        else:
            self._save()

    def _save(self) -> None:
        """The newest step is in a complete checkpoint when this returns."""
        self._seal(wait=True)
        if self._unsaved:
            self._trainer.save_checkpoint(self._unsaved)
            self._unsaved = ""

    def _seal(self, *, wait: bool) -> None:
        """Make a complete checkpoint of the one that was begun, if it is written; or `wait` for it."""
        if self._begun is not None and (wait or self._trainer.checkpoint_written):
            self._write_s = self._trainer.seal_checkpoint()
            if self._begun == self._last:
                self._unsaved = ""
            self._begun = None

    def _publish(self) -> None:
        started = self._clock()
        if self._direct is None:
            ref = self._trainer.publish()
            self._stored(ref)
        else:
            self._tell_stored()
            self._send(self._direct)
        self._moved_at = self._idle_since = self._clock()
        self._publish_s = self._idle_since - started

    def _send(self, direct: DirectPublisher) -> None:
        """Straight to the engines, told to flow, and only then copied for the disk; or by disk, where that failed."""
        made = direct.publish(self._trainer)
        sent = made.transfer
        self._published = {
            "direct_members": 0.0 if sent is None else float(sent.members),
            "transfer_s": 0.0 if sent is None else sent.transfer_s,
            "transfer_bytes": 0.0 if sent is None else float(sent.bytes),
        }
        if made.stored:
            self._stored(made.ref)
            return
        self._ask("published", lambda: self._flow.published(made.ref, self._epoch, False))
        direct.keep(self._trainer, made)

    def _tell_stored(self, *, wait: bool = False) -> None:
        """Tell flow what came to disk in the background; `wait` for what is on its way there."""
        if self._direct is not None:
            for ref in self._direct.finish() if wait else self._direct.stored():
                self._stored(ref)

    def _stored(self, ref: WeightsRef) -> None:
        """A generation is on disk: flow may send anybody there."""
        self._ask("published", lambda: self._flow.published(ref, self._epoch))
        if self._weights is not None:
            collect(self._weights, ref.version - self._eta - 2)

    def _ask(self, what: str, call: Callable[[], T]) -> T:
        return patiently(
            call, what=f"{what} of {self._name}", timing=self._timing, wait=self._stop_asked.wait, clock=self._clock
        )

    def _enter(self, phase: TrainerPhase) -> None:
        self._phase = phase
        self._moved_at = self._clock()
