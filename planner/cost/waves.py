"""The end of a synchronous rollout: how long N samples take a replica that decodes b at once and gets no more.

A decode step of n samples takes `a + c n` seconds, so whatever the order, N samples of mean length E[L] take

    T(N) = a * steps + c * N * E[L]          (prefill and KV reads grow with N alike, and are in c)

and all that is left is the number of steps: the makespan, in tokens, of N jobs handed one by one to b slots that each gain a
token a step. In units of E[L], with nu = N / b samples a slot, it is M(nu):

- nu <= 1: all start at once, and the longest of the step's samples ends last: M = E[max of B] / E[L].
- Constant lengths: whole waves, M = ceil(nu).
- Else the queue is empty at the time t at which a slot has started nu samples on average, 1 + m(t) = nu with m the renewal
  function of the lengths, m = F + m * dF. What runs then has the residual lives of a renewal process,
  P(R > x) = 1 - F(t + x) + sum over u <= t of (1 - F(t - u + x)) dm(u), and the last of the B / nu samples that run on all
  replicas ends M = t + E[max R]. For large nu this is nu - E[L^2] / (2 E[L]^2) + E[max R]: while the batch drains the fixed part
  of each step is paid for the longest residual life and not for the mean one.

With tau(b) = (a + c b) E[L], the time of a full wave, and phi = a E[L] / tau its fixed part, T = tau (phi M(nu) + (1 - phi) nu).
The longest of all samples is taken to end on every replica: whichever has it ends the step.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.lengths import quantiles
from planner.record import record
from planner.workload import Lengths

Array = NDArray[np.float64]
Curve = tuple[tuple[float, float], ...]  # (seconds, tokens), both ascending: what is done by then, linear between

_WAVES = 12  # of constant lengths, or units of the mean length, that are counted; beyond, one more costs one more
_CELLS = 48  # of the renewal equation, in a mean length
_TIMES = (*(n / 16 for n in range(1, 33)), 2.5, 3.0, 4.0, 6.0, 8.0, 12.0)
_POINTS = 1024
_TAIL = 256  # points of the residual lives


@functools.lru_cache(maxsize=64)
def makespan(lengths: Lengths, samples: int) -> tuple[tuple[float, float], ...]:
    """(nu, M(nu)) where M bends, for a step of so many samples; both ascending, beyond the last M grows as nu does. Of constant
    lengths a further wave begins just beyond a whole number: at it M is that of the waves so far, and has no other value."""
    if lengths.cv == 0:
        steps = [(n, math.nextafter(n, math.inf)) for n in map(float, range(1, _WAVES + 1))]
        return ((0.0, 1.0), *(bend for n, beyond in steps for bend in ((n, n), (beyond, n + 1.0))))
    values = quantiles(lengths, _POINTS)
    values = values / values.mean()
    out = [(0.0, _most(1 - _below(values, _grid(values)), _grid(values), samples))]
    out.append((1.0, out[0][1]))
    at = np.arange(_WAVES * _CELLS + 1) / _CELLS
    started = np.diff(_below(values, at), prepend=0.0)
    renewals = np.zeros(len(at))
    for n in range(len(at)):
        renewals[n] = started[: n + 1].sum() + started[1 : n + 1] @ renewals[:n][::-1]
    born = np.diff(renewals, prepend=0.0)
    for t in _TIMES:
        n = round(t * _CELLS)
        x = _grid(values)
        ages = t - at[: n + 1]
        left = 1 - _below(values, t + x)
        left = left + born[: n + 1] @ (1 - _below(values, (ages[:, None] + x[None, :]).ravel()).reshape(n + 1, -1))
        nu = 1 + float(renewals[n])
        out.append((max(nu, out[-1][0]), max(out[-1][1], t + _most(np.minimum(left, 1.0), x, samples / nu))))
    return tuple(out)


def _grid(values: Array) -> Array:
    return np.linspace(0.0, float(values[-1]), _TAIL)


def _below(values: Array, x: Array) -> Array:
    """F(x) of a distribution given by its ascending quantiles."""
    out: Array = np.searchsorted(values, x, side="right") / len(values)
    return out


def _most(survival: Array, x: Array, of: float) -> float:
    """E[max] of `of` draws with that survival function."""
    still = 1 - (1 - survival) ** max(1.0, of)
    return float(np.trapezoid(still, x))


@record
class Wave:
    """A replica at one concurrency, for samples of mean length."""

    running: int
    least: int  # samples from which its curve is told; fewer are another concurrency's
    tau_s: float  # a full wave
    fixed_s: float  # of it, whatever the number that run
    tokens: float  # of a sample


def finished(wave: Wave, bends: Sequence[tuple[float, float]]) -> Curve:
    """What a replica has done by when. `bends`: of the makespan."""
    share, nu = wave.fixed_s / wave.tau_s, wave.least / wave.running
    first = [
        (nu, m0 + (nu - n0) / (n1 - n0) * (m1 - m0)) for (n0, m0), (n1, m1) in itertools.pairwise(bends) if n0 < nu < n1
    ]
    points = [*first, *(bend for bend in bends if bend[0] >= nu)]
    curve = [(wave.tau_s * (share * m + (1 - share) * n), n * wave.running * wave.tokens) for n, m in points]
    return tuple(dict.fromkeys(curve))


def done_by(curve: Curve, seconds: float, rate: float) -> float:
    """Tokens done in so many seconds; beyond the end of the curve at `rate`."""
    if seconds < curve[0][0]:
        return 0.0
    if seconds >= curve[-1][0]:
        return curve[-1][1] + rate * (seconds - curve[-1][0])
    i = bisect.bisect_right(curve, (seconds, math.inf))
    (s0, t0), (s1, t1) = curve[i - 1], curve[i]
    return t0 + (t1 - t0) * (seconds - s0) / (s1 - s0) if s1 > s0 else t1


def envelope(curves: Sequence[Curve], rates: Sequence[float]) -> tuple[Array, Array, float]:
    """The most that any of some curves has done: (seconds, tokens, rate beyond). Linear between its points, exactly."""
    ends = sorted({s for c in curves for s, _ in c})
    last = ends[-1] * 2
    cuts = np.array([*ends, last])
    # Just before and at each point: curves begin with a jump.
    mids = [(a, b) for a, b in itertools.pairwise(cuts) if b > a]
    seconds: list[float] = []
    tokens: list[float] = []
    for a, b in mids:
        inside = a + (b - a) * 1e-9, b - (b - a) * 1e-9
        low, high = (np.array([done_by(c, x, r) for c, r in zip(curves, rates, strict=True)]) for x in inside)
        points = {a, b}
        best = int(low.argmax())
        at = 0.0
        slope = high - low
        while True:  # along the upper hull of the lines of this interval
            with np.errstate(divide="ignore", invalid="ignore"):
                cross = np.where(slope > slope[best], (low[best] - low) / (slope - slope[best]), np.inf)
            nxt = int(cross.argmin())
            if not at < cross[nxt] < 1:
                break
            at, best = float(cross[nxt]), nxt
            points.add(a + (b - a) * at)
        for x in sorted(points):
            y = inside[0] if x == a else inside[1] if x == b else x
            seconds.append(float(x))
            tokens.append(max(done_by(c, y, r) for c, r in zip(curves, rates, strict=True)))
    return np.array(seconds), np.maximum.accumulate(np.array(tokens)), max(rates)
