"""Moments of the length distributions: what running, training and waiting samples look like.

A length is log-normal with the given mean and coefficient of variation, cut at its maximum; cv = 0 is a constant.
The mean and the second moment are taken as given (they are what a run measures); the maximum cuts the tail and the
third moment.
"""

import functools
import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from planner.record import record
from planner.workload import Lengths, Workload

_POINTS = 2048


@functools.lru_cache(maxsize=64)
def quantiles(lengths: Lengths, points: int) -> NDArray[np.float64]:
    """`points` lengths at evenly spaced probabilities, ascending, in tokens (at least 1 each); not to be written to."""
    found = _lengths_at(lengths, [(i + 0.5) / points for i in range(points)])
    found.flags.writeable = False
    return found


def longest(lengths: Lengths, points: int) -> float:
    """The last of `quantiles(lengths, points)`."""
    return float(_lengths_at(lengths, [(points - 0.5) / points])[0])


def _lengths_at(lengths: Lengths, probabilities: Sequence[float]) -> NDArray[np.float64]:
    if lengths.cv == 0:
        return np.full(len(probabilities), float(lengths.mean_tokens))
    sigma2 = math.log1p(lengths.cv**2)
    mu, sigma = math.log(lengths.mean_tokens) - sigma2 / 2, math.sqrt(sigma2)
    normal = NormalDist()
    z = np.array([normal.inv_cdf(p) for p in probabilities])
    return np.clip(np.exp(mu + sigma * z), 1.0, float(lengths.max_tokens))


def expected_max(values: NDArray[np.float64], of: int) -> float:
    """E[max of `of` draws] of a distribution given by its ascending quantiles."""
    n = len(values)
    edges = (np.arange(n + 1) / n) ** of
    return float(np.dot(values, np.diff(edges)))


@record
class Moments:
    """Tokens, and tokens squared, of one sample of the workload."""

    prompt: float  # E[P]
    prompt2: float  # E[P^2]
    response: float  # E[L]
    sequence: float  # E[P + L]
    sequence2: float  # E[(P + L)^2], of training
    longest: float  # the longest sequence a micro-batch must hold
    context: float  # mean context of a running sample: E[P] + E[L^2] / (2 E[L])
    context2: float  # E[context^2] of a running sample
    tail_group: float  # E[max of S lengths] / E[L]
    tail_batch: float  # E[max of B lengths] / E[L]

    @property
    def context_sd(self) -> float:
        """Standard deviation of a running sample's context."""
        return math.sqrt(max(0.0, self.context2 - self.context**2))


@functools.lru_cache(maxsize=64)  # the judge asks for each plan anew; a pure function of a value
def moments(workload: Workload) -> Moments:
    """All moments the cost model needs."""
    p, r = workload.prompt, workload.response
    values = quantiles(r, _POINTS)
    var = p.second_moment - p.mean_tokens**2 + r.second_moment - r.mean_tokens**2
    sequence = p.mean_tokens + r.mean_tokens
    # A running sample is met with probability proportional to its length, at a uniform point of it.
    done = r.second_moment / (2 * r.mean_tokens)
    done2 = float(np.mean(values**3)) / (3 * float(np.mean(values)))
    context = p.mean_tokens + done
    context2 = p.second_moment + 2 * p.mean_tokens * done + max(done2, done**2)
    return Moments(
        prompt=p.mean_tokens,
        prompt2=p.second_moment,
        response=r.mean_tokens,
        sequence=sequence,
        sequence2=var + sequence**2,
        longest=float(p.max_tokens + r.max_tokens),
        context=context,
        context2=context2,
        tail_group=max(1.0, expected_max(values, workload.responses_per_prompt) / r.mean_tokens),
        tail_batch=max(1.0, expected_max(values, workload.samples_per_step) / r.mean_tokens),
    )
