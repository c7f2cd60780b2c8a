"""Figures over sliding windows: rates, shares of time, staleness of what was trained. The clock is an argument."""

from collections import deque
from collections.abc import Mapping, Sequence

from planner.record import record

RATE_WINDOW_S = 10.0
SHARE_WINDOW_S = 30.0
STEPS_WINDOW = 20


class Rate:
    """Events a second over a sliding window."""

    def __init__(self, window_s: float = RATE_WINDOW_S) -> None:
        self._window_s = window_s
        self._events: deque[tuple[float, int]] = deque()
        self._sum = 0
        self._since_s: float | None = None

    def add(self, now_s: float, n: int) -> None:
        """Count `n` events."""
        if self._since_s is None:
            self._since_s = now_s
        if self._events and now_s - self._events[-1][0] < self._window_s / 100:
            self._events[-1] = (self._events[-1][0], self._events[-1][1] + n)
        else:
            self._events.append((now_s, n))
        self._sum += n
        self._expire(now_s)

    def per_s(self, now_s: float) -> float:
        """Rate over the window, or over the time since the first event when that is shorter (at least a second)."""
        self._expire(now_s)
        if self._since_s is None:
            return 0.0
        return self._sum / min(self._window_s, max(1.0, now_s - self._since_s))

    def _expire(self, now_s: float) -> None:
        while self._events and self._events[0][0] <= now_s - self._window_s:
            self._sum -= self._events.popleft()[1]


class StepRate:
    """Tokens a second of work that comes in steps, however long they last: over the last steps, and falling once the next
    one is overdue."""

    def __init__(self, steps: int = 5, window_s: float = RATE_WINDOW_S) -> None:
        self._steps, self._window_s = steps, window_s
        self._events: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, tokens: int) -> None:
        """A step that ended now."""
        self._events.append((now_s, tokens))
        while len(self._events) > self._steps + 1 and now_s - self._events[1][0] > self._window_s:
            self._events.popleft()

    def per_s(self, now_s: float) -> float:
        """Tokens between the first and the last step kept, over the time between them. 0 before the second."""
        if len(self._events) < 2:
            return 0.0
        begin, end = self._events[0][0], self._events[-1][0]
        period = (end - begin) / (len(self._events) - 1)
        span = max(end, now_s - period) - begin
        tokens = sum(n for _, n in self._events) - self._events[0][1]
        return tokens / span if span > 0 else 0.0


class Level:
    """Time average of a level in 0..1 over a sliding window."""

    def __init__(self, now_s: float, window_s: float = SHARE_WINDOW_S) -> None:
        self._window_s = window_s
        self._start_s = now_s
        self._now: tuple[float, float] = (now_s, 0.0)  # since, level
        self._past: deque[tuple[float, float, float]] = deque()  # from, to, level

    def set(self, now_s: float, level: float) -> None:
        """The level from now on."""
        since, old = self._now
        if level == old:
            return
        if now_s > since:
            self._past.append((since, now_s, old))
        self._now = (now_s, level)
        while self._past and self._past[0][1] <= now_s - self._window_s:
            self._past.popleft()

    @property
    def level(self) -> float:
        """The level now."""
        return self._now[1]

    def mean(self, now_s: float) -> float:
        """Average over the window, or since the start when that is shorter."""
        begin = max(now_s - self._window_s, self._start_s)
        if now_s <= begin:
            return self._now[1]
        area = max(0.0, now_s - max(begin, self._now[0])) * self._now[1]
        area += sum(max(0.0, to - max(begin, since)) * level for since, to, level in self._past)
        return area / (now_s - begin)


@record
class StepFigures:
    """What one applied step adds to the run's figures. `ages` counts trained tokens by age."""

    ages: Mapping[int, int]
    trained_tokens: int
    masked_tokens: int
    samples: int
    two_versions: int  # samples whose tokens are of more than one version
    reward_mean: float

    def encode(self) -> dict[str, object]:
        """As JSON values."""
        return {
            "ages": {str(a): n for a, n in sorted(self.ages.items())},
            "trained_tokens": self.trained_tokens,
            "masked_tokens": self.masked_tokens,
            "samples": self.samples,
            "two_versions": self.two_versions,
            "reward_mean": self.reward_mean,
        }


def decode_figures(raw: Mapping[str, object]) -> StepFigures:
    """The inverse of `StepFigures.encode`."""
    ages = raw["ages"]
    if not isinstance(ages, Mapping):
        raise TypeError(f"ages must be a table, got {ages!r}")
    return StepFigures(
        ages={int(a): int(n) for a, n in ages.items()},
        trained_tokens=int(str(raw["trained_tokens"])),
        masked_tokens=int(str(raw["masked_tokens"])),
        samples=int(str(raw["samples"])),
        two_versions=int(str(raw["two_versions"])),
        reward_mean=float(str(raw["reward_mean"])),
    )


@record
class Staleness:
    """Ages of trained tokens, in optimiser steps. None: no token was trained."""

    mean: float | None
    p95: float | None
    most: int | None


def staleness(ages: Mapping[int, int]) -> Staleness:
    """Mean, 95th percentile (the lowest age that at least 95 % of tokens do not exceed) and maximum."""
    total = sum(ages.values())
    if total == 0:
        return Staleness(mean=None, p95=None, most=None)
    mean = sum(a * n for a, n in ages.items()) / total
    below, p95 = 0, 0
    for age in sorted(ages):
        below += ages[age]
        p95 = age
        if below * 100 >= 95 * total:
            break
    return Staleness(mean=mean, p95=float(p95), most=max(a for a, n in ages.items() if n))


def sum_ages(steps: Sequence[StepFigures]) -> dict[int, int]:
    """Trained tokens by age over several steps."""
    total: dict[int, int] = {}
    for figures in steps:
        for age, n in figures.ages.items():
            total[age] = total.get(age, 0) + n
    return total
