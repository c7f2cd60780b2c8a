"""Figures of one optimiser step, as they appear in `metrics.jsonl`. Per-token means are over trained tokens.

A figure that does not exist in a step (no token as fresh as the trainer's weights) is left out, never written as 0.
"""

import statistics
from collections.abc import Sequence

import torch
from torch import Tensor

from planner.record import record
from runtime.rl.types import TrainBatch


@record
class TokenFigures:
    """Detached per-token values of one micro-batch, each [N]."""

    current: Tensor  # logprob under the weights before the update
    entropy: Tensor
    importance: Tensor
    clipped: Tensor  # bool
    behaviour: Tensor
    ages: Tensor


def batch_metrics(batch: TrainBatch) -> dict[str, float]:
    """What the batch alone says: rewards, lengths, token counts. Tokens of weight 0 count as masked."""
    samples = batch.samples
    rewards = [s.reward for s in samples]
    trained = sum(len(s.weights) - s.weights.count(0.0) for s in samples)  # counted in C: batches have millions
    return {
        "reward_mean": statistics.fmean(rewards) if rewards else 0.0,
        "reward_std": statistics.pstdev(rewards) if rewards else 0.0,
        "response_tokens_mean": statistics.fmean(len(s.tokens) for s in samples) if samples else 0.0,
        "truncated_share": statistics.fmean(s.finish == "length" for s in samples) if samples else 0.0,
        "samples": float(len(samples)),
        "trained_tokens": float(trained),
        "masked_tokens": float(sum(len(s.tokens) for s in samples) - trained),
    }


def token_metrics(parts: Sequence[TokenFigures]) -> dict[str, float]:
    """What the trained tokens say; empty when there is none."""
    if not parts:
        return {}
    current, behaviour = _join(parts, "current").double(), _join(parts, "behaviour").double()
    importance, ages = _join(parts, "importance"), _join(parts, "ages")
    gap = current - behaviour
    figures = {
        "kl_behaviour": (torch.expm1(gap) - gap).mean(),
        "entropy": _join(parts, "entropy").mean(),
        "clip_fraction": _join(parts, "clipped").double().mean(),
        "importance_mean": importance.mean(),
        "importance_max": importance.max(),
        "staleness_mean": ages.double().mean(),
        "staleness_max": ages.max(),
    }
    fresh = gap[ages == 0]
    if fresh.numel():
        # Same weights on both sides: what is left is the engine's arithmetic against the trainer's.
        figures["engine_trainer_logprob_diff"] = fresh.abs().mean()
    return {name: float(value) for name, value in figures.items()}


def _join(parts: Sequence[TokenFigures], name: str) -> Tensor:
    return torch.cat([getattr(p, name) for p in parts])
