"""The product's own engine and trainer at work, against a flow that always has something to do.

`ReplicaLoop` and `TrainerLoop` are those of a run, pace included: what is measured is what a run gets. Figures come from
their counters of busy time, so how fast this flow answers does not matter.
"""

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

from planner.record import record, replace
from runtime.profile.fit import Decoded, plain_step_s
from runtime.rl.exchange import LoopTiming, PendingReply
from runtime.rl.pacing import KindPacing, Pacer
from runtime.rl.protocols import RolloutEngine
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.train.loop import Pace, TrainerLoop, TrainerWork
from runtime.rl.types import (
    Applied,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    NextBatch,
    SampleId,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    TrainSample,
    WeightsRef,
)

FIRST_TOKEN = 4  # prompts are of ordinary tokens, above the special ones
LATE_FACTOR = 6.0  # a bench that takes so much longer than it should is given up
LATE_S = 30.0
WARM_SHARE = 0.25  # of a bench's seconds come first and are not counted, where no clock sets the pace


@record
class Drive:
    """How an engine is driven: samples at once, and the lengths of each."""

    running: int
    prompt_tokens: int
    new_tokens: int
    vocab: int
    spread: bool = (
        False  # samples end one by one as in a run: lengths from half of `new_tokens` to half more, begun anywhere
    )


class Answered:
    """A reply that is there at once."""

    def __init__(self, reply: ExchangeReply) -> None:
        self._reply = reply

    def done(self) -> bool:
        return True

    def result(self, timeout_s: float) -> ExchangeReply:
        return self._reply


class _Supply:
    """A flow that keeps `drive.running` samples at the engine."""

    def __init__(self, drive: Drive, ref: WeightsRef) -> None:
        self._drive, self._ref, self._random = drive, ref, random.Random(0)
        self._held: set[SampleId] = set()
        self._next = 0
        self.stop = False

    def send(self, request: ExchangeRequest) -> PendingReply:
        for a in request.appends:
            if a.finished is not None:
                self._held.discard(a.sample)
        self._held -= set(request.released)
        new: list[Lease] = []
        while not self.stop and request.version is not None and len(self._held) < self._drive.running:
            lease = self._lease()
            self._held.add(lease.sample)
            new.append(lease)
        order = "stop" if self.stop else "serve"
        return Answered(
            ExchangeReply(ack_seq=request.seq, order=order, leases=tuple(new), weights=self._ref)  # type: ignore[arg-type]
        )

    def _lease(self) -> Lease:
        d, n = self._drive, self._next
        self._next += 1
        prompt = tuple(self._random.randrange(FIRST_TOKEN, d.vocab) for _ in range(d.prompt_tokens))
        new = d.new_tokens
        if d.spread:
            first, last = (1, new) if n < d.running else (-(-new // 2), new + new // 2)
            new = self._random.randint(max(1, first), max(1, last))
        return Lease(sample=SampleId(n, 0), epoch=1, prompt_tokens=prompt, max_new_tokens=new)


def decode(
    engine: RolloutEngine,
    ref: WeightsRef,
    drive: Drive,
    *,
    seconds: float,
    pacing: KindPacing | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Decoded:
    """Drive an engine for about `seconds` of busy time after as long as a warm-up needs; it must be empty and is left so.

    Its first steps load kernels and choose algorithms for the shapes of this batch: they are slower than those to come.
    """
    supply = _Supply(drive, ref)
    timing = LoopTiming(flush_s=0.02, finished_flush_s=0.0, idle_s=0.005)
    loop = ReplicaLoop(engine, supply, replica="profile", epoch=1, pacing=pacing, timing=timing)
    until = time.monotonic() + LATE_FACTOR * seconds + LATE_S
    warm_s = WARM_SHARE * seconds if pacing is None else 0.0
    begin: EngineStats | None = None
    first = engine.stats().prefill_tokens  # of drives before this one
    turns: list[Decoded] = []
    while not should_stop() and time.monotonic() < until:
        loop.tick()
        now = loop.level().stats
        filled = now.prefill_tokens - first >= drive.running * (drive.prompt_tokens - 1)  # of the first samples
        if begin is None and now.decode_steps >= 3 and filled and now.busy_s >= warm_s:
            begin = now
        if begin is not None:
            turns.append(_done(EngineStats(), now))
        if begin is not None and now.busy_s - begin.busy_s >= seconds and now.decode_steps - begin.decode_steps >= 3:
            break
    end = loop.level().stats
    supply.stop = True
    engine.abort(engine.held())
    return replace(_done(begin or EngineStats(), end), step_s=plain_step_s(turns))


def _done(begin: EngineStats, end: EngineStats) -> Decoded:
    """What the engine did between two levels."""
    return Decoded(
        busy_s=end.busy_s - begin.busy_s,
        steps=end.decode_steps - begin.decode_steps,
        tokens=end.decoded_tokens - begin.decoded_tokens,
        prefill_tokens=end.prefill_tokens - begin.prefill_tokens,
    )


def random_batch(step: int, *, samples: int, prompt_tokens: int, tokens: int, vocab: int, group: int = 4) -> TrainBatch:
    """A global batch of made-up samples of one length."""
    rng = random.Random(step)

    def sample(i: int) -> TrainSample:
        return TrainSample(
            sample=SampleId(i // group, i % group),
            prompt_tokens=tuple(rng.randrange(FIRST_TOKEN, vocab) for _ in range(prompt_tokens)),
            tokens=tuple(rng.randrange(FIRST_TOKEN, vocab) for _ in range(tokens)),
            logprobs=(-1.0,) * tokens,
            versions=(step,) * tokens,
            weights=(1.0,) * tokens,
            reward=float(i % 2),
            advantage=1.0 if i % 2 else -1.0,
            finish="length",
        )

    return TrainBatch(step=step, ids_hash=f"profile-{step}", samples=tuple(sample(i) for i in range(samples)))


class EndlessFlow:
    """A flow that always has a batch, until it is told to stop."""

    def __init__(self, make: Callable[[int], TrainBatch]) -> None:
        self._make, self._step = make, 0
        self.stop = threading.Event()

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        return TrainerWelcome(load_step=None, lineage=0, published=None)

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        if self.stop.is_set():
            return NextBatch(order="stop")
        return NextBatch(order="train", batch=self._make(self._step))

    def applied(self, applied: Applied) -> None:
        self._step = applied.step + 1

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        return None


class Driven:
    """A trainer's loop in a thread of its own."""

    def __init__(self, loop: TrainerLoop, flow: EndlessFlow) -> None:
        self._loop, self._flow = loop, flow
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._run, name="profile-trainer", daemon=True)
        self._thread.start()

    def runs(self, seconds: float = 0.02) -> bool:
        """Whether it still does so many seconds from now."""
        self._thread.join(seconds)
        return self._thread.is_alive()

    def end(self, seconds: float) -> None:
        """Stop at the next step boundary, waiting so long at most. Raises what ended the loop."""
        self._flow.stop.set()
        self._loop.stop()
        self._thread.join(seconds)
        if self._failure:
            raise self._failure[0]

    def _run(self) -> None:
        try:
            self._loop.run()
        except BaseException as e:  # noqa: BLE001 - raised where the bench was asked for
            self._failure.append(e)


@record
class Trained:
    """What a trainer did in `busy_s` seconds of steps, from gradients to publication."""

    busy_s: float
    steps: int
    tokens: int


def train(
    trainer: TrainerWork,
    make: Callable[[int], TrainBatch],
    *,
    seconds: float,
    weights: Path,
    pacing: KindPacing | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trained:
    """Run a fresh trainer for about `seconds` of busy time after its first two steps."""
    flow = EndlessFlow(make)
    pace = Pace(pacer=Pacer(threading.Event().wait), step_s=pacing.training_s) if pacing is not None else None
    loop = TrainerLoop(trainer, flow, name="profile", epoch=1, weights=weights, pace=pace)
    driven = Driven(loop, flow)
    until, begin = time.monotonic() + LATE_FACTOR * seconds + LATE_S, loop.level()
    end = begin
    while driven.runs() and not should_stop() and time.monotonic() < until:
        end = loop.level()
        if begin.steps < 2 and end.steps >= 2:
            begin = end
        if begin.steps >= 2 and end.busy_s - begin.busy_s >= seconds:
            break
    driven.end(LATE_S)
    return Trained(
        busy_s=end.busy_s - begin.busy_s, steps=end.steps - begin.steps, tokens=end.busy_tokens - begin.busy_tokens
    )
