"""Devices that became slow: when one counts as slow, what a plan is worth on it, and whether a move pays.

Pure: measured speeds in, verdicts out. A device is slow once it was at or below `enter_share` of its peers' speed for `enter_s`
without a break, and so again only after it was at or above `leave_share` for `leave_s`. Each time it recovers, the next verdict
takes twice as long, so that a device which comes and goes does not move a run each time.
"""

from collections.abc import Mapping

from planner.errors import InvalidInput
from planner.plan import Plan, Prediction
from planner.record import record, replace

MOST_DOUBLINGS = 5


@record
class DriftRule:
    """Shares are of the speed of peers: devices of the same kind at the same work."""

    enter_share: float = 0.85
    enter_s: float = 30.0
    leave_share: float = 0.95
    leave_s: float = 120.0
    payback_s: float = 1800.0  # a move must earn `margin` times what it costs within that
    margin: float = 1.5

    def __post_init__(self) -> None:
        if not 0 < self.enter_share < self.leave_share <= 1:
            raise InvalidInput(
                "a device must be slower to be slow than to be fast again",
                got=(self.enter_share, self.leave_share),
                expected="0 < enter_share < leave_share <= 1",
            )


@record
class DeviceDrift:
    """One device. `past_s`: since when it is past the limit that would change `slow`; None: it is not."""

    slow: bool = False
    past_s: float | None = None
    recoveries: int = 0


def watched(
    before: Mapping[str, DeviceDrift], shares: Mapping[str, float], rule: DriftRule, now_s: float
) -> dict[str, DeviceDrift]:
    """The verdicts after one more look. Devices without a figure keep theirs."""
    after = dict(before)
    for device, share in shares.items():
        d = before.get(device, DeviceDrift())
        past = share >= rule.leave_share if d.slow else share <= rule.enter_share
        if not past:
            after[device] = replace(d, past_s=None)
            continue
        since_s = now_s if d.past_s is None else d.past_s
        dwell_s = rule.leave_s if d.slow else rule.enter_s * 2 ** min(d.recoveries, MOST_DOUBLINGS)
        if now_s - since_s < dwell_s:
            after[device] = replace(d, past_s=since_s)
        else:
            after[device] = DeviceDrift(slow=not d.slow, recoveries=d.recoveries + d.slow)
    return after


def slowed_tokens_per_s(plan: Plan, prediction: Prediction, speeds: Mapping[str, float], *, synchronous: bool) -> float:
    """Predicted trained tokens/s of a plan when devices run at these shares of their speed (1 where they are not named).

    A trainer is as slow as its slowest device, replicas generate what they can. Of a step that was predicted to take its
    longer side (asynchronous) or both, each side is stretched; what it was longer than that stays in proportion.
    """

    def slowest(devices: tuple[str, ...]) -> float:
        return min(speeds.get(d, 1.0) for d in devices)

    rates = [(p.rate_tokens_per_s or 0.0, slowest(p.devices)) for p in plan.rollouts]
    whole = sum(rate for rate, _ in rates)
    generating = sum(rate * share for rate, share in rates) / whole if whole > 0 else 1.0
    training = min((slowest(p.devices) for p in plan.sides), default=1.0)
    join = sum if synchronous else max
    plain = join((prediction.train_s, prediction.rollout_s))
    slowed = join((prediction.train_s / training, prediction.rollout_s / generating))
    return prediction.tokens_per_s * plain / slowed if slowed > 0 else prediction.tokens_per_s


def pays(now_tokens_per_s: float, then_tokens_per_s: float, switch_s: float, rule: DriftRule) -> bool:
    """Whether a move that costs `switch_s` of the run earns `margin` times that within `payback_s`."""
    if now_tokens_per_s <= 0:
        return then_tokens_per_s > 0
    gain_share = then_tokens_per_s / now_tokens_per_s - 1
    return gain_share * rule.payback_s > rule.margin * switch_s
