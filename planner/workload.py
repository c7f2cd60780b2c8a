"""The RL workload: algorithm, batch, lengths and the staleness bound."""

from typing import Literal

from planner.errors import InvalidInput
from planner.record import record

Algorithm = Literal["grpo", "ppo"]
Mode = Literal["async", "sync"]
KvOnUpdate = Literal["recompute", "keep"]
Reward = Literal["rule", "model"]
UpdateMode = Literal["rolling", "pause", "overlapped"]


@record
class Lengths:
    """A length distribution in tokens by mean and coefficient of variation (log-normal unless it is constant), cut at `max_tokens`."""

    mean_tokens: float
    cv: float = 0.0
    max_tokens: int

    def __post_init__(self) -> None:
        if not self.mean_tokens > 0 or self.cv < 0 or self.max_tokens < self.mean_tokens:
            raise InvalidInput(
                "lengths need 0 < mean_tokens <= max_tokens and cv >= 0",
                got=(self.mean_tokens, self.cv, self.max_tokens),
            )

    @property
    def second_moment(self) -> float:
        """E[L^2] in tokens^2."""
        return self.mean_tokens**2 * (1.0 + self.cv**2)


@record
class Workload:
    """One step trains on `prompts_per_step` groups of `responses_per_prompt` samples."""

    algorithm: Algorithm = "grpo"
    mode: Mode = "async"
    prompts_per_step: int
    responses_per_prompt: int
    prompt: Lengths
    response: Lengths
    eta: int = 4  # staleness bound in optimiser steps
    reference_model: bool = False  # KL to a reference: one more forward pass
    reward: Reward = "rule"  # who scores a response: a verifier on CPUs, or a model on devices
    reward_s_per_sample: float = 0.0  # CPU seconds of the verifier
    kv_on_update: KvOnUpdate = "recompute"
    update_mode: UpdateMode = "rolling"  # who waits for new weights: the replica, everybody, nobody
    checkpoint_every: int | None = None  # steps from checkpoint to checkpoint; None: they are not counted
    proximal_forward: bool = False  # decoupled objective: one more forward pass of the current policy

    def __post_init__(self) -> None:
        if self.prompts_per_step < 1 or self.responses_per_prompt < 1:
            raise InvalidInput(
                "prompts_per_step and responses_per_prompt must be at least 1",
                got=(self.prompts_per_step, self.responses_per_prompt),
            )
        if self.eta < 0:
            raise InvalidInput("eta must not be negative", got=self.eta, expected=">= 0")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise InvalidInput("checkpoint_every must be at least 1", got=self.checkpoint_every, expected=">= 1")

    @property
    def synchronous(self) -> bool:
        """Whether generation and training take turns: sync mode, or no staleness allowed."""
        return self.mode == "sync" or self.eta == 0

    @property
    def overlapped_updates(self) -> bool:
        """Whether replicas decode while new weights come. Where generation waits for them, nothing hides a transfer."""
        return self.update_mode == "overlapped" and not self.synchronous

    @property
    def samples_per_step(self) -> int:
        """B: samples in a global batch."""
        return self.prompts_per_step * self.responses_per_prompt

    @property
    def response_tokens_per_step(self) -> float:
        """Mean sampled tokens a step."""
        return self.samples_per_step * self.response.mean_tokens
