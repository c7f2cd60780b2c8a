"""What is asked of verifiers, and what they answer."""

from collections.abc import Sequence
from typing import Protocol

from planner.record import record
from runtime.rl.types import FinishReason, SampleId


@record
class RewardItem:
    """One response to verify. `response` is the decoded text without end-of-sequence tokens."""

    sample: SampleId
    prompt: str
    response: str
    answer: str
    finish: FinishReason = "eos"


@record
class RewardResult:
    """A verifier's answer. `error` says why there is none (timeout, crash, exception); then `reward` is 0."""

    sample: SampleId
    reward: float
    error: str = ""
    seconds: float = 0.0


class RewardClient(Protocol):
    """Whoever takes items and, some time later, hands results to `Flow.rewarded`. Never waits."""

    def submit(self, items: Sequence[RewardItem]) -> None: ...
