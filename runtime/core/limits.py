"""Time limits of the belief, and what it carries from one observation to the next."""

import dataclasses
from collections.abc import Mapping

from planner.record import record, replace


@record
class Limits:
    """Seconds after which something counts. Every wait of the belief has one."""

    device_stale_s: float = 5.0  # no news: said, nothing done
    device_lost_s: float = 60.0  # no news: taken for lost
    host_bound_enter_s: float = 3.0
    host_bound_leave_s: float = 10.0
    exchange_s: float = 15.0  # a serving replica's last exchange with flow
    progress_s: float = 90.0  # a replica that runs samples and decodes nothing
    unknown_s: float = 60.0  # a unit nobody can tell anything of
    vanish_s: float = 5.0  # a living unit that is no longer in the observation
    settle_s: float = 0.5  # a stopped unit's absence before its devices count as free
    unseen_settle_s: float = 2.0  # the same for one that was never seen: its start may be on the way
    appear_s: float = 120.0  # an ordered unit that was never seen
    start_s: float = 300.0  # a starting unit that does not serve
    trainer_silent_s: float = 600.0  # a trainer's last sign; steps may be long
    drain_s: float = 120.0  # an ordered drain that does not end
    flow_silent_s: float = 5.0
    rate_tau_s: float = 5.0  # time constant of smoothed rates


# A pretrained model on a CPU without pacing takes minutes for what a GPU does in a moment: a weight update with all caches
# recomputed, one trainer step. Silence counts later there.
CPU_LIMITS = Limits(
    exchange_s=300.0, progress_s=600.0, start_s=900.0, trainer_silent_s=3600.0, drain_s=600.0, unknown_s=300.0
)
CPU_LEASE_S = 240.0  # and flow takes leases back later; below CPU_LIMITS.exchange_s
STEPS_OF_SILENCE = 20.0  # a trainer may be silent for that many predicted steps


START_SPARE_S = 20.0  # beyond what a unit gives itself to start: it ends by itself before, and says why
TOKEN_SPARE_S = 30.0  # the same for an engine that samples nothing
COLLECTIVES_OF_SILENCE = 2.0  # a trainer whose ranks wait for each other ends by itself before


# Weights from disk into an engine: SHA-256 does about 1e9 on one core, reading and laying in come on top.
LOAD_BYTES_PER_S, LOAD_SPARE_S = 5e8, 5.0


def loading_s(weight_bytes: float) -> float:
    """For how long a replica may say nothing to flow while it loads weights from disk."""
    return LOAD_SPARE_S + weight_bytes / LOAD_BYTES_PER_S


def allowing(
    limits: Limits, *, start_s: float, token_s: float, collective_s: float, weight_bytes: float = 0.0
) -> Limits:
    """The limits for units that give themselves so long to start, for a token and for an exchange between ranks, and take weights
    of that size. A limit below its unit's own deadline would end what is healthy and only slow."""
    return replace(
        limits,
        exchange_s=max(limits.exchange_s, loading_s(weight_bytes)),
        start_s=max(limits.start_s, start_s + START_SPARE_S),
        progress_s=max(limits.progress_s, token_s + TOKEN_SPARE_S),
        trainer_silent_s=max(limits.trainer_silent_s, COLLECTIVES_OF_SILENCE * collective_s),
    )


def stretched(limits: Limits, train_s: float | None) -> Limits:
    """The limits for a trainer whose step is predicted to take `train_s` seconds."""
    if train_s is None or STEPS_OF_SILENCE * train_s <= limits.trainer_silent_s:
        return limits
    return replace(limits, trainer_silent_s=STEPS_OF_SILENCE * train_s)


@record
class Rate:
    """A smoothed rate and when it was last fed."""

    tokens_per_s: float
    at_s: float


@record
class Progress:
    """The work figures of a replica and since when they stand still."""

    mark: tuple[int, ...]
    since_s: float


@record
class Memory:
    """What the belief carries from one observation to the next, by device or unit."""

    since_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # "what:subject" -> first seen
    progress: Mapping[str, Progress] = dataclasses.field(default_factory=dict)
    rates: Mapping[str, Rate] = dataclasses.field(default_factory=dict)


class Since:
    """How long each condition has held without a break; conditions that do not hold now are forgotten."""

    def __init__(self, before: Mapping[str, float], now_s: float) -> None:
        self._before, self._now_s = before, now_s
        self.after: dict[str, float] = {}

    def held_s(self, what: str, subject: str) -> float:
        """Seconds the condition has held, this observation included (0 on the first)."""
        key = f"{what}:{subject}"
        self.after[key] = self._before.get(key, self._now_s)
        return max(0.0, self._now_s - self.after[key])
