"""From the speeds of trainer and replicas to the period of one step.

The period P is the smallest with, for trainer time T:
- async: P >= T, and every replica keeps its samples inside the staleness bound (`Rules.stale_s`). The replicas' work in a
  window of P covers a batch.
- sync (or eta = 0): the window is P - T, and holds the longest response of the batch at the replica's own speed.
A replica loses a pause in each window: the weight update (of one that it goes on beside, which only async modes can, no more than
the swap) and the recomputation of prefixes. With `update_mode = "pause"` the trainer waits for the update too.

The limit on outstanding samples, sum b <= (eta + 1) B, follows: where more run, tau <= (eta + 1) P / M_tail gives a rate
of at least M_tail B / P samples a second when the running ones are cut back to the limit.
"""

import math
from collections.abc import Callable, Sequence

from planner.cost.decode import Level
from planner.cost.lengths import Moments
from planner.cost.waves import Curve, done_by
from planner.record import record, replace
from planner.workload import Workload

_ROUNDS = 200
_ROUNDING = 1 + 1e-12
_ABOVE = 1 + 1e-9  # rounding of a curve included


@record
class Offer:
    """A replica at one concurrency, as seen from one trainer: what it gives and what it asks of the period."""

    level: Level
    pause_s: float  # lost in each window
    transfer_s: float  # the weight update, a part of the pause unless overlapped
    swap_s: float = 0.0  # of an overlapped one, what is a part of the pause all the same
    done: Curve = ()  # sync: tokens by seconds after the pause, the end of the rollout included


@record
class Group:
    """`count` interchangeable replicas, each of which may run at any of `offers`; optional ones may stay idle."""

    offers: tuple[Offer, ...]
    count: int = 1
    mandatory: bool = False


@record
class Rules:
    """The step's arithmetic for one workload."""

    work_tokens: float
    sync: bool
    eta: int
    tail_group: float
    tail_batch: float
    reward_s: float
    pause_all: bool
    overlapped: bool = False  # replicas go on while weights come
    recompute: bool = False  # new weights make running samples prefill again

    def required_s(self, offer: Offer, train_s: float) -> float:
        """The smallest period in which this replica may run at that concurrency."""
        in_sync_s = train_s + self.reward_s + self.least_window_s(offer)
        need = in_sync_s if self.sync else offer.pause_s + self.stale_s(offer, train_s)
        if self.pause_all:
            need = max(need, train_s + offer.transfer_s)
        return need

    def least_window_s(self, offer: Offer) -> float:
        """Seconds of rollout that a sync step has at least if this replica runs at that concurrency."""
        return offer.pause_s + (offer.done[0][0] if offer.done else self.tail_batch * offer.level.tau_s)

    def stale_s(self, offer: Offer, train_s: float) -> float:
        """The least time between two pauses that the staleness bound allows.

        From the publication of version v, samples of batch v + eta get tokens once v has come (U later where the transfer is
        overlapped, its swap apart, which is a pause), take M_tail tau while no pause stops them, and are trained for T: all that
        within eta + 1 periods, or, if they are complete before their step could begin, within eta periods without T. A transfer
        that takes longer than a period skips versions: the next one leaves when it has come, so two of them lie in one such
        round. Between the two cases a run keeps to the first; the less of both is taken, as a longer training must never
        shorten a period.
        """
        wait_s = self.wait_s(offer)
        tail_s = self.tail_group * offer.level.tau_s
        last = wait_s + max(wait_s, tail_s + train_s)
        early = wait_s + max(wait_s, tail_s)
        return min(last / (self.eta + 1), early / self.eta if self.eta else last)

    def wait_s(self, offer: Offer) -> float:
        """Seconds for which new weights are under way to a replica that goes on."""
        return offer.transfer_s - offer.swap_s if self.overlapped else 0.0

    def window_s(self, period_s: float, train_s: float) -> float:
        """Seconds of a period in which rollout may run."""
        return period_s - self.reward_s - (train_s if self.sync else 0.0)

    def given_tokens(self, offer: Offer, period_s: float, train_s: float) -> float:
        """Tokens this replica samples in a period."""
        return self.tokens_in(offer, self.window_s(period_s, train_s))

    def tokens_in(self, offer: Offer, window_s: float) -> float:
        """Tokens this replica samples in so many seconds of rollout."""
        left, rate = max(0.0, window_s - offer.pause_s), offer.level.rate_tokens_per_s
        return done_by(offer.done, left, rate) if offer.done else rate * left

    def best(self, offers: Sequence[Offer], period_s: float, train_s: float) -> Offer | None:
        """The admissible offer that gives most in that period; None when none is admissible."""
        allowed = [o for o in offers if self.required_s(o, train_s) <= period_s * _ROUNDING]
        return max(
            allowed,
            key=lambda o: (self.given_tokens(o, period_s, train_s), -o.level.running),
            default=None,
        )


def by_pace(offers: Sequence[Offer]) -> list[tuple[float, Offer]]:
    """Offers with tokens a second that each gives no more than in any window, those with most first."""
    found = [
        (max(o.level.rate_tokens_per_s, *(t / s if s > 0 else math.inf for s, t in o.done), 0.0), o) for o in offers
    ]
    return sorted(((pace * _ABOVE, o) for pace, o in found), key=lambda x: -x[0])


def rules_of(workload: Workload, m: Moments, *, direct: bool = False) -> Rules:
    """The rules of a workload. Verification overlaps generation; the last sample's is added to the step. `direct`: weights come
    into a second buffer, so nobody need wait for them."""
    sync = workload.synchronous
    return Rules(
        work_tokens=workload.response_tokens_per_step,
        sync=sync,
        eta=workload.eta,
        tail_group=m.tail_group,
        tail_batch=m.tail_batch,
        reward_s=workload.reward_s_per_sample,
        pause_all=workload.update_mode == "pause" and not sync,
        overlapped=workload.overlapped_updates or (direct and not sync),
        recompute=workload.kv_on_update == "recompute" and not sync,  # in sync mode nothing runs when weights change
    )


def make_offer(level: Level, transfer_s: float, swap_s: float, rules: Rules, done: Curve = ()) -> Offer:
    """A level with what an update costs it. `swap_s`: of the transfer, what a replica stops for where it goes on beside the rest."""
    swap_s = swap_s if rules.overlapped else 0.0
    pause = swap_s if rules.overlapped else transfer_s
    pause += level.recompute_s if rules.recompute else 0.0
    return Offer(level=level, pause_s=pause, transfer_s=transfer_s, swap_s=swap_s, done=done)


def solve_period(
    train_s: float, groups: Sequence[Group], rules: Rules
) -> tuple[float, tuple[Offer | None, ...]] | None:
    """The smallest period and the offer each group takes (None: idle); None when the groups can do no work.

    Work done is non-decreasing in the period, so bisection is exact to rounding.
    """

    def choice(period_s: float) -> tuple[Offer | None, ...]:
        found = (rules.best(g.offers, period_s, train_s) for g in groups)
        return tuple(
            o if o is None or g.mandatory or rules.given_tokens(o, period_s, train_s) > 0 else None
            for o, g in zip(found, groups, strict=True)
        )

    # The same in plain numbers, as bisection asks often: (required, rate, seconds lost) of each offer.
    lost = rules.window_s(0.0, train_s)
    rows = [
        (g.count, [(rules.required_s(o, train_s), o.level.rate_tokens_per_s, o.pause_s - lost) for o in g.offers])
        for g in groups
    ]

    curves = any(o.done for g in groups for o in g.offers)
    paced = [(g.count, [(pace, rules.required_s(o, train_s), o) for pace, o in by_pace(g.offers)]) for g in groups]

    def work_of_curves(period_s: float) -> float:
        limit, total, window_s = period_s * _ROUNDING, 0.0, max(0.0, rules.window_s(period_s, train_s))
        for count, offers_ in paced:
            most = 0.0
            for pace, required, o in offers_:
                if pace * window_s <= most:
                    break  # nor do those that follow give more
                if required <= limit:
                    most = max(most, rules.tokens_in(o, window_s))
            total += count * most
        return total

    def work(period_s: float) -> float:
        if curves:
            return work_of_curves(period_s)
        limit, total = period_s * _ROUNDING, 0.0
        for count, offers in rows:
            best = 0.0
            for required, rate, pause in offers:
                if required <= limit and rate * (period_s - pause) > best:
                    best = rate * (period_s - pause)
            total += count * best
        return total

    if not any(o.level.rate_tokens_per_s > 0 for g in groups for o in g.offers):
        return None
    low = train_s
    for g in groups:
        if g.mandatory:
            if not g.offers:
                return None
            low = max(low, min(rules.required_s(o, train_s) for o in g.offers))
    if work(low) >= rules.work_tokens:
        return low, choice(low)
    high = max(low, 1e-9) * 2
    while work(high) < rules.work_tokens:
        high *= 2
    low, high = _bisect(low, high, lambda p: work(p) >= rules.work_tokens)
    return high, choice(high)


def even_period(train_s: float, groups: Sequence[Group], rules: Rules) -> tuple[float, tuple[Offer | None, ...]] | None:
    """`solve_period` where every replica does an equal part of the batch: the slowest paces, and all must run."""
    count = sum(g.count for g in groups)
    part = replace(rules, work_tokens=rules.work_tokens / count) if count else rules
    alone = [solve_period(train_s, [replace(g, count=1, mandatory=True)], part) for g in groups]
    if not alone or any(found is None for found in alone):
        return None
    period_s = max(found[0] for found in alone if found is not None)
    return period_s, tuple(rules.best(g.offers, period_s, train_s) for g in groups)


def window_needed_s(groups: Sequence[tuple[Offer, int]], rules: Rules) -> float:
    """C_I: the shortest window in which these replicas do a batch, reward included (seconds)."""
    if any(o.done for o, _ in groups):
        low = max(rules.least_window_s(o) for o, _ in groups)
        high = max(low, 1e-9)

        def enough(window_s: float) -> bool:
            return sum(n * rules.tokens_in(o, window_s) for o, n in groups) >= rules.work_tokens * (1 - 1e-12)

        if enough(low):
            return low + rules.reward_s
        while not enough(high):
            high *= 2
        return _bisect(low, high, enough)[1] + rules.reward_s
    ordered = sorted(groups, key=lambda g: g[0].pause_s)
    rate = lost = 0.0
    answer = float("inf")
    for offer, count in ordered:
        rate += count * offer.level.rate_tokens_per_s
        lost += count * offer.level.rate_tokens_per_s * offer.pause_s
        # Replicas whose pause is longer than the window give nothing, so each prefix is a candidate.
        answer = min(answer, max(offer.pause_s, (rules.work_tokens + lost) / rate))
    if rules.sync:
        answer = max(answer, *(o.pause_s + rules.tail_batch * o.level.tau_s for o, _ in groups))
    return answer + rules.reward_s


def _bisect(low: float, high: float, enough: Callable[[float], bool]) -> tuple[float, float]:
    for _ in range(_ROUNDS):
        middle = (low + high) / 2
        if not low < middle < high or high - low <= 1e-13 * high:
            break
        if enough(middle):
            high = middle
        else:
            low = middle
    return low, high
