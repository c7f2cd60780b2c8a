"""When waiting requests are let into a running batch. Pure: seconds come from outside.

A step that prefills besides decoding leaves the CUDA graph of plain decoding; with a small model on a fast card the host then
launches every kernel, and the step takes several times as long however short the prompts. Letting each request in at once makes
every step such a step. Keeping them all back leaves slots idle. So requests wait until what their idle slots have cost is what
letting them in will cost, which is the answer to the ski rental problem: at most twice the least possible, whatever comes. With
slots that fall free evenly it is the optimum: of S slots with samples of L tokens S/L end a step, the share of idle slots after P
steps adds up to P^2 / (2 L) steps, and P = sqrt(2 L a) minimises idle steps plus `a` steps every P.
"""

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

PIPELINE = 2  # steps after an admission that may still carry it, under async scheduling
FIRST_HOLD = 4  # steps between admissions until plain steps have been seen
LEAST_PLAIN = 8  # of them, to tell what one takes
LEAST_CYCLES = 4  # admissions, to tell what one costs
REMEMBERED = 64  # plain steps, and admissions


@dataclass(frozen=True)
class Waiting:
    """A request that the scheduler does not have yet."""

    key: int
    tokens: list[int]
    max_tokens: int


class Admission:
    """What waits, and what steps have taken. `batched_tokens`: most that one step prefills. Without `hold` nothing waits for more
    than a slot."""

    def __init__(self, *, slots: int, batched_tokens: int, hold: bool = True) -> None:
        self._slots, self._batched_tokens, self._hold = slots, batched_tokens, hold
        self.price_steps = 0.0  # what an admission costs besides its tokens, in plain steps, as far as is known
        self._waiting: dict[int, Waiting] = {}
        self._plain_s: deque[float] = deque(maxlen=REMEMBERED)
        self._cycles: deque[tuple[int, float]] = deque(
            maxlen=REMEMBERED
        )  # tokens prefilled, seconds beyond plain steps
        self._steps = 0  # since the last admission
        self._seconds = 0.0  # that they took
        self._tokens: int | None = None  # that it prefilled; None: nothing is known of this cycle
        self._idle = 0.0  # steps' worth of work that idle slots did not do since

    def __len__(self) -> int:
        return len(self._waiting)

    def limit(self, slots: int) -> None:
        """Another number of slots from now on. Those that run beyond it end where they are."""
        self._slots = slots

    def add(self, request: Waiting) -> None:
        self._waiting[request.key] = request

    def drop(self, key: int) -> bool:
        """Whether it waited."""
        return self._waiting.pop(key, None) is not None

    def take(self, running: int) -> list[Waiting]:
        """Those to be let in before the next step, with `running` requests in the batch: none, or as many as there is room for."""
        room = min(len(self._waiting), self._slots - running)
        if room <= 0 or (running and not self._due()):
            return []
        taken = [self._waiting.pop(key) for key in list(self._waiting)[:room]]
        if self._tokens is not None and self._plain_s:
            plain_s = statistics.median(self._plain_s)
            self._cycles.append((self._tokens, self._seconds - self._steps * plain_s))
            if len(self._cycles) >= LEAST_CYCLES:
                self.price_steps = max(0.0, _intercept(self._cycles)) / plain_s
        self._tokens = sum(len(r.tokens) for r in taken)
        self._steps, self._seconds, self._idle = 0, 0.0, 0.0
        return taken

    def _due(self) -> bool:
        if not self._hold:
            return True
        if len(self._plain_s) < LEAST_PLAIN:
            return self._steps >= FIRST_HOLD
        return self._idle >= self.price_steps

    def stepped(self, seconds: float, running: int) -> None:
        """A step took so long, with `running` requests beside those that wait."""
        self._steps += 1
        self._seconds += seconds
        if self._tokens is not None and self._steps > PIPELINE + self._tokens // self._batched_tokens:
            self._plain_s.append(seconds)
        idle = max(0, min(len(self._waiting), self._slots - running))
        self._idle += idle / max(1, running + idle)

    def forget_cycle(self) -> None:
        """Something else than steps comes between: this cycle tells nothing."""
        self._tokens = None


def _intercept(points: Sequence[tuple[int, float]]) -> float:
    """Of the least-squares line through (tokens, seconds); no more than the median of the seconds, with a slope of at least 0."""
    tokens, seconds = [t for t, _ in points], [s for _, s in points]
    middle = statistics.median(seconds)
    if len(set(tokens)) == 1:
        return middle
    line = statistics.linear_regression(tokens, seconds)
    return middle if line.slope < 0 else min(line.intercept, middle)
