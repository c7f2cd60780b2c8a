"""When waiting requests are let into a running batch. Pure: seconds come from outside.

A step that prefills besides decoding leaves the CUDA graph of plain decoding; with a small model on a fast card the host then
launches every kernel, and the step takes several times as long however short the prompts. Letting each request in at once makes
every step such a step. Keeping them all back leaves slots idle. So requests wait until what their idle slots have cost is what
letting them in will cost, which is the answer to the ski rental problem: at most twice the least possible, whatever comes. With
slots that fall free evenly it is the optimum: of S slots with samples of L tokens S/L end a step, the share of idle slots after P
steps adds up to P^2 / (2 L) steps, and P = sqrt(2 L a) minimises idle steps plus `a` steps every P.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

PIPELINE = 2  # steps after an admission that may still carry it, under async scheduling
FIRST_HOLD = 4  # steps between admissions until it is known what one costs
BESIDE = 4  # plain steps before and after an admission that it is compared with
LEAST_SEEN = 4  # admissions, to tell what one costs
REMEMBERED = 32  # of them
UNSEEN = 16  # admissions in a row that showed nothing; the next one keeps the batch to itself until it does


@dataclass(frozen=True)
class Waiting:
    """A request that the scheduler does not have yet."""

    key: int
    tokens: list[int]
    max_tokens: int


class Admission:
    """What waits. `batched_tokens`: most that one step prefills. Without `hold` nothing waits for more than a slot."""

    def __init__(self, *, slots: int, batched_tokens: int, hold: bool = True) -> None:
        self._slots, self._hold = slots, hold
        self._price = AdmissionPrice(batched_tokens)
        self._waiting: dict[int, Waiting] = {}
        self._steps = 0  # since the last admission
        self._idle = 0.0  # steps' worth of work that idle slots did not do since

    @property
    def price_steps(self) -> float:
        """What an admission costs besides its tokens, in plain steps; 0 until it is known."""
        return self._price.steps or 0.0

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
        self._price.admitted(sum(len(r.tokens) for r in taken), beside=running > 0)
        self._steps, self._idle = 0, 0.0
        return taken

    def _due(self) -> bool:
        if not self._hold:
            return True
        if self._price.steps is None:
            return self._steps >= FIRST_HOLD
        return self._idle >= self._price.steps and not self._price.looks

    def stepped(self, seconds: float, running: int) -> bool:
        """A step took so long, with `running` requests beside those that wait. Whether it was a plain one."""
        self._steps += 1
        plain = self._price.stepped(seconds)
        idle = max(0, min(len(self._waiting), self._slots - running))
        self._idle += idle / max(1, running + idle)
        return plain

    def forget_cycle(self) -> None:
        """Something else than steps comes between: what was seen last tells nothing."""
        self._price.forget()


class AdmissionPrice:
    """What letting requests into a running batch costs besides their tokens, learnt from the seconds of steps.

    The steps that carry an admission are compared with the plain steps right before and after it and with no others: on a card
    that others use too, whose turns come and go, all of them are stretched alike. What the others' turns begin or end within is
    far off, one way or the other, hence medians (Theil and Sen's line).
    """

    def __init__(self, batched_tokens: int) -> None:
        self.steps: float | None = None  # in plain steps; None: not known yet
        self._batched_tokens = batched_tokens
        self._seen: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # (tokens prefilled, plain steps they cost)
        self._plain_s: deque[float] = deque(maxlen=BESIDE)  # of the newest plain steps
        self._before_s: tuple[float, ...] = ()  # of those before the admission that is looked at
        self._after_s: list[float] = []
        self._carrying_s: list[float] = []
        self._tokens: int | None = None  # of that admission; None: none is looked at
        self._carries = 0  # steps to come that carry the newest admission
        self._unseen = 0

    @property
    def looks(self) -> bool:
        """An admission is looked at that no other should follow yet: too many in a row showed nothing."""
        return self._unseen >= UNSEEN and self._tokens is not None

    def admitted(self, tokens: int, *, beside: bool) -> None:
        """Requests of so many tokens are let in, `beside` others that run: into an empty batch it is another matter."""
        self._conclude()
        self._carries = 1 + PIPELINE + tokens // self._batched_tokens
        self._before_s, self._after_s, self._carrying_s = tuple(self._plain_s), [], []
        self._tokens = tokens if beside else None

    def stepped(self, seconds: float) -> bool:
        """A step took so long. Whether it was plain: it can carry no admission."""
        if self._carries:
            self._carries -= 1
            self._carrying_s.append(seconds)
            return False
        self._plain_s.append(seconds)
        self._after_s.append(seconds)
        if len(self._after_s) >= BESIDE:
            self._conclude()
        return True

    def forget(self) -> None:
        """The admission that is looked at, and the plain steps before it."""
        self._tokens = None
        self._plain_s.clear()

    def _conclude(self) -> None:
        """Count the admission that is looked at, if its steps and enough plain ones were seen."""
        tokens, self._tokens = self._tokens, None
        plain_s = (*self._before_s, *self._after_s)
        if tokens is None:
            return
        if self._carries or len(plain_s) < BESIDE:
            self._unseen += 1
            return
        self._unseen = 0
        self._seen.append((tokens, sum(self._carrying_s) / median(plain_s) - len(self._carrying_s)))
        if len(self._seen) >= LEAST_SEEN:
            self.steps = max(0.0, _intercept(self._seen))


def _intercept(points: Iterable[tuple[int, float]]) -> float:
    """Of Theil and Sen's line through (tokens, steps), with a slope of at least 0 and so no more than the median of the steps."""
    seen = sorted(points)
    slopes = [(y - x_) / (t - t_) for i, (t, y) in enumerate(seen) for t_, x_ in seen[:i] if t > t_]
    slope = max(0.0, median(slopes)) if slopes else 0.0
    return median([y - slope * t for t, y in seen])
