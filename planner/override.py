"""What an operator says about single devices; overrides win over the planner."""

from typing import Literal

from planner.record import record

Role = Literal["train", "rollout", "idle"]
OverrideKind = Literal["cordon", "drain", "pin"]


@record
class Override:
    """`cordon`: give no new work (the device must stay unused by new plans); `drain`: the same and move what runs there
    off it; `pin`: the device must have `role`."""

    device: str
    kind: OverrideKind
    role: Role | None = None  # for `pin`
    author: str = ""
    reason: str = ""
    at_s: float = 0.0  # unix seconds, for display
