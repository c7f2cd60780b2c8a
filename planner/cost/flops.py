"""FLOPs of a transformer and the rate at which a kind delivers them.

Per layer and sequence of S tokens, with h hidden, d head size, H query and K key-value heads, h2 the MLP's width:
projections 4 S h d (H + K), attention 4 S^2 H d (half when causal), MLP 6 S h h2; the vocabulary projection, 2 S h V, once.
"""

from planner.cluster import DeviceKind
from planner.cost.context import Context
from planner.model import ModelSpec

NEWER_ATTENTION = frozenset({"H100", "H200"})
"""Kinds whose attention tables are of FlashAttention-3: vLLM takes it from the Hopper generation on, FlashAttention-2 elsewhere."""


def layer_flops(model: ModelSpec, tokens: float, tokens2: float) -> float:
    """Forward FLOPs of one layer over sequences with `tokens` = sum S and `tokens2` = sum S^2, causal."""
    h, d = model.hidden, model.head_dim
    linear = 4 * h * d * (model.heads + model.kv_heads) + 6 * h * model.intermediate
    return tokens * linear + 2 * tokens2 * model.heads * d


def head_flops(model: ModelSpec, tokens: float) -> float:
    """Forward FLOPs of the vocabulary projection."""
    return 2 * tokens * model.hidden * model.vocab


def token_flops(model: ModelSpec) -> float:
    """Forward FLOPs of the matrix products of one token, vocabulary included."""
    return model.layers * layer_flops(model, 1, 0) + head_flops(model, 1)


def attend_flops(model: ModelSpec, context: float) -> float:
    """Forward FLOPs of attention of one new token over `context` tokens."""
    return 4 * context * model.heads * model.head_dim * model.layers


def compute_rate(ctx: Context, kind: DeviceKind, tokens: float, tp: int) -> float:
    """FLOP/s of one device of a TP group on matmuls of `tokens` rows.

    By the kind's measured curves, else by the assumptions. A paced device is held to its declared speed by a clock,
    whatever the shape.
    """
    if kind.paced:
        return kind.peak_flops
    if ctx.rates.curves(kind) is not None:
        return ctx.rates.product_rate_of(kind, ctx.model, tp, tokens)
    return assumed_rate(ctx, kind, tokens, tp)


def assumed_rate(ctx: Context, kind: DeviceKind, tokens: float, tp: int) -> float:
    """`compute_rate` of a kind without curves: a saturating curve in rows and in the narrower width of the sharded layer."""
    width = min(ctx.model.hidden, ctx.model.intermediate / tp)
    rows = max(tokens, 1.0)
    curve = rows / (rows + ctx.a.gemm_half_tokens) * width / (width + ctx.a.gemm_half_width)
    return kind.peak_flops * ctx.a.gemm_ceiling * curve


def train_rate(ctx: Context, kind: DeviceKind, tokens: float, tp: int) -> float:
    """`compute_rate` as a trainer reaches it."""
    share = 1.0 if ctx.rates.curves(kind) is None else ctx.a.train_products
    return share * compute_rate(ctx, kind, tokens, tp) * kind.train_efficiency


def kernel_share(ctx: Context, kind: DeviceKind) -> float:
    """Rate of the trainer's attention kernel over that of the tables behind a kind's curves; their geometric mean where several
    tables stand in for its own."""
    curves = ctx.rates.curves(kind)
    assert curves is not None, "asked only where there are curves"
    newer = sum(c.kind in NEWER_ATTENTION for c in curves.sources) / len(curves.sources)
    share = ctx.a.cudnn_share if ctx.train_attention == "cudnn" else ctx.a.flash_2_share
    return float(share**newer)


def train_attention_rate(ctx: Context, kind: DeviceKind, tp: int) -> float | None:
    """FLOP/s of one device on a forward pass of a trainer's attention over the workload's sequences; None where attention is taken
    to run as fast as products do."""
    if ctx.rates.curves(kind) is None:
        return None
    share = ctx.a.train_attention * kernel_share(ctx, kind)
    return share * ctx.rates.attention_rate(kind, ctx.model, tp, ctx.m.sequence) * kind.train_efficiency


def hbm_rate(ctx: Context, kind: DeviceKind) -> float:
    """Bytes/s of device memory that kernels reach."""
    return kind.hbm_bytes_per_s * (1.0 if kind.paced else ctx.a.hbm_efficiency)
