"""The life of a rollout replica: decode, flush what was decoded, take work, weights and orders from flow.

Flow is asked, never told. While it may not be sent more (two exchanges are unacknowledged, or one is to be sent again) decoding
goes on until a sample has `tail_tokens` that flow was not sent: what a crash can lose stays below two flushes and that tail, and
a replica that cannot reach flow comes to rest. The tail costs no promise: nothing of it is durable before an answer says so, its
lease and epoch are checked when it arrives, and a token keeps the version it was made with.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from planner.record import record, replace
from runtime.errors import WeightsError
from runtime.rl.counter import TokenCounter
from runtime.rl.exchange import Exchanges, FlowClient, LoopTiming, Unflushed
from runtime.rl.pacing import Pacer, Pacing
from runtime.rl.protocols import RolloutEngine, TakesDirect
from runtime.rl.types import (
    ChannelMember,
    ChannelOffer,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    ReplicaOrder,
    SampleId,
    WeightsRef,
)

LoopPhase = Literal["starting", "serving", "draining", "drained", "stopped", "failed"]


@record
class ReplicaLevel:
    """A replica as it is now, for its host process."""

    phase: LoopPhase
    version: int | None
    digest: str | None
    held: int
    unflushed_tokens: int
    unacknowledged: int
    stats: EngineStats
    host_bound: bool | None  # paced: more than 10 % behind its clock
    reply_age_s: float | None = None  # since flow's last answer
    token_age_s: float | None = None  # since the last decoded token
    failure: str = ""


class _Rate:
    """Tokens per second over the last busy seconds, and how many samples a step decoded meanwhile."""

    def __init__(self, window_s: float = 5.0) -> None:
        self._window_s = window_s
        self._spans: deque[tuple[float, int]] = deque()
        self._wall, self._tokens = 0.0, 0

    def add(self, wall: float, tokens: int) -> None:
        self._spans.append((wall, tokens))
        self._wall, self._tokens = self._wall + wall, self._tokens + tokens
        while self._wall - self._spans[0][0] >= self._window_s:
            old_wall, old_tokens = self._spans.popleft()
            self._wall, self._tokens = self._wall - old_wall, self._tokens - old_tokens

    @property
    def per_s(self) -> float:
        return self._tokens / self._wall if self._wall > 0 else 0.0

    @property
    def per_step(self) -> float:
        return self._tokens / len(self._spans) if self._spans else 0.0


class ReplicaLoop:
    """Runs one engine against flow until it is told to stop. `run` in one thread; `stop` and `level` from any."""

    def __init__(
        self,
        engine: RolloutEngine,
        client: FlowClient,
        *,
        replica: str,
        epoch: int,
        counter: TokenCounter | None = None,
        pacing: Pacing | None = None,
        device_kind: str = "",
        timing: LoopTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        """`pacing`: hold the engine to a declared speed. `wait(seconds)` rests, and returns early on `stop`."""
        self._engine, self._replica, self._epoch = engine, replica, epoch
        self._counter, self._pacing, self._timing = counter, pacing, timing or LoopTiming()
        self._clock = clock
        self._stop_asked = threading.Event()
        self._pause = threading.Event()  # never set
        self._wait = wait or self._wait_unless_stopped
        self._pacer = Pacer(self._wait, clock=clock) if pacing is not None else None
        self._exchanges = Exchanges(client, self._timing, clock)
        self._unflushed = Unflushed()
        self._released: list[SampleId] = []
        self._order: ReplicaOrder = "serve"
        self._slots: int | None = None  # as flow last allotted
        self._urgent = True  # something flow should know at once
        self._flushed_at = float("-inf")  # everything, that is
        self._device_kind = device_kind
        self._channel: ChannelOffer | None = None
        self._serving: WeightsRef | None = None  # last taken; nothing older of its lineage is loaded after it
        self._refused: tuple[str, float] | None = None  # digest of weights that failed, when to try again
        self._failure = ""
        self._rate = _Rate()
        self._decode_steps, self._busy_s = 0, 0.0
        self._busy_since: float | None = None  # end of the last step, while nothing but exchanges came after it
        self._token_at: float | None = None
        self._goodbye_at: float | None = None
        self._phase: LoopPhase = "starting"
        self._level = self._look()

    def run(self) -> None:
        """Serve until flow or `stop` ends it. Whatever the engine raises ends it too, said in the level."""
        try:
            while self.tick():
                pass
        except Exception as e:
            self._failure, self._phase = f"{type(e).__name__}: {e}", "failed"
            self._level = self._look()
            raise

    def stop(self) -> None:
        """Suspend everything, flush, end. Returns at once."""
        self._stop_asked.set()

    def level(self) -> ReplicaLevel:
        """As of the last turn; ages as of now, so that a loop that hangs grows old."""
        now, level = self._clock(), self._level
        return replace(level, reply_age_s=_age(now, self._exchanges.reply_at), token_age_s=_age(now, self._token_at))

    def tick(self) -> bool:
        """One turn: answers, one decode step, an exchange if due, else a rest. False when the replica has ended."""
        for reply, acknowledged in self._exchanges.replies():
            self._apply(reply, acknowledged)
        if self._stop_asked.is_set() and self._order != "stop":
            self._order = "stop"
            self._suspend()
        decoded = self._may_decode() and self._decode()
        self._exchanges.repeat()
        sent = self._exchanges.may_send() and self._due() and self._send()
        ended = self._ended()
        self._phase = "stopped" if ended else self._phase_now()
        if not (decoded or sent or ended):
            self._engine.check()  # a step would have met its end; a replica that may not decode takes none
            self._rest()
        self._level = self._look()
        return not ended

    def _apply(self, reply: ExchangeReply, acknowledged: bool) -> None:
        """Cancels, then weights, then leases: flow leased by what was reported before this answer."""
        if self._order not in (reply.order, "stop"):
            self._order = reply.order
            self._urgent = True
        self._engine.abort(reply.cancel)
        self._unflushed.drop(reply.cancel)
        self._released = [s for s in self._released if s not in reply.cancel]
        if reply.slots != self._slots:
            self._slots = reply.slots
            self._engine.limit(reply.slots)
            self._urgent = True  # what it has room for is another from now on
        if self._order == "serve":
            self._join(reply.channel)
            self._take_weights(reply.direct, stored=False)
            self._take_weights(reply.weights)
            self._engine.add(reply.leases)
            return
        # Leases that crossed the order on their way go back with what was running.
        self._released.extend(lease.sample for lease in reply.leases)
        self._suspend()
        if reply.order == "stop" and not acknowledged:
            self._exchanges.forget()
            self._unflushed.take()
            self._released.clear()

    def _suspend(self) -> None:
        """Hold nothing: the samples go on elsewhere from what the journal has."""
        self._released.extend(self._engine.abort(self._engine.held()))
        self._urgent = self._urgent or bool(self._released)

    def _join(self, offer: ChannelOffer | None) -> None:
        """Follow the trainer's channel, where the engine can."""
        if offer is not None and offer != self._channel and isinstance(self._engine, TakesDirect):
            self._channel = offer
            member = ChannelMember(replica=self._replica, epoch=self._epoch, device_kind=self._device_kind)
            self._engine.join(offer, member)

    def _take(self, ref: WeightsRef, *, stored: bool) -> bool:
        """From the second buffer if it is there, else from disk if it is there. Whether it was."""
        if isinstance(self._engine, TakesDirect) and self._channel is not None and self._engine.swap_weights(ref):
            return True
        if stored:
            self._engine.load_weights(ref)
        return stored

    def _take_weights(self, ref: WeightsRef | None, *, stored: bool = True) -> None:
        """Take the generation flow wants served, unless it is taken, has just failed or is older than what is served."""
        if ref is None or (ref.version, ref.digest) == (self._engine.version, self._engine.digest):
            return
        serving = self._serving if self._engine.version is not None else None
        if serving is not None and serving.lineage == ref.lineage and ref.version < serving.version:
            return
        if self._refused is not None and self._refused[0] == ref.digest and self._clock() < self._refused[1]:
            return
        try:
            if not self._take(ref, stored=stored):
                return
        except WeightsError as e:
            self._refused = (ref.digest, self._clock() + self._timing.reload_s)
            self._failure = str(e)
        else:
            self._refused, self._failure, self._serving = None, "", ref
        self._busy_since = None  # the time it took is the update's
        self._urgent = True

    def _may_decode(self) -> bool:
        return (
            self._order == "serve"
            and self._engine.version is not None
            and bool(self._engine.held())
            and (self._exchanges.may_send() or self._unflushed.longest < self._timing.tail_tokens)
        )

    def _decode(self) -> bool:
        """One engine step, held to the declared speed before its tokens count."""
        started = self._clock()
        if self._pacer is not None:
            self._pacer.begin()
        prefilled = self._engine.stats().prefill_tokens
        appends = self._engine.step()
        stats = self._engine.stats()
        if self._counter is not None:
            self._counter.set(stats.decoded_tokens)
        tokens = sum(len(a.tokens) for a in appends)
        if self._pacer is not None and self._pacing is not None:
            prefill_tokens = stats.prefill_tokens - prefilled
            self._pacer.charge(self._pacing.generation_s(samples=tokens, prefill_tokens=prefill_tokens))
        for append in appends:
            self._unflushed.add(append)
        now = self._clock()
        if tokens:
            self._token_at = now
        self._rate.add(now - started, tokens)
        # What comes between two steps (exchanges, above all) is time that decoding takes: a pacer counts it too.
        self._busy_s += now - (started if self._busy_since is None else self._busy_since)
        self._decode_steps, self._busy_since = self._decode_steps + bool(tokens), now
        return bool(appends)

    def _all_due(self) -> bool:
        """Whether everything unflushed should go to flow now, running samples too."""
        timing = self._timing
        if self._urgent or self._unflushed.longest >= timing.flush_tokens:
            return True
        return bool(self._unflushed) and self._clock() >= self._flushed_at + timing.flush_s

    def _due(self) -> bool:
        """Whether flow should hear from us now."""
        now, sent_at, timing = self._clock(), self._exchanges.sent_at, self._timing
        if self._all_due():
            return True
        if self._unflushed:
            return bool(self._unflushed.finished) and now >= sent_at + timing.finished_flush_s
        # Nothing to tell: ask for work, one question at a time, since flow may take its time to answer it.
        return not self._exchanges.unacknowledged and now >= sent_at + timing.idle_s

    def _send(self) -> bool:
        leaving = self._order == "stop"  # without weights a replica is given no more work
        if self._all_due() or self._exchanges.is_last():  # with answers so slow the next may have to wait
            appends, self._flushed_at = self._unflushed.take(), self._clock()
        else:
            appends = self._unflushed.take_finished()
        request = ExchangeRequest(
            replica=self._replica,
            epoch=self._epoch,
            seq=self._exchanges.next_seq,
            appends=appends,
            released=tuple(self._released),
            version=None if leaving else self._engine.version,
            digest=None if leaving else self._engine.digest,
            stats=self._stats(),
            pid=os.getpid(),
            refill_s=self._exchanges.refill_s,
        )
        self._released.clear()
        self._urgent = False
        self._exchanges.send(request)
        return True

    def _ended(self) -> bool:
        """Told to stop, and everything acknowledged or the time for it over."""
        if self._order != "stop":
            return False
        now = self._clock()
        if self._goodbye_at is None:
            self._goodbye_at = now + self._timing.goodbye_s
        if not (self._exchanges.unacknowledged or self._unflushed or self._released):
            return True
        if now >= self._goodbye_at:
            self._failure = f"flow did not acknowledge the last flush within {self._timing.goodbye_s:g} s"
            return True
        return False

    def _rest(self) -> None:
        """Nothing to do until an answer or the next exchange."""
        self._busy_since = None
        if self._pacer is not None:
            self._pacer.idle()
        seconds = self._timing.idle_s
        if not self._exchanges.unacknowledged:
            seconds = min(seconds, max(0.0, self._exchanges.sent_at + seconds - self._clock()))
        self._exchanges.rest(seconds, self._wait)

    def _phase_now(self) -> LoopPhase:
        if self._order != "serve":
            empty = not (self._engine.held() or self._unflushed or self._released or self._exchanges.unacknowledged)
            return "drained" if self._order == "drain" and (empty or self._phase == "drained") else "draining"
        return "serving" if self._engine.version is not None else "starting"

    def _stats(self) -> EngineStats:
        lag = self._pacer.lag_share if self._pacer is not None else None
        return replace(
            self._engine.stats(),
            decode_tokens_per_s=self._rate.per_s,
            decode_running=self._rate.per_step,
            host_lag_share=lag,
            decode_steps=self._decode_steps,
            busy_s=self._busy_s,
        )

    def _look(self) -> ReplicaLevel:
        return ReplicaLevel(
            phase=self._phase,
            version=self._engine.version,
            digest=self._engine.digest,
            held=len(self._engine.held()),
            unflushed_tokens=self._unflushed.tokens,
            unacknowledged=self._exchanges.unacknowledged,
            stats=self._stats(),
            host_bound=self._pacer.host_bound if self._pacer is not None else None,
            failure=self._failure,
        )

    def _wait_unless_stopped(self, seconds: float) -> bool:
        """Interrupted by a stop; once stopped, waits for what they say, not to spin while saying goodbye."""
        return (self._pause if self._stop_asked.is_set() else self._stop_asked).wait(seconds)


def _age(now: float, then: float | None) -> float | None:
    return None if then is None else max(0.0, now - then)
