"""A run's engine as it works in the run: samples begin one by one as others end, and new weights come while it generates.

Told apart are the plain decode step, what a prompt costs those who decode, for how long new weights stop the engine, and what
the prefixes that are computed anew afterwards cost. Every cost of prefill is the decoding that was lost:

    seconds lost = busy seconds - decoded tokens x plain step / samples of a step

The engine's loop is the run's; its counters of busy time leave the taking of new weights out, which it tells itself.
"""

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from planner.fitting import line
from planner.record import record
from runtime.profile.bench import FIRST_TOKEN, Answered
from runtime.rl.exchange import LoopTiming, PendingReply
from runtime.rl.protocols import RolloutEngine
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.types import (
    ChannelOffer,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    ReplicaOrder,
    SampleId,
    WeightsRef,
)

WARM_SHARE = 0.25  # of a bench's seconds: its first steps load kernels for the shapes of this batch
LATE_FACTOR, LATE_S = 6.0, 30.0  # a bench that takes so much longer than it should is given up
LEAST_STEPS = 3
AGAIN_S = 0.05  # before a generation that could not be made is tried again
LEAST_PLAIN = 5  # steps without prefill, to take their median
BACK = 0.95  # of the samples that ran before new weights: when so many run again the last prefixes are on their way
SETTLE = 2  # steps after that, which an engine that steps ahead may tell late


@record
class Course:
    """What an engine is given: `running` samples at a time, of lengths from half of `new_tokens` to half more, none above `longest`."""

    running: int
    prompt_tokens: int
    new_tokens: int
    longest: int
    vocab: int


@record
class Turn:
    """An engine's counters after a turn of its loop."""

    busy_s: float
    steps: int  # that decoded
    tokens: int  # decoded
    prefill_tokens: int  # recomputed ones too
    begun_tokens: int  # prefill of samples handed out
    running: int
    updates: int
    pause_s: float | None  # of the last update
    context: float  # mean tokens of a sample's context


@record
class Steady:
    """What an engine showed without new weights. Rates follow: `running` / `step_s`, 1 / `prefill_s`."""

    running: float  # mean samples of a decode step
    context: float
    step_s: float  # of a step that only decodes
    prefill_s: float  # decoding lost by a prefilled token; 0: none was seen
    busy_s: float  # what was looked at
    slowest: float | None = None  # pace of the slowest of several spells, as a share of the mean one


@record
class Updated:
    """What new weights cost, medians over `updates` of them. Steps that were under way end while an engine takes weights: their time
    is the pause's, their tokens count as decoded, so `recompute_s` is that much less. The sum holds."""

    updates: int
    swap_s: float
    recompute_s: float  # decoding lost by a token that is computed anew; 0: nothing was, or nothing was lost
    samples: float
    prefix: float  # tokens that are computed anew of a sample; 0 where none is


class Publishes(Protocol):
    """Where the engine's weights come from, as flow tells it."""

    @property
    def channel(self) -> ChannelOffer | None: ...

    @property
    def stored(self) -> WeightsRef: ...

    @property
    def direct(self) -> WeightsRef | None: ...

    def told(self, version: int | None, tokens: int) -> None:
        """The engine serves `version` and has told so many tokens more."""
        ...


class OneGeneration:
    """The same weights all the time."""

    channel: ChannelOffer | None = None
    direct: WeightsRef | None = None

    def __init__(self, ref: WeightsRef) -> None:
        self.stored = ref

    def told(self, version: int | None, tokens: int) -> None:
        """Nothing follows."""


class Supply:
    """A flow that keeps `course.running` samples at the engine. The first ones come as others would have left them: begun some
    time ago, so that contexts are those of a steady state and no two end together. Another `seed` makes other samples."""

    def __init__(self, course: Course, weights: Publishes, *, seed: int = 0) -> None:
        self._course, self._weights, self._random = course, weights, random.Random(seed)
        self._held: dict[SampleId, int] = {}  # and its context
        self._next = 0
        least = max(1, course.new_tokens // 2)
        self._lengths = range(least, max(least, min(course.longest, course.new_tokens + course.new_tokens // 2)) + 1)
        self.begun_tokens = self.first_tokens = 0  # prefill of all samples, of the first ones
        self.stop = False

    def context(self, untold: int) -> float:
        """Mean tokens of a held sample's context, with so many that were decoded and not told yet."""
        return (sum(self._held.values()) + untold) / len(self._held) if self._held else 0.0

    def send(self, request: ExchangeRequest) -> PendingReply:
        for a in request.appends:
            if a.finished is not None:
                self._held.pop(a.sample, None)
            elif a.sample in self._held:
                self._held[a.sample] += len(a.tokens)
        for sample in request.released:
            self._held.pop(sample, None)
        new: list[Lease] = []
        while not self.stop and request.version is not None and len(self._held) < self._course.running:
            new.append(self._lease())
        self._weights.told(request.version, sum(len(a.tokens) for a in request.appends))
        order: ReplicaOrder = "stop" if self.stop else "serve"
        weights = self._weights
        return Answered(
            ExchangeReply(
                ack_seq=request.seq,
                order=order,
                leases=tuple(new),
                weights=weights.stored,
                direct=weights.direct,
                channel=weights.channel,
            )
        )

    def _lease(self) -> Lease:
        course, n = self._course, self._next
        self._next += 1
        if n < course.running:  # a sample is met at work with a chance that is as its length, anywhere in it
            (length,) = self._random.choices(self._lengths, weights=self._lengths)
            done = self._random.randrange(length)
        else:
            length, done = self._random.choice(self._lengths), 0
        prompt, tokens = self._tokens(course.prompt_tokens), self._tokens(done)
        self._held[SampleId(n, 0)] = len(prompt) + done
        self.begun_tokens += len(prompt) + done - 1
        if n < course.running:
            self.first_tokens = self.begun_tokens
        return Lease(sample=SampleId(n, 0), epoch=1, prompt_tokens=prompt, tokens=tokens, max_new_tokens=length)

    def _tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self._random.randrange(FIRST_TOKEN, self._course.vocab) for _ in range(count))


def drive(
    engine: RolloutEngine,
    course: Course,
    weights: Publishes,
    *,
    seconds: float,
    should_stop: Callable[[], bool] = lambda: False,
    least_updates: int = 0,
) -> tuple[Turn, ...]:
    """Turns of about `seconds` of busy time after the warm-up, and until `least_updates` more weights were taken; the engine must be
    empty and is left so."""
    before = engine.stats().prefill_tokens  # of drives before this one
    # Other samples than theirs: prompts that a prefix cache still has would cost next to nothing.
    supply = Supply(course, weights, seed=before)
    timing = LoopTiming(flush_s=0.02, finished_flush_s=0.0, idle_s=0.005)
    loop = ReplicaLoop(engine, supply, replica="profile", epoch=1, timing=timing)
    until = time.monotonic() + LATE_FACTOR * seconds + LATE_S
    turns: list[Turn] = []
    while not should_stop() and time.monotonic() < until:
        loop.tick()
        now = loop.level().stats
        filled = now.prefill_tokens - before >= supply.first_tokens or now.busy_s >= seconds  # not all may find room
        if turns or (filled and now.decode_steps >= LEAST_STEPS and now.busy_s >= WARM_SHARE * seconds):
            turns.append(_turn(now, supply.begun_tokens, supply.context(loop.level().unflushed_tokens)))
        if turns and _enough(turns[0], turns[-1], seconds, least_updates):
            break
    supply.stop = True
    engine.abort(engine.held())
    return tuple(turns)


def _enough(first: Turn, last: Turn, seconds: float, least_updates: int) -> bool:
    return (
        last.busy_s - first.busy_s >= seconds
        and last.steps - first.steps >= LEAST_STEPS
        and last.updates - first.updates >= least_updates
    )


def _turn(now: EngineStats, begun_tokens: int, context: float) -> Turn:
    return Turn(
        busy_s=now.busy_s,
        steps=now.decode_steps,
        tokens=now.decoded_tokens,
        prefill_tokens=now.prefill_tokens,
        begun_tokens=begun_tokens,
        running=now.running,
        updates=now.updates,
        pause_s=now.update_pause_s,
        context=context,
    )


def steady(turns: Sequence[Turn]) -> Steady | None:
    """What turns without new weights say; None where nothing was decoded."""
    if len(turns) < 2 or turns[-1].steps == turns[0].steps:
        return None
    first, last = turns[0], turns[-1]
    tokens, prefilled = last.tokens - first.tokens, last.prefill_tokens - first.prefill_tokens
    running = tokens / (last.steps - first.steps)
    step_s = _plain_step_s(turns)
    lost_s = last.busy_s - first.busy_s - tokens * step_s / running
    return Steady(
        running=running,
        context=statistics.fmean(t.context for t in turns),
        step_s=step_s,
        prefill_s=max(0.0, lost_s / prefilled) if prefilled else 0.0,
        busy_s=last.busy_s - first.busy_s,
    )


def mean_of(spells: Sequence[Steady]) -> Steady:
    """One engine at the same work at several times. A run lives through as much time of each pace, so paces are averaged over time:
    its steps are the sum of theirs. What a step or a token does not change with the pace is averaged over steps."""
    steps = [s.busy_s / s.step_s for s in spells]

    def over_steps(values: Iterable[float]) -> float:
        return sum(n * v for n, v in zip(steps, values, strict=True)) / sum(steps)

    busy_s = sum(s.busy_s for s in spells)
    step_s = busy_s / sum(steps)
    return Steady(
        running=over_steps(s.running for s in spells),
        context=over_steps(s.context for s in spells),
        step_s=step_s,
        prefill_s=over_steps(s.prefill_s for s in spells),
        busy_s=busy_s,
        slowest=step_s / max(s.step_s for s in spells) if len(spells) > 1 else None,
    )


def _plain_step_s(turns: Sequence[Turn]) -> float:
    """Median seconds of the steps that only decode. Where nearly every step also prefills, what a line through the steps says of one
    without; their mean where there is none."""
    steps = [
        (float(b.prefill_tokens - a.prefill_tokens), b.busy_s - a.busy_s)
        for a, b in itertools.pairwise(turns)
        if b.steps == a.steps + 1 and b.busy_s > a.busy_s
    ]
    plain = [s for prefilled, s in steps if not prefilled]
    if len(plain) >= LEAST_PLAIN:
        return statistics.median(plain)
    at_zero = line(steps)[0] if steps else 0.0
    return at_zero or (turns[-1].busy_s - turns[0].busy_s) / (turns[-1].steps - turns[0].steps)


def updated(turns: Sequence[Turn], plain: Steady) -> Updated | None:
    """What the new weights among these turns cost an engine that is `plain` without; None where there were none, or the turns end
    before the samples that ran are back."""
    found = [w for i in range(1, len(turns)) if turns[i].updates > turns[i - 1].updates and (w := _window(turns, i))]
    pauses = [t.pause_s for _, t, _ in found if t.pause_s]
    if not pauses:
        return None
    token_s = plain.step_s / plain.running
    again: list[tuple[int, float]] = []  # tokens computed anew, seconds lost by them
    for before, _, after in found:
        begun = after.begun_tokens - before.begun_tokens
        count = after.prefill_tokens - before.prefill_tokens - begun
        lost_s = after.busy_s - before.busy_s - (after.tokens - before.tokens) * token_s - begun * plain.prefill_s
        if count > 0:
            again.append((count, lost_s))
    return Updated(
        updates=len(pauses),
        swap_s=statistics.median(pauses),
        recompute_s=max(0.0, statistics.median(s / n for n, s in again)) if again else 0.0,
        samples=statistics.fmean(b.running for b, _, _ in found),
        prefix=statistics.fmean(n for n, _ in again) / statistics.fmean(b.running for b, _, _ in found)
        if again
        else 0.0,
    )


def _window(turns: Sequence[Turn], i: int) -> tuple[Turn, Turn, Turn] | None:
    """The turn before the weights that turn `i` took, that turn, and the one by which what ran is back."""
    before = turns[i - 1]
    back = next((k for k in range(i, len(turns)) if turns[k].running >= BACK * before.running), None)
    if back is None or before.running < 1:
        return None
    end = back + SETTLE
    if end >= len(turns) or turns[end].updates != turns[i].updates:
        return None
    return before, turns[i], turns[end]


Make = Callable[[int], WeightsRef | None]
"""Brings a version to where engines find it. None: not now, to be tried again soon."""


class Publishing:
    """New generations of the same weights, made in a thread as a trainer's are made beside the engine: the next one when so many
    tokens have come since the last was taken, so that a slow machine sees as many steps between two as a fast one."""

    def __init__(
        self, first: WeightsRef, make: Make, *, period_tokens: float, channel: ChannelOffer | None = None
    ) -> None:
        """Made ones are `direct` where there is a channel, else `stored`."""
        self._make, self._period_tokens = make, period_tokens
        self.channel = channel
        self.stored: WeightsRef = first
        self.direct: WeightsRef | None = None
        self._version, self._tokens = first.version, 0
        self._due, self._ended = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="profile-weights", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> BaseException | None:
        """What ended it before its time."""
        return self._failure

    def told(self, version: int | None, tokens: int) -> None:
        """The engine serves `version` and has told so many tokens more."""
        self._tokens += tokens
        if version != self._version:
            self._tokens = 0
        elif self._tokens >= self._period_tokens:
            self._due.set()

    def close(self) -> None:
        """No more; waits for the one that is being made."""
        self._ended.set()
        self._due.set()
        self._thread.join(LATE_S)

    def _run(self) -> None:
        try:
            while self._due.wait() and not self._ended.is_set():
                made = self._make(self._version + 1)
                if made is None:
                    self._ended.wait(AGAIN_S)
                    continue
                self._version, self._tokens = made.version, 0
                self._due.clear()
                if self._ended.is_set():  # what woke this thread for its end may just have been cleared
                    return
                if self.channel is not None:
                    self.direct = made
                else:
                    self.stored = made
        except Exception as e:  # noqa: BLE001 - told to whoever waits for updates
            self._failure = e
