"""All replicas at once: running samples as flat arrays, moved through windows of time.

Every running sample of a replica gains one token a decode step, so a replica has one clock in tokens, V, and a sample that
was leased at V0 with L tokens to go ends at V0 + L. A window turns seconds into tokens by the quadratic of
`runtime.sim.speed`; what ends in it, and what takes its place, is exact in tokens. The one approximation is that a window's
speed is that of the number running in its middle, as foreseen from the window before.
"""

import dataclasses

import numpy as np
from numpy.typing import NDArray

from runtime.sim.groups import RING
from runtime.sim.runout import RunOut
from runtime.sim.speed import Floats, ReplicaSpeed

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
PHASES = ("decode", "prefill", "update", "idle")
INF = float("inf")
# What `remove` takes a replica out of.
_BY_SLOT = ("row", "first", "leased_at", "ends", "starts", "before", "leased_s", "shares", "ahead")
_BY_REPLICA = (
    "v", "stall", "slow", "context", "n", "version", "allowed", "drift", "growth", "decoded", "updating", "paused", "breaks",
    "spent",
)  # fmt: skip


@dataclasses.dataclass(slots=True)
class Lane:
    """One replica that serves. Its number is its place in the arrays of `Decoding`."""

    name: str
    speed: ReplicaSpeed


@dataclasses.dataclass(slots=True)
class Held:
    """What a replica held when it was let go: one entry a running sample."""

    rows: Ints
    done: Ints  # tokens sampled since the lease
    left: Ints
    context: Ints  # prompt and earlier tokens
    first: Ints
    start: Floats  # V at the lease


class Decoding:
    """Arrays by replica (V, stall, n, ...) and by slot (ends, begins, row, ...); slots of a replica lie together."""

    def __init__(self) -> None:
        self.lanes: list[Lane] = []
        self.v = self.stall = self.slow = self.context = np.zeros(0)
        self.n = self.version = np.zeros(0, dtype=np.int64)
        self.allowed = np.zeros(0, dtype=np.int64)  # samples it may hold now, its warm-up and KV use considered
        self.drift = np.zeros(0, dtype=np.int64)  # change of n in the last window
        self.growth = np.zeros(0)  # of context, over that of samples that all go on, in the last window; 1: none ended
        self.decoded = np.zeros(0)  # tokens since the replica came, for show
        self.updating = np.zeros(0)  # seconds of stalls that weight updates brought since then, for show
        self.paused = np.zeros(0, dtype=bool)
        self.breaks = np.zeros((0, RING))  # V at which each version took over
        self.spent = np.zeros((0, len(PHASES)))  # seconds by phase
        self.base = self.kv = np.zeros((0, 1))
        self.capacity = self.slots = np.zeros(0)
        self.prefill = np.zeros((3, 0))  # p0, p1, p2 of `ReplicaSpeed`
        self.begin = np.zeros(1, dtype=np.int64)  # first slot of each replica, and the end
        self.rep = self.row = self.first = np.zeros(0, dtype=np.int64)
        self.leased_at = np.zeros(0, dtype=np.int64)  # version in force on the replica at the lease
        self.ends = self.starts = self.before = self.leased_s = self.shares = np.zeros(0)
        self.ahead = np.zeros(0)  # tokens of context less V: before - starts
        self._runout: RunOut | None = None  # of the window that is open
        self.on = self.on_rep = np.zeros(
            0, dtype=np.int64
        )  # slots that hold a running sample as of the last count; whose
        self.pausing = 0  # replicas that are paused
        self._began = False  # whether samples began since the last count
        self.steps_of_window()

    # Replicas

    @property
    def running(self) -> int:
        """Samples that run on all replicas together, as of the last count."""
        return len(self.on)

    def steps_of_window(self) -> None:
        """Reset what a window remembers."""
        self.alpha = self.beta = self.target = self.waited = self.last = np.zeros(len(self.lanes))

    def add(self, lane: Lane, version: int, allowed: int) -> int:
        """A replica that begins to serve on weights `version`, at most `allowed` samples for now; answers with its number."""
        i, s = len(self.lanes), lane.speed.slots
        self.lanes.append(lane)
        self.v, self.stall, self.context = (np.append(a, 0.0) for a in (self.v, self.stall, self.context))
        self.slow, self.drift = np.append(self.slow, 1.0), np.append(self.drift, 0)
        self.growth, self.decoded = np.append(self.growth, 1.0), np.append(self.decoded, 0.0)
        self.updating = np.append(self.updating, 0.0)
        self.n, self.version = np.append(self.n, 0), np.append(self.version, version)
        self.allowed = np.append(self.allowed, allowed)
        self.paused = np.append(self.paused, False)
        self.breaks = np.vstack([self.breaks, np.full((1, RING), -INF)])
        self.spent = np.vstack([self.spent, np.zeros((1, len(PHASES)))])
        self.rep = np.append(self.rep, np.full(s, i))
        self.row, self.first, self.leased_at = (
            np.append(a, np.zeros(s, dtype=np.int64)) for a in (self.row, self.first, self.leased_at)
        )
        self.ends = np.append(self.ends, np.full(s, INF))
        for name in ("starts", "before", "leased_s", "shares", "ahead"):
            setattr(self, name, np.append(getattr(self, name), np.zeros(s)))
        self._tables()
        return i

    def _tables(self) -> None:
        width = max((x.speed.slots for x in self.lanes), default=0) + 1
        self.base, self.kv = np.zeros((len(self.lanes), width)), np.zeros((len(self.lanes), width))
        for i, lane in enumerate(self.lanes):
            self.base[i, : lane.speed.slots + 1], self.kv[i, : lane.speed.slots + 1] = (
                lane.speed.base_s,
                lane.speed.kv_s,
            )
        self.capacity = np.array([x.speed.kv_tokens for x in self.lanes])
        self.slots = np.array([x.speed.slots for x in self.lanes], dtype=float)
        self.prefill = np.array([x.speed.prefill for x in self.lanes]).reshape(len(self.lanes), 3).T.copy()
        self.begin = np.concatenate([[0], np.cumsum(self.slots.astype(np.int64))])
        self._line = np.arange(len(self.lanes)) * width  # where a replica's entries begin in the flat tables
        self._ones = np.ones(len(self.lanes))
        self._flat = self.base.reshape(-1), self.kv.reshape(-1)
        self.on = np.flatnonzero(np.isfinite(self.ends))
        self.on_rep = self.rep[self.on]
        self.steps_of_window()

    def pause(self, i: int) -> None:
        """Replica i decodes nothing until it is to `resume`."""
        self.pausing += not self.paused[i]
        self.paused[i] = True

    def resume(self, i: int) -> None:
        """Replica i goes on."""
        self.pausing -= bool(self.paused[i])
        self.paused[i] = False

    def remove(self, i: int) -> Floats:
        """A replica stops; what it still holds is forgotten. Answers with its seconds by phase."""
        spent: Floats = self.spent[i].copy()
        keep = self.rep != i
        shifted = self.rep[keep]
        self.rep = np.where(shifted > i, shifted - 1, shifted)
        for name in _BY_SLOT:
            setattr(self, name, getattr(self, name)[keep])
        self.resume(i)
        for name in _BY_REPLICA:
            setattr(self, name, np.delete(getattr(self, name), i, axis=0))
        del self.lanes[i]
        self._tables()
        return spent

    def mine(self, array: NDArray[np.float64], i: int) -> NDArray[np.float64]:
        """The slots of a replica."""
        return array[self.begin[i] : self.begin[i + 1]]

    def held(self, i: int, at: Ints) -> Held:
        """What the slots `at` of replica i hold."""
        done = np.floor(self.v[i] - self.starts[at] + 1e-6)
        total = self.ends[at] - self.starts[at]
        done = np.clip(done, 0, total - 1)
        return Held(
            rows=self.row[at],
            done=done.astype(np.int64),
            left=np.rint(total - done).astype(np.int64),
            context=np.rint(self.before[at]).astype(np.int64),
            first=self.first[at],
            start=self.starts[at],
        )

    # Windows

    def open_window(self, h: float, *, constant: bool) -> None:
        """How far each replica gets in the next `h` seconds. `constant`: nothing ends before its last moment."""
        self._runout = None
        drift, growth = (0.0, 1.0) if constant else (self.drift, self.growth)
        waited = np.minimum(self.stall, h)
        able = h - waited
        if self.pausing:
            waited, able = np.where(self.paused, 0.0, waited), np.where(self.paused, 0.0, able)
        least = np.minimum(self.n, 1)
        middle = np.minimum(np.maximum(np.rint(self.n + drift / 2), least), self.slots).astype(np.int64)
        base, kv = self._at(middle)
        alpha = (base + kv * self.context) * self.slow
        square = alpha * alpha
        # Where context shrinks, no faster than leaves the square root real.
        beta = np.maximum(kv * middle * growth / 2 * self.slow, -0.18 * square / np.maximum(able, 1e-12))
        root = alpha + np.sqrt(square + 4 * beta * able)
        gained = np.divide(2 * able, root, out=np.zeros(len(root)), where=(root > 0) & (self.n > 0))
        self.alpha, self.beta = alpha, beta
        self._opened(h, waited, able, self.v + gained)

    def open_runout(self, runout: RunOut, h: float) -> None:
        """`open_window` where no sample begins before its end: exact, however long it is."""
        self._runout = runout
        waited = np.where(self.paused, 0.0, np.minimum(self.stall, h))
        able = np.where(self.paused, 0.0, h - waited)
        base, kv = self._at(self.n)
        self.alpha, self.beta = (base + kv * self.context) * self.slow, kv * self.n / 2 * self.slow
        self._opened(h, waited, able, runout.reached(h))

    def _opened(self, h: float, waited: Floats, able: Floats, target: Floats) -> None:
        self._h, self._able, self.waited, self.target = h, able, waited, target
        self._before_n, self._before_context = self.n, self.context
        self.last = np.zeros(len(self.lanes))  # seconds into the window at which a replica's last sample so far ended

    def first_end_s(self) -> float:
        """Seconds to the first sample that ends, if nothing changes; infinite where none runs. Exact."""
        if not len(self.ends):
            return INF
        least = np.minimum.reduceat(self.ends, self.begin[:-1])
        x = np.where(np.isfinite(least), least - self.v, INF)
        base, kv = self._at(self.n)
        alpha, beta = (base + kv * self.context) * self.slow, kv * self.n / 2 * self.slow
        with np.errstate(invalid="ignore"):
            seconds = np.where(np.isfinite(x), self.stall + alpha * x + beta * x * x, INF)
        return float(np.min(np.where(self.paused, INF, seconds)))

    def step_s(self) -> float:
        """Seconds of a decode step, summed over running samples."""
        base, kv = self._at(self.n)
        return float(((base + kv * self.context) * self.slow * self.n).sum())

    def elasticity(self, step_s: float) -> float:
        """How much of `step_s` would go with the samples themselves: 1 where a step takes twice as long for twice as many, 0
        where it does not matter."""
        half = (self.n + 1) >> 1
        base, kv = self._at(half)
        fewer = (base + kv * self.context * half / np.maximum(self.n, 1)) * self.slow
        return 2 * (step_s - float((fewer * self.n).sum())) / step_s if step_s > 0 else 0.0

    def _at(self, running: Ints) -> tuple[Floats, Floats]:
        """(base_s, kv_s) of each replica with so many samples."""
        at, (base, kv) = self._line + running, self._flat
        return base[at], kv[at]

    def ended(self, among: Ints | None = None) -> Ints:
        """Slots whose sample ends within the window."""
        if self._runout is not None:
            at = self.on if among is None else among
            return at[self._runout.into[at] <= self._h]
        if among is not None:
            return among[self.ends[among] <= self.target[self.rep[among]]] if len(among) else among
        return self.on[self.ends[self.on] <= self.target[self.on_rep]]

    def seconds_into(self, at: Ints, *, after: int = 0) -> Floats:
        """When, after the start of the window, the samples of these slots end, or others `after` tokens later; infinite for those
        that the window does not reach: where context shrinks its quadratic turns back behind it."""
        if self._runout is not None:
            assert after == 0  # nothing takes their place
            return self._runout.into[at]
        r = self.rep[at]
        x = (self.ends[at] + after if after else self.ends[at]) - self.v[r]
        out: Floats = self.waited[r] + self.alpha[r] * x + self.beta[r] * x * x
        if after:
            out[self.v[r] + x > self.target[r]] = INF
        return out

    def note_ends(self, at: Ints, into: Floats) -> None:
        """The samples of these slots ended so many seconds into the window."""
        np.maximum.at(self.last, self.rep[at], into)

    def clear(self, at: Ints) -> None:
        """These slots hold nothing any more."""
        self.ends[at] = INF

    def lease(
        self,
        at: Ints,
        *,
        starts: Floats,
        rows: Ints,
        lengths: Ints,
        before: Floats,
        first: Ints,
        now_s: Floats,
        shares: Floats | float = 0.0,
        found: Floats | float = 0.0,
    ) -> None:
        """Begin samples in these slots: prefill of `before` tokens each, then `lengths` to decode. Of their prompts they have
        `shares` tokens in common with others of their group, and `found` of them are there already."""
        self.starts[at], self.ends[at], self.ahead[at] = starts, starts + lengths, before - starts
        self.shares[at] = shares
        self.row[at], self.before[at], self.first[at], self.leased_s[at] = rows, before, first, now_s
        self._began = True
        r = self.rep[at]
        self.leased_at[at] = self.version[r]
        p0, p1, p2 = self.prefill
        seconds = (p0[r] + p1[r] * (before - found) + p2[r] * (before * before - found * found)) * self.slow[r]
        self.stall += np.bincount(r, weights=seconds, minlength=len(self.lanes))

    def close_window(self) -> None:
        """Everybody is where the window ends."""
        moved, self.v = self.target - self.v, self.target
        if np.count_nonzero(self.waited):
            self.stall = self.stall - self.waited
            self.spent[:, 1] += self.waited
        self.recount()
        able, busy = self._able, self._able
        if np.count_nonzero(self.n) < len(self.n):  # some have nothing left: busy until their last sample ended
            busy = np.where(self.n > 0, able, np.minimum(np.maximum(self.last - self.waited, 0.0), able))
            self.spent[:, 3] += able - busy
        self.spent[:, 0] += busy
        if self.pausing:
            self.spent[:, 2] += np.where(self.paused, self._h, 0.0)
        if self._runout is not None:
            self.decoded += self._runout.tokens(self.v)
            self.drift = np.zeros(len(self.lanes), dtype=np.int64)  # those that come are others
            self.growth = self._ones
            self._runout = None
            return
        self.decoded += moved * (self.n + self._before_n) / 2
        self.drift = self.n - self._before_n
        whole = moved * np.maximum(self._before_n, 1)
        gained = self.context - self._before_context
        grown = np.divide(gained, whole, out=self._ones.copy(), where=whole > 0)
        self.growth = np.minimum(np.maximum(grown, -1.0), 1.0)

    def recount(self) -> None:
        """Running samples and tokens of context by replica, from the slots."""
        if self._began:
            on = self.on = (self.ends < INF).nonzero()[0]
            r = self.on_rep = self.rep[on]
            self._began = False
        else:  # those that ran, without those that ended
            still = self.ends[self.on] < INF
            on, r = self.on, self.on_rep = self.on[still], self.on_rep[still]
        first = on.searchsorted(self.begin)  # slots of a replica lie together
        self.n = first[1:] - first[:-1]
        self.context = self.n * self.v + np.bincount(r, weights=self.ahead[on], minlength=len(self.lanes))

    def switch(self, i: int, version: int) -> None:
        """Replica i goes on with newer weights from here."""
        for v in range(max(int(self.version[i]) + 1, version - RING + 1), version + 1):
            self.breaks[i, v % RING] = self.v[i]
        self.version[i] = version

    def recompute_s(self, i: int) -> float:
        """Seconds to prefill the prefixes of all that decode on replica i again, what samples share once."""
        mine = slice(int(self.begin[i]), int(self.begin[i + 1]))
        on = np.isfinite(self.ends[mine])
        if not on.any():
            return 0.0
        contexts, twice = (self.before[mine] + self.v[i] - self.starts[mine])[on], self.spared(i)
        p0, p1, p2 = self.prefill[:, i]
        seconds = p0 + p1 * (contexts.sum() - twice.sum()) + p2 * ((contexts**2).sum() - (twice**2).sum())
        speed = self.lanes[i].speed
        seconds = seconds / speed.recompute_efficiency + on.sum() * speed.recompute_sample_s
        return float(seconds * self.slow[i] * speed.slots_used)

    def spared(self, i: int) -> Floats:
        """Tokens of KV that running samples of replica i need not have for themselves: all but the first of each group."""
        mine = slice(int(self.begin[i]), int(self.begin[i + 1]))
        on = np.isfinite(self.ends[mine])
        shares = self.shares[mine][on]
        if not shares.any():
            return np.zeros(0)
        _, first = np.unique(self.row[mine][on], return_index=True)
        twice: Floats = np.delete(shares, first)
        return twice

    def held_tokens(self, share: float) -> Floats:
        """Tokens of KV that each replica holds; those that use less than `share` of their room even with every prompt for itself
        are not looked at more closely."""
        held: Floats = self.context.copy()
        for i in np.flatnonzero(self.context > share * self.capacity).tolist():
            held[i] -= self.spared(i).sum()
        return held

    def spans(self, at: Ints, upto: Floats) -> list[tuple[Ints, Ints]]:
        """Tokens of these slots' samples by version, from the lease until V = `upto`: pairs (versions, tokens), each with an
        entry a slot. A token belongs to the version in force when its step began."""
        r = self.rep[at]
        current, begun = self.version[r], self.leased_at[at]
        start = self.starts[at]
        total = np.rint(upto - start).astype(np.int64)
        if (begun == current).all():
            return [(current, total)]
        begun = np.maximum(begun, current - RING + 1)
        out: list[tuple[Ints, Ints]] = []
        high = total
        for back in range(int((current - begun).max()) + 1):
            v = current - back
            on = v >= begun
            edge = np.ceil(self.breaks[r, v % RING] - start - 1e-9)
            low = np.where(v == begun, 0, np.clip(np.where(np.isfinite(edge), edge, 0), 0, total)).astype(np.int64)
            low = np.minimum(low, high)
            out.append((np.where(on, v, begun), np.where(on, high - low, 0)))
            high = np.where(on, low, high)
        return out
