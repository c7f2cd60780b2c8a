"""Runs of plain queues for the closed forms: one replica with a number of slots, lengths as wished, a trainer of fixed time."""

import math

from planner.record import record
from runtime.policy.staleness import StalenessPolicy, StalePolicy
from runtime.sim.figures import StepSeen
from runtime.sim.flow import SimulatedFlow
from runtime.sim.lengths import LengthModel
from runtime.sim.rules import FlowRules, WeightsPath
from runtime.sim.speed import TrainerSpeed, constant_speed

MEAN_TOKENS = 1000
PROMPT = LengthModel(family="constant", mean_tokens=1, max_tokens=1)


def lognormal(sigma: float) -> LengthModel:
    """Mean 1,000 tokens; sigma of the logarithm, 0: constant."""
    cv = math.sqrt(math.exp(sigma**2) - 1)
    return LengthModel(family="lognormal", mean_tokens=MEAN_TOKENS, cv=cv, max_tokens=10**8)


@record
class Queue:
    """C slots of unit rate (a sample of mean length takes 1 s), B = G S samples a step, a trainer of rho B / C seconds."""

    slots: int
    groups: int
    members: int
    rho: float
    eta: int = 200
    stale: StalePolicy = "mask"
    lengths: LengthModel = lognormal(0.8)
    steps: int = 150
    seed: int = 7

    @property
    def batch(self) -> int:
        """B."""
        return self.groups * self.members


def flow_of(q: Queue) -> SimulatedFlow:
    """The flow, ready to run."""
    rules = FlowRules(
        policy=StalenessPolicy(eta=q.eta, prompts_per_step=q.groups, stale=q.stale),
        responses_per_prompt=q.members,
        prompt=PROMPT,
        response=q.lengths,
        recompute=False,
        windows=2,  # the speed does not depend on the number running, so any are exact
        steps=q.steps,
    )
    flow = SimulatedFlow(rules, q.seed)
    flow.add_replica("r0", constant_speed(q.slots, 1 / MEAN_TOKENS), WeightsPath())
    flow.set_trainer(TrainerSpeed(train_s=q.rho * q.batch / q.slots))
    return flow


def run(q: Queue) -> SimulatedFlow:
    """The flow after its steps."""
    flow = flow_of(q)
    assert flow.advance(math.inf) == "steps"
    return flow


def settled(flow: SimulatedFlow) -> list[StepSeen]:
    """Steps after the warm-up."""
    return flow.books.steps[len(flow.books.steps) // 5 :]


def period_s(flow: SimulatedFlow) -> float:
    """Mean seconds from one step's end to the next."""
    steps = settled(flow)
    return (steps[-1].ended_s - steps[0].ended_s) / (len(steps) - 1)


def group_age(flow: SimulatedFlow) -> float:
    """Mean age of trained groups, by the version they were begun at."""
    steps = settled(flow)
    return sum(s.group_age_mean for s in steps) / len(steps)


def masked_share(flow: SimulatedFlow) -> float:
    """Masked over trained and masked tokens."""
    steps = settled(flow)
    masked = sum(s.masked_tokens for s in steps)
    return masked / (masked + sum(s.trained_tokens for s in steps))


def unaccounted(flow: SimulatedFlow) -> int:
    """generated - (trained + masked + in flight + wasted): 0, always."""
    b = flow.books
    there = b.trained_tokens + b.masked_tokens + flow.in_flight_tokens() + sum(b.wasted.values())
    return b.generated_tokens + flow.partial_tokens() - there
