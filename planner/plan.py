"""Plans and what is predicted of them. `Placement` is the type of both wish and reality."""

from typing import Literal

from planner.errors import InvalidInput
from planner.record import record

PlacementRole = Literal["train", "rollout"]


@record
class Stage:
    """One pipeline stage of a trainer: a block of one device kind with its own DP and TP degree."""

    devices: tuple[str, ...]
    kind: str
    dp: int
    tp: int
    layers: int


@record
class Placement:
    """One trainer or one rollout replica on its devices.

    A rollout replica has dp = 1, and len(devices) == tp * pp; all its devices are of one kind. A trainer has
    `stages`; its tp and dp are those of the first stage (each stage has its own), pp == len(stages).
    """

    role: PlacementRole
    kind: str  # of the devices; for a mixed trainer the kinds joined with "+"
    devices: tuple[str, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    stages: tuple[Stage, ...] = ()
    max_running: int | None = None  # rollout: samples decoded at once
    rate_tokens_per_s: float | None = None  # rollout: predicted tokens/s; train: predicted trained tokens/s
    share: float | None = None  # rollout: fraction of the step's samples

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise InvalidInput("a placement needs distinct devices", got=self.devices)


@record
class Prediction:
    """What the cost model says of a plan. Seconds a step; rates over trained response tokens."""

    step_s: float
    train_s: float  # C_T
    rollout_s: float  # C_I: generation + reward + weight update charged to rollout
    update_s: float
    tokens_per_s: float
    usd_per_h: float | None
    usd_per_mtok: float | None
    staleness_mean: float | None = None


@record
class Plan:
    """Roles and parallelism for every device used; devices of the cluster that appear nowhere are idle."""

    placements: tuple[Placement, ...]

    @property
    def train(self) -> Placement | None:
        """The trainer's placement."""
        return next((p for p in self.placements if p.role == "train"), None)

    @property
    def rollouts(self) -> tuple[Placement, ...]:
        """The rollout replicas' placements."""
        return tuple(p for p in self.placements if p.role == "rollout")

    def role_of(self, device_id: str) -> Literal["train", "rollout", "idle"]:
        """What the plan has that device do."""
        for p in self.placements:
            if device_id in p.devices:
                return p.role
        return "idle"
