"""The vocabulary's end of the network in chunks of rows: logprobs, entropies and their gradient without all logits at once.

Shapes: N rows, H hidden, V vocabulary, C rows of a chunk. With z = logits * factor, p = softmax(z), h the entropy of p and t a
row's target:
    d logp_t / d z_j = [j = t] - p_j
    d h / d z_j      = -p_j (ln p_j + h)
Half-precision logits are raised to float32 first, as in `loss.token_logprobs`, which is the oracle of all this.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from planner.record import record

TokenLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""(rows of the chunk, their logprobs [C], their entropies [C]) -> the sum of their losses, differentiable."""
_ROUND = 128
HALVES = (torch.bfloat16, torch.float16)


def scores_of(logits: Tensor, targets: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob of each target, entropy, and log of the sum of exponentials, all [C], of logits [C,V]."""
    z = (logits.float() if logits.dtype in HALVES else logits) * factor
    high = z.amax(dim=-1, keepdim=True)
    below = z - high
    e = below.exp()
    total = e.sum(dim=-1)
    mean = (e * below).sum(dim=-1) / total
    lse = high.squeeze(-1) + total.log()
    return z.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - lse, total.log() - mean, lse


def slopes_of(
    logits: Tensor,
    targets: Tensor,
    lse: Tensor,
    entropy: Tensor,
    factor: float,
    *,
    d_logprob: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """Gradient [C,V], in the logits' dtype, of logits whose targets' logprobs and entropies have the gradients given."""
    z = (logits.float() if logits.dtype in HALVES else logits) * factor
    log_p = z - lse.unsqueeze(-1)
    hit = torch.arange(z.shape[-1], device=z.device) == targets.unsqueeze(-1)
    slope = d_logprob.unsqueeze(-1) * (hit.to(z.dtype) - log_p.exp())
    if d_entropy is not None:
        slope = slope - d_entropy.unsqueeze(-1) * log_p.exp() * (log_p + entropy.unsqueeze(-1))
    return (slope * factor).to(logits.dtype)


class ChunkKernels:
    """`scores_of` and `slopes_of`, one fused kernel each where they are compiled, and the sum of the weight's gradient."""

    def __init__(self, *, compiled: bool = False, wide_products: bool = False) -> None:
        self.compiled = compiled
        self.wide_products = wide_products
        self.scores = torch.compile(scores_of) if compiled else scores_of
        self.slopes = torch.compile(slopes_of) if compiled else slopes_of

    def add_product(self, total: Tensor, slopes: Tensor, hidden: Tensor) -> None:
        """total [V,H] += slopes [C,V]^T hidden [C,H]. `total` is float32 for half-precision operands."""
        if total.dtype == hidden.dtype:
            total.addmm_(slopes.t(), hidden)
        elif self.wide_products:
            torch.addmm(total, slopes.t(), hidden, out_dtype=total.dtype, out=total)
        else:
            total.add_(slopes.t() @ hidden)


def has_wide_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether half-precision products can be added to a float32 sum without a rounding between (by trial)."""
    if device.type != "cuda" or dtype not in HALVES:
        return False
    a = torch.ones(16, 16, device=device, dtype=dtype)
    total = torch.ones(16, 16, device=device, dtype=torch.float32)
    try:
        ChunkKernels(wide_products=True).add_product(total, a, a)
    except (RuntimeError, TypeError):
        return False
    return bool((total == 17.0).all())


@record
class Chunks:
    """How the rows are worked through: `rows` at a time, logits times `factor` (logit scale over temperature)."""

    rows: int
    factor: float
    kernels: ChunkKernels

    def spans(self, count: int) -> list[slice]:
        """Chunks of like size: a last one of few rows would cost a pass over the weight of its own. Large ones are whole
        multiples of what matrix kernels like, and all but the last of one size, for which kernels are compiled once."""
        if not count:
            return []
        size = -(-count // -(-count // self.rows))
        if size > _ROUND:
            size = -(-size // _ROUND) * _ROUND
        return [slice(a, min(a + size, count)) for a in range(0, count, size)]


def chunked_scores(hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies [N] of targets [N] under states [N,H] and output embedding [V,H]; logits are made once more in
    the backward pass."""
    out: tuple[Tensor, Tensor] = _Scores.apply(hidden, weight, targets, chunks)  # type: ignore[no-untyped-call]
    return out


def chunked_loss(
    hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks, token_loss: TokenLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the tokens' losses, and their logprobs and entropies [N] (without gradient).

    The gradient is taken in the forward pass, while a chunk's logits are there: three products with the vocabulary a token
    instead of the four of `chunked_scores`. A token's loss may depend on its own row only.
    """
    out: tuple[Tensor, Tensor, Tensor] = _Loss.apply(hidden, weight, targets, chunks, token_loss)  # type: ignore[no-untyped-call]
    return out


class _Scores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks) -> tuple[Tensor, Tensor]:
        logprobs, entropies, lses = _empty(hidden), _empty(hidden), _empty(hidden)
        for at in chunks.spans(hidden.shape[0]):
            logits = F.linear(hidden[at], weight)
            logprobs[at], entropies[at], lses[at] = chunks.kernels.scores(logits, targets[at], chunks.factor)
        ctx.save_for_backward(hidden, weight, targets, lses, entropies)
        ctx.chunks = chunks
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lses, entropies = ctx.saved_tensors
        chunks: Chunks = ctx.chunks
        d_hidden, d_weight = torch.empty_like(hidden), _wide_zeros(weight)
        for at in chunks.spans(hidden.shape[0]):
            logits = F.linear(hidden[at], weight)
            slopes = chunks.kernels.slopes(
                logits,
                targets[at],
                lses[at],
                entropies[at],
                chunks.factor,
                d_logprob=grads[0][at],
                d_entropy=grads[1][at],
            )
            del logits
            d_hidden[at] = slopes @ weight
            chunks.kernels.add_product(d_weight, slopes, hidden[at])
        return d_hidden, d_weight.to(weight.dtype), None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes by position
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunks: Chunks, token_loss: TokenLoss
    ) -> tuple[Tensor, Tensor, Tensor]:
        logprobs, entropies = _empty(hidden), _empty(hidden)
        d_hidden, d_weight = torch.empty_like(hidden), _wide_zeros(weight)
        total = logprobs.new_zeros(())
        for at in chunks.spans(hidden.shape[0]):
            logits = F.linear(hidden[at], weight)
            logprob, entropy, lse = chunks.kernels.scores(logits, targets[at], chunks.factor)
            with torch.enable_grad():
                leaves = logprob.detach().requires_grad_(), entropy.detach().requires_grad_()
                loss = token_loss(at, *leaves)
            found: tuple[Tensor | None, ...] = torch.autograd.grad(loss, leaves, allow_unused=True)
            d_logprob, d_entropy = torch.zeros_like(logprob) if found[0] is None else found[0], found[1]
            slopes = chunks.kernels.slopes(
                logits, targets[at], lse, entropy, chunks.factor, d_logprob=d_logprob, d_entropy=d_entropy
            )
            del logits
            d_hidden[at] = slopes @ weight
            chunks.kernels.add_product(d_weight, slopes, hidden[at])
            logprobs[at], entropies[at] = logprob, entropy
            total += loss.detach()
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.dtype = weight.dtype
        ctx.mark_non_differentiable(logprobs, entropies)
        return total, logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        # Not in place: a graph that is kept may come here again.
        return d_hidden * grads[0].to(d_hidden.dtype), (d_weight * grads[0]).to(ctx.dtype), None, None, None


def _empty(hidden: Tensor) -> Tensor:
    dtype = torch.float32 if hidden.dtype in HALVES else hidden.dtype
    return torch.empty(hidden.shape[0], dtype=dtype, device=hidden.device)


def _wide_zeros(weight: Tensor) -> Tensor:
    dtype = torch.float32 if weight.dtype in HALVES else weight.dtype
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device)
