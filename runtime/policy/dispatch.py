"""Dispatch: how many samples a replica may take now, and which.

Replicas are judged by measured step time and room for KV, never by request count. A grant follows one question: would
this replica finish one more sample before the others, left alone, could have finished everything that waits? With much
waiting the answer is yes for everybody; near the end of the work a slow replica is passed over, so it never holds the
last sample of a batch that a fast one would long have finished.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from enum import IntEnum

from planner.record import record

KV_HIGH_WATER = 0.9  # beyond this share of the KV cache nothing is added
FIRST_SHARE = 4  # a new replica begins with slots / FIRST_SHARE samples
FORGET = 0.8  # weight of the past in the speed model, per observation
WINDOW = 4  # candidates looked at per sample granted
IDLE_SHARE = 0.01  # of a replica's slots: for fewer that stand empty nothing is sent ahead
SIGMAS = 2.0  # of how many samples end in a time: work ahead covers so many deviations more than the mean
SLACK = 1.1  # how much later than the others a replica may finish: measured speeds are noisy


@record
class SpeedModel:
    """Step time of one replica as a line over the samples it decodes at once: tau(n) = a + b n, seconds.

    Sums of past (n, tau), each observation forgetting a fifth of the older ones. Never below what was seen for fewer.
    """

    weight: float = 0.0
    n_sum: float = 0.0
    tau_sum: float = 0.0
    nn_sum: float = 0.0
    ntau_sum: float = 0.0

    def observe(self, running: float, tokens_per_s: float) -> "SpeedModel":
        """With one more measurement: `running` samples decoded at `tokens_per_s` together."""
        if running <= 0 or tokens_per_s <= 0:
            return self
        tau = running / tokens_per_s
        return SpeedModel(
            weight=FORGET * self.weight + 1,
            n_sum=FORGET * self.n_sum + running,
            tau_sum=FORGET * self.tau_sum + tau,
            nn_sum=FORGET * self.nn_sum + running * running,
            ntau_sum=FORGET * self.ntau_sum + running * tau,
        )

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self.weight > 0

    def line(self) -> tuple[float, float]:
        """(a, b) of the line. Only when `known`."""
        n_mean, tau_mean = self.n_sum / self.weight, self.tau_sum / self.weight
        variance = self.nn_sum / self.weight - n_mean * n_mean
        covariance = self.ntau_sum / self.weight - n_mean * tau_mean
        slope = max(0.0, covariance / variance) if variance > 1e-3 * n_mean * n_mean else 0.0
        slope = min(slope, tau_mean / n_mean)  # a step never takes longer than one sample at a time would
        return tau_mean - slope * n_mean, slope

    def tau_s(self, running: float) -> float:
        """Predicted seconds of one decode step with `running` samples. Only when `known`."""
        a, b = self.line()
        return max(a + b * running, 1e-9)


@record
class ReplicaLoad:
    """One replica that may be given work."""

    slots: int
    leased: int  # samples it holds, running or not
    kv_used_share: float = 0.0
    speed: SpeedModel = SpeedModel()
    ramp: int  # most samples it may hold while it warms up
    ahead: int = 0  # samples it may hold beyond its slots, so that one that ends is replaced at once

    def cap(self) -> int:
        """Most samples it may hold now, by slots, warm-up and KV headroom."""
        cap = self.slots + self.ahead if self.ramp >= self.slots else self.ramp
        if self.kv_used_share >= KV_HIGH_WATER:
            return min(cap, self.leased)
        if self.leased and self.kv_used_share > 0:
            more = math.floor(self.leased * min(1e6, KV_HIGH_WATER / self.kv_used_share - 1))
            cap = min(cap, self.leased + more)
        return cap

    def tokens_per_s(self) -> float:
        """Predicted rate with every allowed slot busy; 0 when nothing is known."""
        n = max(1, min(self.slots, self.cap()))
        return n / self.speed.tau_s(n) if self.speed.known else 0.0


def ahead(slots: int, tokens_per_s: float, refill_s: float, mean_tokens: float) -> int:
    """Samples a replica may hold beyond its slots: as many as end while one exchange and its answer are on their way.

    With samples of `mean_tokens` tokens that began at different times, ends come as a Poisson process: in `refill_s` seconds
    n = tokens_per_s refill_s / mean_tokens of them on average, and no more than n + 2 sqrt(n) in at least 95 of 100. Never more than
    `slots`: what waits is to begin within the life of one sample. None where the slots that stand empty for want of it are fewer than
    1 in 100: samples live longer than a hundred refills then, and what waits might wait as long.
    """
    n = tokens_per_s * refill_s / max(1.0, mean_tokens)
    if n < IDLE_SHARE * slots:
        return 0
    return min(slots, math.ceil(n + SIGMAS * math.sqrt(n)))


def first_ramp(slots: int) -> int:
    """How many samples a replica may hold before it has shown its speed."""
    return max(1, math.ceil(slots / FIRST_SHARE))


def next_ramp(load: ReplicaLoad, *, progressed: bool) -> int:
    """The warm-up cap after an exchange. It doubles while the replica fills it and makes progress that was measured;
    without measurements (no rate) it stays where it is."""
    if not progressed or not load.speed.known or load.leased < load.ramp:
        return load.ramp
    return min(max(load.slots, 1), 2 * load.ramp)


def grant(replica: ReplicaLoad, others: Sequence[ReplicaLoad], *, waiting: int) -> int:
    """How many of `waiting` samples `replica` takes now. `others`: the other replicas that could take them.

    All samples are taken to need the same number of tokens, so step times decide. Work ahead of its slots comes after the
    others' free slots.
    """
    room = min(replica.cap() - replica.leased, waiting, _begun(replica) + _ahead_share(replica, others, waiting))
    known = [o for o in others if o.speed.known]
    if room <= 0:
        return 0
    if not replica.speed.known or not known:
        return room  # nothing to compare: the ramp is its limit until it has shown its speed
    without = _Others(known, most=waiting)
    granted = 0
    while granted < room:
        mine = replica.speed.tau_s(replica.leased + granted + 1)
        if mine > SLACK * without.finish(waiting - granted):
            break
        granted += 1
    return granted


def _begun(load: ReplicaLoad) -> int:
    """Samples it could begin at once."""
    return max(0, min(load.slots, load.cap()) - load.leased)


def _ahead_share(replica: ReplicaLoad, others: Sequence[ReplicaLoad], waiting: int) -> int:
    """What it may take ahead of what waits: its share, by speed where all are measured, of what is left over when every free
    slot has got something. One that asks first does not store what another could begin sooner."""
    left = waiting - _begun(replica) - sum(_begun(o) for o in others)
    if left <= 0:
        return 0
    rates = [o.tokens_per_s() for o in (replica, *others)]
    return math.ceil(left * (rates[0] / sum(rates) if all(rates) else 1 / len(rates)))


class _Others:
    """When the other replicas would have finished what waits, without this one. Times are in step times: seconds over the
    tokens of a sample."""

    def __init__(self, others: Sequence[ReplicaLoad], most: int) -> None:
        self._free = sum(max(0, o.cap() - o.leased) for o in others)
        self._rate = sum(o.tokens_per_s() for o in others)
        self._held = sum(o.leased for o in others) / 2  # those running are half done on average
        self._fast = min(o.speed.tau_s(max(1, min(o.slots, o.cap()))) for o in others)
        # Free places by the step time they would have once filled, best first: the k-th sample to come gets the k-th.
        places: list[float] = []
        for o in others:
            a, b = o.speed.line()
            places += [max(a + b * n, 1e-9) for n in range(o.leased + 1, min(o.cap(), o.leased + most) + 1)]
        self._places = sorted(places)[:most]

    def finish(self, waiting: int) -> float:
        """When the last of `waiting` samples would end: at once where there is room for it, else when the common rate has
        worked the queue off; never sooner than one sample takes on the fastest."""
        queued = waiting - self._free
        if queued <= 0:
            return self._places[waiting - 1]
        return max(self._fast + queued / self._rate, (self._held + waiting) / self._rate)


class Home(IntEnum):
    """Where other samples of a candidate's group are decoded, in the order in which a replica takes candidates of one step."""

    HERE = 0
    NOWHERE = 1
    ELSEWHERE = 2  # at a replica that will come for the rest


@record
class Candidate:
    """A sample that may be leased, in queue order."""

    index: int  # place in the queue, oldest group first
    due: int  # step at which its group is due
    length: int  # tokens to prefill: prompt and prefix
    group: int  # its prompt's
    home: Home = Home.NOWHERE


def choose(candidates: Sequence[Candidate], count: int, *, strong: bool) -> tuple[int, ...]:
    """Indices of `count` samples, or of all where there are fewer: by due step, so that nobody waits for a group to be kept together.

    Of one step come first those whose group is decoded here already, last those whose group is decoded elsewhere: an engine that
    keeps prefixes then holds a group's prompt once, and only the last groups of a step are split. Within the first few the groups
    with the longest prefills go to strong replicas, those with the shortest to weak ones.
    """
    chosen: list[int] = []
    ordered = sorted(candidates, key=lambda c: (c.due, c.home, c.index))
    for _, same in itertools.groupby(ordered, key=lambda c: (c.due, c.home)):
        if len(chosen) >= count:
            break
        chosen += _by_length(tuple(same), count - len(chosen), strong=strong)
    return tuple(chosen)


def _by_length(same: Sequence[Candidate], count: int, *, strong: bool) -> list[int]:
    """`count` of them, group by group: of the groups within the window, the one with the longest (shortest) prefill first."""
    sign = -1 if strong else 1
    key = {c.group: sign * c.length for c in same[: WINDOW * count]}
    for c in same:
        if c.group in key:
            key[c.group] = min(key[c.group], sign * c.length)
    window = [c for c in same if c.group in key]
    window.sort(key=lambda c: (key[c.group], c.group, sign * c.length, c.index))
    return [c.index for c in window[:count]]


def is_strong(replica: ReplicaLoad, others: Sequence[ReplicaLoad]) -> bool:
    """Whether its step time is at or below the median of those measured."""
    taus = [o.speed.tau_s(max(1, o.leased)) for o in (replica, *others) if o.speed.known]
    if not replica.speed.known or len(taus) < 2:
        return True
    return replica.speed.tau_s(max(1, replica.leased)) <= statistics.median(taus)
