"""One pass of a packed row through the decoder: the two halves of a layer around attention, compiled or not, kept or recomputed.

Shapes: T tokens of a row, H hidden, Q query heads, K KV heads, D head_dim, I the MLP's width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from planner.record import record
from runtime.rl.model.attention import Mix, PackedAttention, Row

Head = Callable[[Tensor, Tensor, float], Any]
"""(final normed states [N,H], output embedding [V,H], logit scale) -> tensors."""


def project(
    x: Tensor,
    turn: tuple[Tensor, Tensor],
    norm: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    *,
    biases: tuple[Tensor, Tensor, Tensor] | None,
    head_norms: tuple[Tensor, Tensor] | None,
    eps: float,
    head_dim: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """From the residual [T,H] to rotated q [T,Q,D], k [T,K,D] and v [T,K,D]; `turn`: cos and sin [T,1,D/2].

    One product with the three projections behind each other: those of k and v alone are too narrow to fill a device.
    """
    y = F.rms_norm(x, norm.shape, norm, eps)
    joined = F.linear(y, torch.cat(weights), torch.cat(biases) if biases is not None else None)
    parts = torch.split(joined, [w.shape[0] for w in weights], dim=-1)
    q, k, v = (p.view(p.shape[0], -1, head_dim) for p in parts)
    if head_norms is not None:
        q = F.rms_norm(q, head_norms[0].shape, head_norms[0], eps)
        k = F.rms_norm(k, head_norms[1].shape, head_norms[1], eps)
    # A view of v would keep q and k of before the rotation alive until the backward pass.
    return rotate(q, *turn), rotate(k, *turn), v.contiguous()


def finish(
    x: Tensor,
    mixed: Tensor,
    norm: Tensor,
    weights: tuple[Tensor, Tensor, Tensor, Tensor],
    *,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """From the residual [T,H] and attention's output [T,Q,D] to the next residual. `weights`: those of attention's output,
    gate, up and down; `bias`: the first one's."""
    out, gate, up, down = weights
    x = x + F.linear(mixed.flatten(-2), out, bias)
    y = F.rms_norm(x, norm.shape, norm, eps)
    return x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding: element i of the first half turns with element i of the second."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Halves:
    """`project` and `finish`, compiled or as they are. Attention stands between them, so that no compiler meets it.

    One compiled function serves all layers, since weights are arguments, and, from its second length on, every length.
    """

    def __init__(self, *, compiled: bool) -> None:
        self.compiled = compiled
        self.project = torch.compile(project) if compiled else project
        self.finish = torch.compile(finish) if compiled else finish


@record
class PackedPass:
    """How a row goes through the decoder and what becomes of its last states."""

    row: Row
    attention: PackedAttention
    halves: Halves
    recomputed: int  # the first so many layers keep their input only and are computed again in the backward pass
    wanted: Tensor  # [N] int64: places in the row whose final states `head` gets
    head: Head


@record
class LayerPass:
    """A pass as one layer sees it."""

    mix: Mix
    halves: Halves
    recompute: bool

    def through(self, layer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The residual [T,H] behind `layer` (`decoder.Layer`)."""

        # Weights are read from the layer each time: a sharded layer has other tensors outside of its passes.
        def whole(x: Tensor) -> Tensor:
            a, m = layer.self_attn, layer.mlp
            q, k, v = self.halves.project(
                x,
                (cos, sin),
                layer.input_layernorm.weight,
                (a.q_proj.weight, a.k_proj.weight, a.v_proj.weight),
                biases=None if a.q_proj.bias is None else (a.q_proj.bias, a.k_proj.bias, a.v_proj.bias),
                head_norms=None if isinstance(a.q_norm, nn.Identity) else (a.q_norm.weight, a.k_norm.weight),
                eps=layer.input_layernorm.eps,
                head_dim=a.head_dim,
            )
            return self.halves.finish(
                x,
                self.mix(q, k, v),
                layer.post_attention_layernorm.weight,
                (a.o_proj.weight, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight),
                bias=a.o_proj.bias,
                eps=layer.post_attention_layernorm.eps,
            )

        if not self.recompute:
            return whole(x)
        from torch.utils.checkpoint import checkpoint

        # Inside the layer's forward: gathering a sharded layer is its own hook's work. Nothing here draws random numbers.
        out: Tensor = checkpoint(whole, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
        return out
