"""From a configuration to the rule by which slow devices lead to another plan: one for the daemon and the simulator."""

from runtime.config.schema import Config
from runtime.policy.drift import DriftRule


def drift_rule(config: Config) -> DriftRule | None:
    """The rule; None where drift is only shown."""
    d = config.drift
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
    )
