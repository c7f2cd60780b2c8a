"""What is asked of a simulation, and what it answers."""

from collections.abc import Mapping
from typing import Literal

from planner.errors import InvalidInput
from planner.plan import Prediction
from planner.problem import Budget
from planner.record import record
from runtime.policy.drift import DriftRule
from runtime.policy.staleness import StalePolicy
from runtime.sim.churn import Change
from runtime.sim.lengths import LengthModel

ChurnPolicy = Literal["elastic", "static", "checkpoint-restart"]
CHURN_POLICIES: tuple[ChurnPolicy, ...] = ("elastic", "static", "checkpoint-restart")


@record
class Costs:
    """Seconds that changes cost. All are assumptions: measure them where it matters."""

    detect_s: float = 3.0  # until a loss is noticed: the fault matrix's budget for a killed replica
    repair_s: float = 0.1  # `planner.repair`, its own budget
    solve_s: float = 5.0  # the full plan that follows
    start_s: float = 60.0  # a replica from its order to its first sample: engine start and graph capture
    reform_s: float = 30.0  # the trainer's group anew under another layout, state loaded
    restart_s: float = 300.0  # checkpoint-restart: a whole run stopped, planned by hand or script, started, loaded
    checkpoint_steps: int = 10  # checkpoint-restart: steps between checkpoints
    restart_on_join: bool = True  # checkpoint-restart: new devices stop the run too


@record
class Options:
    """One simulation. It ends after `steps` optimiser steps, or at `until_s`, whichever comes first."""

    steps: int | None = 100
    until_s: float | None = None
    seed: int = 0
    scheduler: str = "hex"
    budget: Budget = Budget(evaluations=400, mip_seconds=2.0)  # of the plans made on the way
    stale: StalePolicy = "mask"
    prompt: LengthModel | None = None  # default: what the planner assumes
    response: LengthModel | None = None
    changes: tuple[Change, ...] = ()
    churn_policy: ChurnPolicy = "elastic"
    costs: Costs = Costs()
    drift: DriftRule | None = None  # elastic: when slow devices lead to a new plan; None: never
    windows: int = 8  # of time, in the mean generation time of a sample: more is finer

    def __post_init__(self) -> None:
        if self.steps is None and self.until_s is None:
            raise InvalidInput("a simulation needs an end", expected="steps or until_s")
        if (self.steps is not None and self.steps < 1) or (self.until_s is not None and not self.until_s > 0):
            raise InvalidInput(
                "a simulation must last", got=(self.steps, self.until_s), expected="steps >= 1, time > 0"
            )
        if self.windows < 1:
            raise InvalidInput("windows must be at least 1", got=self.windows)


@record
class Staleness:
    """Ages in optimiser steps."""

    mean: float | None
    p95: float | None
    most: int | None


@record
class SimulatedRun:
    """What a simulated run came to. Tokens are response tokens; seconds are virtual."""

    ended: str  # "steps", "time", "stopped", or "waits: ..." with what it waits for
    steps: int
    time_s: float
    tokens_per_s: float  # trained or masked, over all of time_s
    steady_tokens_per_s: float | None  # the same over the steps after the warm-up; None: too few
    steady_step_s: float | None
    usd_per_h: float | None  # mean price of the devices that were there
    usd_per_mtok: float | None
    generated_tokens: int
    trained_tokens: int
    masked_tokens: int
    in_flight_tokens: int
    wasted_tokens: Mapping[str, int]
    redone_tokens: int  # sampled but lost before they were journalled
    recomputed_tokens: int  # prefilled again: new weights, hops, preemptions
    redone_steps: int  # steps that began again after a loss
    preempted: int
    staleness: Staleness  # of trained tokens
    group_staleness_mean: float | None  # of groups, by the version they were begun at
    trainer_s: Mapping[str, float]
    rollout_s: Mapping[str, float]  # replica seconds by phase
    running_mean: float  # samples decoded at once
    latency_mean_s: float | None  # from a sample's lease to its end
    step_s: tuple[float, ...]  # from one step's end to the next
    plans: tuple[tuple[float, str], ...]  # when a plan came in force, and why
    predicted: Prediction | None  # of the first plan, by the cost model
    simulated: bool = True
