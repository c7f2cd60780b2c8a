"""What an operator says about devices; overrides win over the planner."""

from typing import Literal

from planner.errors import InvalidInput
from planner.record import record

Role = Literal["train", "rollout", "idle"]
OverrideKind = Literal["cordon", "drain", "pin", "keep", "freeze"]


@record
class Override:
    """`cordon`: give no new work (the device must stay unused by new plans); `drain`: the same and move what runs there
    off it; `pin`: the device must have `role`; `keep`: it must have the role that the plan in force gives it; `freeze`: the
    placement that the plan in force gives it stays as it is, on the same devices with the same parallelism.

    A cordon wins over a pin or keep, and of those the last one counts.
    """

    device: str
    kind: OverrideKind
    role: Role | None = None  # for `pin`; filled in by the planner for `keep` and `freeze`
    author: str = ""
    reason: str = ""
    at_s: float = 0.0  # unix seconds, for display


@record
class Cap:
    """At most `devices` devices of `kind` (None: of all kinds together) may have `role`."""

    kind: str | None = None
    role: Literal["train", "rollout"]
    devices: int

    def __post_init__(self) -> None:
        if self.devices < 0:
            raise InvalidInput("a cap must not be negative", where="problem.caps", got=self.devices, expected=">= 0")
