"""What a replica and flow say to each other, from the replica's side: the journal's tail, and numbered exchanges.

At most two exchanges are unacknowledged. What is decoded meanwhile gathers, up to `tail_tokens` a sample. One that did not get
through is sent again, same number and content, before any later one. If the later one had overtaken it, flow acknowledged
neither, and both are sent again in order.

Silence and a ledger that cannot write are waited out. A flow that fails on what it is sent will fail on it again: after
`MAX_FAILED` times in a row the replica ends, its leases lapse, and what it held is tried elsewhere or given up.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from planner.record import record
from runtime.errors import LedgerError, RunError, UnreachableError
from runtime.rl.types import Append, ExchangeReply, ExchangeRequest, SampleId

MAX_UNACKNOWLEDGED = 2
MAX_FAILED = 5
REFILLS = 8  # exchanges that say how long one takes: the median, so that an outage says nothing


class PendingReply(Protocol):
    """An exchange under way."""

    def done(self) -> bool: ...

    def result(self, timeout_s: float) -> ExchangeReply:
        """TimeoutError when there is no answer yet, UnreachableError when there will be none, LedgerError when flow cannot
        write now, another RunError when it failed on the request."""
        ...


class FlowClient(Protocol):
    """How a replica reaches flow."""

    def send(self, request: ExchangeRequest) -> PendingReply:
        """Returns at once. UnreachableError when flow is known not to be there."""
        ...


@record
class LoopTiming:
    """When a replica speaks to flow."""

    flush_tokens: int = 32  # unflushed tokens of one sample
    tail_tokens: int = 64  # the same, at which decoding stops while nothing may be sent
    flush_s: float = 0.25  # between flushes of everything
    finished_flush_s: float = 0.1  # between flushes of finished samples, which wait to be replaced
    idle_s: float = 0.1  # between pleas for work; also the longest rest
    retry_s: float = 0.1  # after the first failed exchange, doubled up to `retry_max_s`
    retry_max_s: float = 2.0
    answer_s: float = 30.0  # an exchange without any answer for so long is sent again
    reload_s: float = 2.0  # before weights that failed to verify are tried again
    goodbye_s: float = 5.0  # for the last flush after a stop


class _Segment:
    """Tokens of one sample, lease and version that go on growing: an append to be."""

    __slots__ = ("epoch", "finished", "logprobs", "start", "tokens", "version")

    def __init__(self, append: Append) -> None:
        self.epoch, self.start, self.version, self.finished = (
            append.epoch,
            append.start,
            append.version,
            append.finished,
        )
        self.tokens, self.logprobs = list(append.tokens), list(append.logprobs)

    def told(self, sample: SampleId) -> Append:
        """As flow is sent it."""
        return Append(
            sample, self.epoch, self.start, tuple(self.tokens), tuple(self.logprobs), self.version, self.finished
        )


class _Tail:
    """What is unflushed of one sample; `last` is the segment that grows."""

    __slots__ = ("last", "segments", "tokens")

    def __init__(self, first: _Segment) -> None:
        self.segments, self.last = [first], first
        self.tokens = len(first.tokens)


class Unflushed:
    """Decoded tokens that flow has not been sent yet: per sample, one append for each run of equal versions.

    Every token of a run passes `add`: it takes constant time, whatever has gathered.
    """

    def __init__(self) -> None:
        self._tails: dict[SampleId, _Tail] = {}
        self.tokens = 0
        self.longest = 0  # tokens of the sample with most
        self.finished = 0  # samples

    def add(self, append: Append) -> None:
        """Join `append` to the last of its sample where version and lease are the same."""
        sample, epoch, _, tokens, logprobs, version, finished = append
        count = len(tokens)
        tail = self._tails.get(sample)
        if tail is None:
            tail = self._tails[sample] = _Tail(_Segment(append))
        else:
            last = tail.last
            if last.version == version and last.epoch == epoch:
                last.tokens += tokens
                last.logprobs += logprobs
                last.finished = finished
            else:
                tail.last = _Segment(append)
                tail.segments.append(tail.last)
            tail.tokens += count
        self.tokens += count
        self.longest = max(self.longest, tail.tokens)
        if finished is not None:
            self.finished += 1

    def drop(self, samples: Iterable[SampleId]) -> None:
        """Forget what was decoded for samples that are no longer ours."""
        for sample in samples:
            tail = self._tails.pop(sample, None)
            if tail is not None:
                self.tokens -= tail.tokens
                self.finished -= sum(s.finished is not None for s in tail.segments)
        self.longest = max((tail.tokens for tail in self._tails.values()), default=0)

    def take(self) -> tuple[Append, ...]:
        """Everything, and start anew."""
        return self._taken(list(self._tails))

    def take_finished(self) -> tuple[Append, ...]:
        """All of the finished samples; what runs goes on gathering, so that the journal has few and long segments."""
        return self._taken([s for s, tail in self._tails.items() if tail.last.finished is not None])

    def _taken(self, samples: list[SampleId]) -> tuple[Append, ...]:
        appends = tuple(segment.told(s) for s in samples for segment in self._tails[s].segments)
        self.drop(samples)
        return appends

    def __bool__(self) -> bool:
        return bool(self._tails)


@dataclass(slots=True)
class _Flight:
    """An unacknowledged exchange; `pending` is None while it waits to be sent (again)."""

    request: ExchangeRequest
    since: float  # when the one before was sent: what ended in between, this one tells
    pending: PendingReply | None = None
    sent_at: float = 0.0


class Exchanges:
    """The numbered exchanges: order, acknowledgement, repetition."""

    def __init__(self, client: FlowClient, timing: LoopTiming, clock: Callable[[], float]) -> None:
        self._client, self._timing, self._clock = client, timing, clock
        self._flights: deque[_Flight] = deque()
        self._seq = 0
        self._retry_at = 0.0
        self._failures = 0
        self._failed_on = 0  # times in a row that flow failed on what it was sent
        self.sent_at = float("-inf")
        self.reply_at: float | None = None
        self._refills: deque[float] = deque(maxlen=REFILLS)

    @property
    def unacknowledged(self) -> int:
        return len(self._flights)

    @property
    def next_seq(self) -> int:
        """Number of the next exchange, from 1."""
        return self._seq + 1

    @property
    def refill_s(self) -> float | None:
        """Seconds in which samples end whose successors have not come: from one exchange to the answer of the next, as the
        last ones went. None before the first."""
        return statistics.median(self._refills) if self._refills else None

    def may_send(self) -> bool:
        """A new one: not before those that failed, and at most two."""
        return len(self._flights) < MAX_UNACKNOWLEDGED and all(f.pending is not None for f in self._flights)

    def is_last(self) -> bool:
        """Whether after a new one no other may be sent before an answer."""
        return len(self._flights) == MAX_UNACKNOWLEDGED - 1

    def send(self, request: ExchangeRequest) -> None:
        """Send the exchange numbered `next_seq`."""
        now = self._clock()
        self._flights.append(_Flight(request, since=self.sent_at if self._seq else now))
        self._seq, self.sent_at = request.seq, now
        self._dispatch(self._flights[-1])

    def repeat(self) -> None:
        """Send the oldest again if it failed and its time has come; later ones follow when it is acknowledged."""
        if self._flights and self._flights[0].pending is None and self._clock() >= self._retry_at:
            self._dispatch(self._flights[0])

    def replies(self) -> Iterator[tuple[ExchangeReply, bool]]:
        """Answers that have come, oldest first, and whether they acknowledge: by their `ack_seq` alone.

        A flow whose ledger cannot write acknowledges nothing; it is asked again like one that does not answer. RunError
        when flow has failed on the oldest `MAX_FAILED` times.
        """
        while self._flights:
            flight = self._flights[0]
            if flight.pending is None:
                return
            if not flight.pending.done():
                if self._clock() - flight.sent_at >= self._timing.answer_s:
                    self._failed(flight)
                return
            try:
                reply = flight.pending.result(0.0)
            except (UnreachableError, LedgerError):
                self._failed(flight)
                return
            except RunError as e:
                self._failed(flight)
                self._failed_on += 1
                if self._failed_on >= MAX_FAILED:
                    raise RunError(f"flow failed {MAX_FAILED} times on what it was sent", got=str(e)) from e
                return
            self.reply_at, self._failed_on = self._clock(), 0
            if reply.ack_seq < flight.request.seq:
                self._failed(flight)
                yield reply, False
                return
            self._flights.popleft()
            self._refills.append(self.reply_at - flight.since)
            self._failures = 0
            if self._flights and self._flights[0].pending is None:
                self._dispatch(self._flights[0])
            yield reply, True

    def rest(self, seconds: float, wait: Callable[[float], bool]) -> None:
        """Wait for the oldest answer, or for the time to send again, at most `seconds`."""
        flight = self._flights[0] if self._flights else None
        if flight is None:
            wait(seconds)
        elif flight.pending is None:
            wait(min(seconds, max(0.0, self._retry_at - self._clock())))
        else:
            try:
                flight.pending.result(seconds)
            except (TimeoutError, RunError):
                return  # `replies` meets the failure again and counts it

    def forget(self) -> None:
        """Flow has given this replica up: what it has not acknowledged it never will."""
        self._flights.clear()

    def _dispatch(self, flight: _Flight) -> None:
        try:
            flight.sent_at = self._clock()
            flight.pending = self._client.send(flight.request)
        except UnreachableError:
            self._failed(flight)

    def _failed(self, flight: _Flight) -> None:
        flight.pending = None
        delay = min(self._timing.retry_s * 2.0**self._failures, self._timing.retry_max_s)
        self._failures = min(self._failures + 1, 16)
        self._retry_at = self._clock() + delay
