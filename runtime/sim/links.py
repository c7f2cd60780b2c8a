"""Links that transfers share: streams on one link get equal parts of it, and each takes a fixed time at its end.

One broadcast over one link is one stream, however many replicas wait behind it: they sit behind a relay, as the cost model
has it. Streams of different broadcasts, or of a newcomer, contend.
"""

import dataclasses
from collections.abc import Hashable


@dataclasses.dataclass
class Stream:
    """One transfer under way."""

    link: str
    rate_bytes_per_s: float  # of the link, alone
    left_bytes: float
    fixed_s: float  # latency and what else takes no bandwidth
    tag: Hashable
    waiting: list[str]  # who wants it
    began_s: float


class Links:
    """Processor sharing on each link. The owner asks `next_s`, and takes what is `done` then."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self._tails: list[tuple[float, Stream]] = []  # bytes are over; ends at that time
        self._now_s = 0.0
        self.busy_s: dict[str, float] = {}

    def send(
        self,
        now_s: float,
        *,
        link: str,
        rate_bytes_per_s: float,
        size_bytes: float,
        fixed_s: float,
        tag: Hashable,
        to: str,
    ) -> None:
        """Begin a transfer, or wait along with one of the same tag that begins just now."""
        self.advance(now_s)
        for s in self.streams:
            if s.link == link and s.tag == tag and s.began_s == now_s:
                s.waiting.append(to)
                s.fixed_s = max(s.fixed_s, fixed_s)
                return
        self.streams.append(
            Stream(
                link=link, rate_bytes_per_s=rate_bytes_per_s, left_bytes=max(size_bytes, 0.0), fixed_s=fixed_s, tag=tag,
                waiting=[to], began_s=now_s,
            )
        )  # fmt: skip

    def forget(self, to: str) -> None:
        """Nobody waits any more under that name; streams without anybody end."""
        for s in self.streams:
            s.waiting = [w for w in s.waiting if w != to]
        for _, s in self._tails:
            s.waiting = [w for w in s.waiting if w != to]
        self.streams = [s for s in self.streams if s.waiting]
        self._tails = [(t, s) for t, s in self._tails if s.waiting]

    def next_s(self) -> float:
        """When the next stream changes, if nothing else does."""
        ends = [self._now_s + s.left_bytes / self._share(s) for s in self.streams]
        return min([*ends, *(t for t, _ in self._tails)], default=float("inf"))

    def advance(self, now_s: float) -> None:
        """Move bytes until `now_s`, stream by stream as they end."""
        if not self.streams:
            self._now_s = max(self._now_s, now_s)
            return
        while self.streams and self._now_s < now_s:
            first = min(s.left_bytes / self._share(s) for s in self.streams)
            dt = min(first, now_s - self._now_s)
            shares = [self._share(s) for s in self.streams]
            for link in {s.link for s in self.streams}:
                self.busy_s[link] = self.busy_s.get(link, 0.0) + dt
            for s, share in zip(self.streams, shares, strict=True):
                s.left_bytes -= share * dt
            self._now_s += dt
            self._settle()
            if dt <= 0 and not any(s.left_bytes <= 0 for s in self.streams):
                break
        self._now_s = max(self._now_s, now_s)
        self._settle()

    def _settle(self) -> None:
        ended = [s for s in self.streams if s.left_bytes <= 1e-9 * s.rate_bytes_per_s]
        self._tails += [(self._now_s + s.fixed_s, s) for s in ended]
        if ended:
            self.streams = [s for s in self.streams if s.left_bytes > 1e-9 * s.rate_bytes_per_s]

    def done(self, now_s: float) -> list[Stream]:
        """Streams that have arrived by `now_s`, in order; they are forgotten."""
        self.advance(now_s)
        if not self._tails:
            return []
        arrived = sorted((t, i, s) for i, (t, s) in enumerate(self._tails) if t <= now_s + 1e-9)
        self._tails = [(t, s) for t, s in self._tails if t > now_s + 1e-9]
        return [s for _, _, s in arrived]

    def _share(self, stream: Stream) -> float:
        return stream.rate_bytes_per_s / sum(s.link == stream.link for s in self.streams)
