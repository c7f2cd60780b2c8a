"""What a simulated run adds up: tokens by fate, time by state, ages, steps."""

from collections.abc import Mapping

import numpy as np

from planner.record import record
from runtime.sim.decoding import PHASES
from runtime.sim.groups import Floats

TRAINER_STATES = ("training", "waiting", "updating", "absent")


@record
class StepSeen:
    """One optimiser step that ended."""

    step: int
    began_s: float
    ended_s: float
    trained_tokens: int
    masked_tokens: int
    ages: Mapping[int, int]  # trained tokens by age
    group_age_mean: float  # by the version a group was begun at
    group_age_max: int
    samples_masked: int  # samples with at least one masked token


class Books:
    """Counts of a run; every token generated is in exactly one place."""

    def __init__(self) -> None:
        self.generated_tokens = 0  # journalled; those of running samples are added by the flow when it is asked
        self.trained_tokens = self.masked_tokens = 0
        self.wasted: dict[str, int] = {}
        self.redone_tokens = self.recomputed_tokens = self.preempted = 0
        self.retrained_s = 0.0
        self.steps: list[StepSeen] = []
        self.trainer_s = dict.fromkeys(TRAINER_STATES, 0.0)
        self.rollout_s = dict.fromkeys(PHASES, 0.0)
        self.sample_seconds = 0.0
        self.finished = 0
        self.queue_area = self.running_area = self.time_s = 0.0
        self.redone_steps = 0

    def pass_time(self, h: float, trainer: str, running: float, complete: int) -> None:
        """`h` seconds passed in these states."""
        self.trainer_s[trainer] += h
        self.queue_area += h * complete
        self.running_area += h * running
        self.time_s += h

    def correct(self, was: str, should: str, seconds: float) -> None:
        """The last seconds were entered under a state that they were not in."""
        self.trainer_s[was] -= seconds
        self.trainer_s[should] += seconds

    def finish(self, count: int, seconds: float) -> None:
        """So many samples ended, after so many seconds since their leases together."""
        self.finished += count
        self.sample_seconds += seconds

    def retire(self, spent: Floats) -> None:
        """A replica is gone; its seconds stay."""
        for name, s in zip(PHASES, np.asarray(spent), strict=True):
            self.rollout_s[name] += float(s)

    def waste(self, reason: str, tokens: int) -> None:
        """Sampled and never to be trained."""
        if tokens:
            self.wasted[reason] = self.wasted.get(reason, 0) + tokens
