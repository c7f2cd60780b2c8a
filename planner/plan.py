"""Plans and what is predicted of them. `Placement` is the type of both wish and reality."""

from typing import Literal

from planner.errors import InvalidInput
from planner.record import record

PlacementRole = Literal["train", "rollout", "score"]
Task = Literal[
    "generation", "reward", "reference", "critic_values", "proximal", "critic_training", "actor_training"
]  # fmt: skip


@record
class Stage:
    """One pipeline stage of a trainer: a block of one device kind with its own DP and TP degree.

    The only stage of a trainer may have DP ranks of two kinds, each TP group of one. Rank i lies on
    `devices[i * tp : (i + 1) * tp]`, whose kind is its kind, and takes `token_shares[i]` of every batch's tokens.
    """

    devices: tuple[str, ...]
    kind: str  # of the devices; for ranks of two kinds both joined with "+"
    dp: int
    tp: int
    layers: int
    token_shares: tuple[float, ...] = ()  # by DP rank, summing to 1; () for equal shares


@record
class Placement:
    """One rollout replica, or one group of other tasks, on its devices.

    A rollout replica has dp = 1, and len(devices) == tp * pp; all its devices are of one kind. A trainer has
    `stages`; its tp and dp are those of the first stage (each stage has its own), pp == len(stages). So has a group of
    scoring tasks alone (role "score"). `tasks` names what a group runs; the actor's trainer without names runs every task
    that no other placement has. Replicas may share devices with a trainer where the problem lets them (co-location).
    """

    role: PlacementRole
    kind: str  # of the devices; for a mixed trainer the kinds joined with "+"
    devices: tuple[str, ...]
    tp: int = 1
    pp: int = 1
    dp: int = 1
    tasks: tuple[Task, ...] = ()
    stages: tuple[Stage, ...] = ()
    max_running: int | None = None  # rollout: samples decoded at once
    rate_tokens_per_s: float | None = None  # rollout: predicted tokens/s; train: predicted trained tokens/s
    share: float | None = None  # rollout: fraction of the step's samples
    strong: bool = (
        False  # rollout: a token takes no longer here than on half of the replicas; long samples go here first
    )

    def __post_init__(self) -> None:
        if not self.devices or len(set(self.devices)) != len(self.devices):
            raise InvalidInput("a placement needs distinct devices", got=self.devices)


@record
class Prediction:
    """What the cost model says of a plan. Seconds a step; rates over trained response tokens."""

    step_s: float
    train_s: float  # C_T: all tasks but generation
    rollout_s: float  # C_I: generation + reward + weight update charged to rollout
    update_s: float
    tokens_per_s: float
    usd_per_h: float | None
    usd_per_mtok: float | None  # machines and egress
    staleness_mean: float | None = None
    egress_usd_per_step: float = 0.0  # bytes between regions, where links have a price
    score_s: float = 0.0  # the part of train_s that scores samples (reward, reference, critic values)
    checkpoint_s: float = 0.0  # the part of train_s that writes checkpoints, in the mean over steps


@record
class Plan:
    """Roles and parallelism for every device used; devices of the cluster that appear nowhere are idle."""

    placements: tuple[Placement, ...]
    even_shares: bool = False  # every replica gets an equal part of a step's samples, whatever its speed

    @property
    def train(self) -> Placement | None:
        """The placement that trains the actor."""
        return next(
            (p for p in self.placements if p.role == "train" and (not p.tasks or "actor_training" in p.tasks)), None
        )

    @property
    def sides(self) -> tuple[Placement, ...]:
        """Everything that does not generate: the actor's trainer, a critic's, scoring models apart."""
        return tuple(p for p in self.placements if p.role != "rollout")

    @property
    def rollouts(self) -> tuple[Placement, ...]:
        """The rollout replicas' placements."""
        return tuple(p for p in self.placements if p.role == "rollout")

    def role_of(self, device_id: str) -> Literal["train", "rollout", "score", "idle"]:
        """What the plan has that device do; where it does two things, the one that comes first in the plan."""
        for p in self.placements:
            if device_id in p.devices:
                return p.role
        return "idle"
