"""The whole input of a scheduler, as one value."""

import dataclasses
from collections.abc import Mapping
from typing import Literal

from planner.calibration.records import Calibration
from planner.cluster import Cluster
from planner.errors import InvalidInput
from planner.model import ModelSpec
from planner.override import Cap, Override
from planner.plan import Plan
from planner.record import record
from planner.workload import Workload

Objective = Literal["throughput", "throughput_per_dollar"]
TrainerKind = Literal["replicated", "fsdp"]
AttentionKernel = Literal["flash_2", "cudnn"]


@record
class Capabilities:
    """What the executor can run. A runtime is never handed a plan it cannot execute."""

    rollout_max_tp: int = 8
    rollout_max_pp: int = 4
    rollout_max_running: int | None = None  # samples a replica decodes at once; None: as many as memory allows
    rollout_prefix_block: int | None = (
        None  # tokens of the KV blocks that samples of a group share; None: they share nothing
    )
    train_max_devices: int | None = None  # None: no limit
    train_max_tp: int = 8
    train_max_pp: int = 8
    train_max_kinds: int = 2  # kind blocks in the trainer's pipeline
    train_mixed_dp: bool = False  # a trainer of one stage may have DP ranks of two kinds, with shares of its tokens
    trainer: TrainerKind = "replicated"
    train_row_tokens: int | None = (
        None  # a packing trainer's most tokens of a micro-batch, with a head in chunks over response
    )
    # tokens; None: micro-batches of whole padded samples, logits of all tokens
    train_attention: AttentionKernel = "flash_2"  # the trainer's kernel, where the card's tables are of a newer one
    weights_full_every: int = 1  # one update in so many carries all weights, the others what has changed; 1: all do
    direct_updates: bool = False  # the trainer sends weights into a second buffer of engines that go on meanwhile
    task_groups: int = 1  # groups of tasks besides generation that may have devices of their own
    colocate: bool = False  # sync modes: replicas may run on devices that train

    def __post_init__(self) -> None:
        if self.weights_full_every < 1:
            raise InvalidInput("weights_full_every must be at least 1", got=self.weights_full_every, expected=">= 1")
        if self.rollout_prefix_block is not None and self.rollout_prefix_block < 1:
            raise InvalidInput(
                "rollout_prefix_block must be at least 1", got=self.rollout_prefix_block, expected=">= 1"
            )
        if self.train_row_tokens is not None and self.train_row_tokens < 1:
            raise InvalidInput("train_row_tokens must be at least 1", got=self.train_row_tokens, expected=">= 1")

    @property
    def trainer_kinds(self) -> int:
        """Kinds that a trainer may have: the plan space knows two at most."""
        return 2 if self.train_mixed_dp else min(2, self.train_max_kinds)

    @classmethod
    def single_device_roles(cls) -> "Capabilities":
        """Rollout TP = PP = 1 and a trainer on one device."""
        return cls(
            rollout_max_tp=1, rollout_max_pp=1, train_max_devices=1, train_max_tp=1, train_max_pp=1, train_max_kinds=1
        )


@record
class Budget:
    """How long to search. Evaluations make a run repeatable; `mip_seconds` limits each MILP."""

    evaluations: int = 2000
    mip_seconds: float = 10.0

    def __post_init__(self) -> None:
        if self.evaluations < 1 or not self.mip_seconds > 0:
            raise InvalidInput("budget must be positive", got=(self.evaluations, self.mip_seconds))


@record
class Problem:
    """Everything a scheduler may look at."""

    cluster: Cluster
    model: ModelSpec
    workload: Workload
    capabilities: Capabilities = Capabilities()
    critic_model: ModelSpec | None = None  # of PPO; None: shaped like `model`
    reward_model: ModelSpec | None = None  # where rewards come from a model; None: shaped like `model`
    overrides: tuple[Override, ...] = ()
    objective: Objective = "throughput"
    floor_tokens_per_s: float | None = None  # for throughput_per_dollar
    in_force: Plan | None = None  # ties are broken towards it
    seed: int = 0
    caps: tuple[Cap, ...] = ()
    switch_s: float = 0.0  # seconds of production one device loses when its placement changes
    switch_horizon_s: float = 3600.0  # over which a better plan must have paid for its switches
    calibration: Calibration | None = None  # measured on the user's own cards; None: the tables of the package
    # Of devices that are slower than others of their kind, the share of its speed that they reach (`planner.slowed`).
    speeds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for device, share in self.speeds.items():
            if not 0 < share <= 1:
                raise InvalidInput(
                    f"speed of {device!r} is no share of its kind's",
                    where="problem.speeds",
                    got=share,
                    expected="(0, 1]",
                )
        if self.switch_s < 0 or not self.switch_horizon_s > 0:
            raise InvalidInput(
                "switch cost needs switch_s >= 0 and switch_horizon_s > 0", got=(self.switch_s, self.switch_horizon_s)
            )
