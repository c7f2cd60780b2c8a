"""Lengths of prompts and responses: log-normal, exponential, constant or as listed, growing as training goes on."""

import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from planner.errors import InvalidInput
from planner.record import record
from planner.workload import Lengths

Ints = NDArray[np.int64]


@record
class LengthModel:
    """Draws whole tokens. The mean holds after the cut at `max_tokens`, except for a list, which is taken as it is."""

    family: Literal["lognormal", "exponential", "constant", "listed"]
    mean_tokens: float
    cv: float = 0.0  # lognormal: standard deviation over mean, before the cut
    max_tokens: int
    listed: tuple[int, ...] = ()
    growth_per_step: float = 0.0  # the mean is (1 + growth_per_step * step) times as long at that step

    def __post_init__(self) -> None:
        if not 0 < self.mean_tokens <= self.max_tokens or not 0 <= self.cv < math.inf:
            raise InvalidInput(
                "lengths need 0 < mean <= longest and cv >= 0", got=(self.mean_tokens, self.cv, self.max_tokens)
            )
        if not math.isfinite(self.growth_per_step):
            raise InvalidInput("lengths grow by a finite share at a step", got=self.growth_per_step)
        if self.family == "listed" and not self.listed:
            raise InvalidInput("a list of lengths is empty", expected="at least one length")
        if any(n < 1 for n in self.listed):
            raise InvalidInput("lengths are at least 1 token", got=min(self.listed))

    @property
    def spread(self) -> float:
        """Standard deviation over mean, before the cut."""
        if self.family == "listed":
            return float(np.std(self.listed) / np.mean(self.listed))
        return {"constant": 0.0, "exponential": 1.0}.get(self.family, self.cv)

    def factor(self, step: int) -> float:
        """How much longer than at the start answers are at that step. Answers that shrink end at one token."""
        return max(min(1.0, 1.0 / self.mean_tokens), 1.0 + self.growth_per_step * step)

    def draw(
        self, rng: np.random.Generator, count: int, step: int = 0, *, rounding: np.random.Generator | None = None
    ) -> Ints:
        """`count` lengths at that step, at least 1 and at most `max_tokens` each. With a generator of its own for `rounding`
        it does not matter by how many at once they are drawn."""
        grown = self.factor(step)
        if self.family == "listed":
            values = np.asarray(self.listed, dtype=float)[rng.integers(0, len(self.listed), count)] * grown
        else:
            mean = min(self.mean_tokens * grown, float(self.max_tokens))
            if self.family == "constant" or (self.family == "lognormal" and self.cv < 1e-6):
                values = np.full(count, mean)
            elif self.family == "exponential":
                values = rng.exponential(mean, count)
            else:
                sigma = math.sqrt(math.log1p(self.cv**2))
                values = rng.lognormal(_location(mean, sigma, float(self.max_tokens)), sigma, count)
        whole = np.floor(np.minimum(values, self.max_tokens) + (rounding or rng).random(count))  # keeps the mean
        return np.clip(whole, 1, self.max_tokens).astype(np.int64)


@functools.lru_cache(maxsize=64)
def _location(mean: float, sigma: float, most: float) -> float:
    """The log-normal's mu whose mean, cut at `most`, is `mean`."""

    def cut_mean(mu: float) -> float:
        z = (math.log(most) - mu) / sigma
        body = math.exp(mu + sigma**2 / 2) * 0.5 * math.erfc(-(z - sigma) / math.sqrt(2))
        return body + most * 0.5 * math.erfc(z / math.sqrt(2))

    low = high = math.log(mean) - sigma**2 / 2
    if mean >= most * (1 - 1e-9):
        return math.log(most)
    if cut_mean(low) >= mean * (1 - 1e-9):
        return low
    while cut_mean(high) < mean:
        high += 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if cut_mean(middle) < mean else (low, middle)
    return high


def from_workload(lengths: Lengths, *, growth_per_step: float = 0.0) -> LengthModel:
    """The distribution that the planner assumes."""
    return LengthModel(
        family="lognormal" if lengths.cv > 0 else "constant",
        mean_tokens=lengths.mean_tokens,
        cv=lengths.cv,
        max_tokens=lengths.max_tokens,
        growth_per_step=growth_per_step,
    )


def listed(values: Sequence[int], *, growth_per_step: float = 0.0) -> LengthModel:
    """Draws from measured lengths, each as likely as any other."""
    if not values:
        raise InvalidInput("a list of lengths is empty", expected="at least one length")
    return LengthModel(
        family="listed",
        mean_tokens=sum(values) / len(values),
        max_tokens=math.ceil(max(values) * max(1.0, 1.0 + 1000 * growth_per_step)),
        listed=tuple(values),
        growth_per_step=growth_per_step,
    )
