"""From a configuration to the rule by which slow devices lead to another plan: one for the daemon and the simulator."""

from collections.abc import Iterator

from runtime.config.schema import Config, DriftSection
from runtime.errors import ConfigError
from runtime.policy.drift import LEAST_SHARE, DriftRule


def drift_rule(config: Config) -> DriftRule | None:
    """The rule; None where drift is only shown. ConfigError for the first of `drift_faults`."""
    d = config.drift
    for fault in drift_faults(d):
        raise fault
    if not d.replan:
        return None
    return DriftRule(
        enter_share=d.enter_share,
        enter_s=d.enter,
        leave_share=d.leave_share,
        leave_s=d.leave,
        cooldown_s=d.cooldown,
        payback_s=d.payback,
        margin=d.margin,
        retry_s=d.retry,
    )


def drift_faults(d: DriftSection) -> Iterator[ConfigError]:
    """What is well formed and means nothing, or a run that moves to and fro."""
    if d.enter_share <= LEAST_SHARE:
        yield ConfigError(
            "no device is ever slow",
            where="drift.enter_share",
            got=d.enter_share,
            expected=f"more than {LEAST_SHARE}, the least share that plans count with",
            hint="drift.replan = false shows drift and plans for none",
        )
    if not d.enter_share < d.leave_share:
        yield ConfigError(
            "a device that is slow would be fast again at the same speed",
            where="drift.leave_share",
            got=d.leave_share,
            expected=f"more than drift.enter_share, which is {d.enter_share}",
            hint="the further apart, the fewer moves to and fro",
        )
    for key, lasts_s in (("enter", d.enter), ("leave", d.leave)):
        if lasts_s <= 0:
            yield ConfigError(
                "a verdict at the first look", where=f"drift.{key}", got=lasts_s, expected="more than 0 s",
                hint="a single odd moment would move the run",
            )  # fmt: skip
    if d.payback <= 0:
        yield ConfigError(
            "no move pays within no time", where="drift.payback", got=d.payback, expected="more than 0 s",
            hint="drift.replan = false shows drift and plans for none",
        )  # fmt: skip
    if d.margin < 1:
        yield ConfigError(
            "moves that earn less than they cost", where="drift.margin", got=d.margin, expected="at least 1",
            hint="1 takes every move that pays for itself within drift.payback",
        )  # fmt: skip
    least_s = max(d.leave, d.cooldown)
    if d.retry < least_s:
        yield ConfigError(
            "a slow device would be tried again before it could have been measured",
            where="drift.retry",
            got=d.retry,
            expected=f"at least {least_s:g} s, the longer of drift.leave and drift.cooldown",
            hint="it is for slow devices that the plan leaves idle; each recovery doubles it",
        )
