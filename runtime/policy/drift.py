"""Devices that became slow: when one counts as slow, and whether a move away from it pays.

Pure: measured speeds in, verdicts out. A device is slow once it was at or below `enter_share` of the speed that was assumed
of it for `enter_s` without a break, and so again only after it was at or above `leave_share` for `leave_s`. Each time it
recovers, the next verdict takes twice as long, so that a device which comes and goes does not move a run each time.
"""

from collections.abc import Mapping

from planner.errors import InvalidInput
from planner.record import record, replace

MOST_DOUBLINGS = 5
MATERIAL = 0.1  # a change of a slow device's share below that is no reason for another plan
LEAST_SHARE = 0.05  # no device counts as slower than that
FIRST_MOVE_S = 60.0  # what a move costs before a start was measured: an assumption, the simulator's


@record
class DriftRule:
    """Shares are of the speed assumed: that of peers at the same work, else what the plan in force counted with."""

    enter_share: float = 0.85
    enter_s: float = 30.0
    leave_share: float = 0.95
    leave_s: float = 120.0
    cooldown_s: float = 120.0  # from one planning for drift to the next
    payback_s: float = 1800.0  # a move must earn `margin` times what it costs within that
    margin: float = 1.5
    retry_s: float = (
        1800.0  # a slow device that nobody could judge for so long is tried again; each recovery doubles it
    )

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
            after[device] = d if d.past_s is None else replace(d, past_s=None)
            continue
        since_s = now_s if d.past_s is None else d.past_s
        dwell_s = rule.leave_s if d.slow else rule.enter_s * 2 ** min(d.recoveries, MOST_DOUBLINGS)
        if now_s - since_s < dwell_s:
            after[device] = replace(d, past_s=since_s)
        else:
            after[device] = DeviceDrift(slow=not d.slow, recoveries=d.recoveries + d.slow)
    return after


def pays(now_tokens_per_s: float, then_tokens_per_s: float, switch_s: float, rule: DriftRule) -> bool:
    """Whether a move that costs `switch_s` of the run earns `margin` times that within `payback_s`."""
    if now_tokens_per_s <= 0:
        return then_tokens_per_s > 0
    gain_share = then_tokens_per_s / now_tokens_per_s - 1
    return gain_share * rule.payback_s > rule.margin * switch_s
