"""Replicas that get no new samples: when each of theirs ends, exactly.

Between two ends the number running is constant, so a replica's seconds are a sum of quadratics (`runtime.sim.speed`), one an
end, and all of them are known at once, however far away the next event is.
"""

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from runtime.sim.decoding import Decoding

Floats = NDArray[np.float64]


class RunOut:
    """From where the replicas are now. `into`: seconds to the end of the sample in each slot; infinite where none ends."""

    def __init__(self, d: "Decoding") -> None:
        at, r = d.on, d.on_rep
        order = np.lexsort((d.ends[at], r))  # slots of a replica lie together already
        at = at[order]
        first = np.cumsum(d.n) - d.n  # place of each replica's first sample
        ends, running = d.ends[at], d.n[r] - (np.arange(len(at)) - first[r])
        since = np.empty(len(at))  # V from which on so many run
        since[1:] = ends[:-1]
        has = np.flatnonzero(d.n)
        since[first[has]] = d.v[has]
        summed = np.cumsum(d.ahead[at])
        rest = summed[first[r] + d.n[r] - 1] - summed + d.ahead[at]  # of all that still run
        context, tokens = running * since + rest, np.maximum(ends - since, 0.0)
        base, kv = d.base[r, running], d.kv[r, running]
        alpha, beta = (base + kv * context) * d.slow[r], kv * running / 2 * d.slow[r]
        seconds = alpha * tokens + beta * tokens * tokens
        passed = np.cumsum(seconds)
        ended_s = passed - (passed - seconds)[first[r]] + d.stall[r]
        if d.pausing:
            ended_s[d.paused[r]] = np.inf
        self.into = np.full(len(d.ends), np.inf)
        self.into[at] = ended_s
        self.last_s = float(ended_s.max(where=ended_s < np.inf, initial=-np.inf))
        # Engines preempt where KV runs full, which makes samples wait.
        self.fits = bool((context + running * tokens <= d.capacity[r]).all())
        self._d, self._r, self._first = d, r, first
        self._from_v = d.v
        self._ends, self._since, self._ended_s, self._began_s = ends, since, ended_s, ended_s - seconds
        self._alpha, self._beta = alpha, beta

    def reached(self, h: float) -> Floats:
        """V of each replica `h` seconds from now; that of its last end where nothing is left by then."""
        d = self._d
        ended = np.bincount(self._r[self._ended_s <= h], minlength=len(d.n))
        out: Floats = self._from_v.copy()
        empty = np.flatnonzero((d.n > 0) & (ended == d.n))
        out[empty] = self._ends[(self._first + d.n - 1)[empty]]
        going = np.flatnonzero((ended < d.n) & ~d.paused & (d.stall < h))
        k = (self._first + ended)[going]
        able = np.maximum(h - self._began_s[k], 0.0)
        root = self._alpha[k] + np.sqrt(self._alpha[k] ** 2 + 4 * self._beta[k] * able)
        gained = np.divide(2 * able, root, out=np.zeros(len(k)), where=root > 0)
        out[going] = np.minimum(self._since[k] + gained, self._ends[k])
        return out

    def tokens(self, v: Floats) -> Floats:
        """Tokens that each replica samples from now until it is at `v`."""
        sampled = np.minimum(self._ends, v[self._r]) - self._from_v[self._r]
        out: Floats = np.bincount(self._r, weights=sampled, minlength=len(v)).astype(float)
        return out

    def running(self, after_s: float) -> int:
        """Samples that still run so many seconds from now."""
        return int(np.count_nonzero(self._ended_s > after_s))
