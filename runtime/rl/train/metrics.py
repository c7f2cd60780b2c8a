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


_SUMS = 8  # figures that add up over micro-batches and ranks; the two behind them are largest values


def token_sums(parts: Sequence[TokenFigures]) -> tuple[list[float], list[float]]:
    """(sums, largest values) over the trained tokens of some micro-batches; those of several ranks add up (are compared)."""
    if not any(p.current.numel() for p in parts):
        return [0.0] * _SUMS, [0.0, 0.0]
    current, behaviour = _join(parts, "current").double(), _join(parts, "behaviour").double()
    importance, ages = _join(parts, "importance").double(), _join(parts, "ages").double()
    gap = current - behaviour
    fresh = gap[ages == 0]
    sums = (
        torch.ones_like(gap).sum(),
        (torch.expm1(gap) - gap).sum(),
        _join(parts, "entropy").double().sum(),
        _join(parts, "clipped").double().sum(),
        importance.sum(),
        ages.sum(),
        torch.ones_like(fresh).sum(),
        fresh.abs().sum(),
    )
    return torch.stack(sums).tolist(), torch.stack((importance.max(), ages.max())).tolist()


def token_metrics(sums: Sequence[float], largest: Sequence[float]) -> dict[str, float]:
    """What the trained tokens say; empty when there is none."""
    tokens, kl, entropy, clipped, importance, ages, fresh, gap = sums
    if not tokens:
        return {}
    figures = {
        "kl_behaviour": kl / tokens,
        "entropy": entropy / tokens,
        "clip_fraction": clipped / tokens,
        "importance_mean": importance / tokens,
        "importance_max": largest[0],
        "staleness_mean": ages / tokens,
        "staleness_max": largest[1],
    }
    if fresh:
        # Same weights on both sides: what is left is the engine's arithmetic against the trainer's.
        figures["engine_trainer_logprob_diff"] = gap / fresh
    return figures


def _join(parts: Sequence[TokenFigures], name: str) -> Tensor:
    return torch.cat([getattr(p, name) for p in parts])
