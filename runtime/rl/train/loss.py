"""Policy losses over response tokens: pure functions of tensors.

All per-token tensors share one shape; the trainer passes flat vectors of the micro-batch's response tokens, [N].
Logprobs are those of the sampled token with the sampling temperature applied. Three policies appear:

- behaviour: the one that sampled the token (reported by the engine, perhaps some versions old),
- proximal: the recent one that clipping is anchored at, a constant of the step,
- current: the one being optimised; the only one with a gradient.
"""

import torch
from torch import Tensor

from planner.record import record


@record
class Objective:
    """What is optimised. Names are those of the configuration's [algorithm] table."""

    decoupled: bool = True
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 5.0
    entropy_coefficient: float = 0.0


@record
class TokenTerms:
    """Per-token pieces of the objective, each with the shape of the inputs."""

    surrogate: Tensor  # to be maximised; carries the gradient
    ratio: Tensor  # current / anchor, where the anchor is what clipping is centred on
    importance: Tensor  # truncated proximal / behaviour; 1 for the plain objective. No gradient
    clipped: Tensor  # bool: clipping took this token's gradient away


def token_logprobs(logits: Tensor, tokens: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprob of each token and entropy of its distribution, both [N] in nats, from logits [N, vocabulary].

    The distribution is softmax(logits / temperature), the one a sampler at that temperature draws from. Half-precision
    logits are raised to float32 first.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    entropy = -(log_p.exp() * log_p).sum(dim=-1)
    return log_p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), entropy


def token_terms(
    current: Tensor, *, proximal: Tensor, behaviour: Tensor, advantages: Tensor, objective: Objective
) -> TokenTerms:
    """Surrogate of each token.

    Plain: PPO-clip, min(u A, clip(u, 1 - clip_low, 1 + clip_high) A) with u = current / behaviour (arXiv:1707.06347,
    eq. 7; two-sided bounds as in DAPO, arXiv:2503.14476).

    Decoupled: the same with u = current / proximal, times w = min(proximal / behaviour, importance_cap)
    (arXiv:2110.00641, eq. 4; for asynchronous RL arXiv:2505.24298, eq. 5; truncation as in V-trace, arXiv:1802.01561).
    w is a constant. It corrects for stale weights and for an engine whose logprobs differ from the trainer's alike:
    both are a behaviour policy that is not the proximal one.
    """
    anchor = proximal if objective.decoupled else behaviour
    ratio = torch.exp(current - anchor)
    bounded = ratio.clamp(1.0 - objective.clip_low, 1.0 + objective.clip_high)
    plain, clipped = ratio * advantages, bounded * advantages
    if objective.decoupled:
        importance = torch.exp(proximal - behaviour).clamp(max=objective.importance_cap).detach()
    else:
        importance = torch.ones_like(ratio)
    return TokenTerms(
        surrogate=importance * torch.minimum(plain, clipped),
        ratio=ratio,
        importance=importance,
        clipped=clipped < plain,
    )


def policy_loss(
    terms: TokenTerms, entropy: Tensor, weights: Tensor, *, denominator: float, entropy_coefficient: float
) -> Tensor:
    """Scalar loss: -sum(weights * (surrogate + entropy_coefficient * entropy)) / denominator.

    `weights` [N] is positive: masked tokens are left out by the caller, not multiplied by 0 (a masked token may carry
    an infinite ratio, and 0 * inf is NaN). `denominator` is the sum of weights over the whole global batch, so that
    micro-batches add up to the token-level mean however the batch is cut (DAPO, arXiv:2503.14476, eq. 8; a mean per
    sample would favour short answers).
    """
    gain = terms.surrogate + entropy_coefficient * entropy if entropy_coefficient else terms.surrogate
    return -(weights * gain).sum() / denominator


def kl_from_behaviour(current: Tensor, behaviour: Tensor) -> Tensor:
    """Per-token estimate of KL(behaviour || current), >= 0 and unbiased for tokens sampled by behaviour.

    k3 = (x - 1) - ln x with x = current / behaviour (J. Schulman, "Approximating KL Divergence", 2020).
    """
    log_ratio = current - behaviour
    return torch.expm1(log_ratio) - log_ratio
