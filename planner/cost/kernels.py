"""A transformer layer as the kernels it runs, timed by the measured curves of a kind.

Per layer and device of a TP group: the products q, k and v in one, attention's output, gate and up in one, down; attention;
two all-reduces. Tables are of head size 128: heads of another size count by their share of it.
"""

import numpy as np
from numpy.typing import ArrayLike

from planner.calibration.curves import Curves
from planner.calibration.grid import Array
from planner.model import ModelSpec

TABLE_HEAD_DIM = 128


def products(model: ModelSpec, tp: int) -> tuple[tuple[float, float], ...]:
    """(n, k) of the matrix products of one layer on one device of a TP group."""
    heads, kv, d, h, h2 = model.heads, model.kv_heads, model.head_dim, model.hidden, model.intermediate
    qkv = (heads / tp + 2 * max(kv / tp, 1.0)) * d
    return (qkv, h), (h, heads * d / tp), (2 * h2 / tp, h), (h, h2 / tp)


def products_s(curves: Curves, model: ModelSpec, rows: ArrayLike, tp: int, dtype: str = "bf16") -> Array:
    """Seconds of the products of one layer for `rows` tokens."""
    total: Array = np.zeros(np.shape(rows))
    for n, k in products(model, tp):
        total = total + curves.gemm_s(rows, n, k, dtype)
    return total


def head_s(curves: Curves, model: ModelSpec, rows: ArrayLike, tp: int) -> Array:
    """Seconds of the vocabulary projection (bf16) for `rows` tokens."""
    return curves.gemm_s(rows, model.vocab / tp, model.hidden)


def decode_attention_s(
    curves: Curves, model: ModelSpec, batch: ArrayLike, context: ArrayLike, *, tp: int, kv_bytes: int = 2
) -> Array:
    """Seconds of one layer's attention for a new token each; `kv_bytes` of one element of the cache."""
    kv = max(model.kv_heads / tp, 1.0)
    share = model.head_dim / TABLE_HEAD_DIM * kv_bytes / 2
    return curves.decode_s(batch, context, kv * share, model.heads / tp / kv)


def prefill_attention_s(curves: Curves, model: ModelSpec, batch: ArrayLike, tokens: ArrayLike, tp: int) -> Array:
    """Seconds of one layer's causal attention over `batch` prompts of `tokens` each."""
    return curves.prefill_s(batch, tokens, model.heads / tp * model.head_dim / TABLE_HEAD_DIM)


def reduce_s(curves: Curves, model: ModelSpec, rows: ArrayLike, tp: int) -> Array | None:
    """Seconds of one all-reduce of the hidden states by the engine; None where this host was not measured so."""
    if tp == 1:
        return np.zeros(np.shape(rows))
    return curves.collective_s("engine_all_reduce", tp, np.asarray(rows, dtype=float) * model.hidden * 2)
