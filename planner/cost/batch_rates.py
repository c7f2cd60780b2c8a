"""Training rates of many shapes at once: the array twins of `train_rate` and `train_attention_rate`.

Rows are parts (four of the first block, four of the second, each of the block's kind and TP), columns are shapes.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cluster import DeviceKind
from planner.cost.context import Context
from planner.cost.flops import train_attention_rate

Array = NDArray[np.float64]
Ints = NDArray[np.int_]
_PARTS_A_BLOCK = 4


def train_rates(ctx: Context, kinds: Sequence[DeviceKind], tp: Ints, tokens: Array) -> Array:
    """FLOP/s of one device of each part on products of `tokens` rows."""
    out = np.empty(tokens.shape)
    for row in range(0, len(kinds), _PARTS_A_BLOCK):
        kind, rows = kinds[row], slice(row, row + _PARTS_A_BLOCK)
        if kind.paced:
            out[rows] = kind.peak_flops * kind.train_efficiency
        elif ctx.rates.curves(kind) is not None:
            for degree, at in _degrees(tp[row]):
                rate = ctx.rates.product_rate(kind, ctx.model, degree, tokens[row, at])  # one for all parts of a block
                out[rows, at] = ctx.a.train_products * rate * kind.train_efficiency
        else:
            width = np.minimum(ctx.model.hidden, ctx.model.intermediate / tp[rows])
            some = np.maximum(tokens[rows], 1.0)
            curve = some / (some + ctx.a.gemm_half_tokens) * width / (width + ctx.a.gemm_half_width)
            out[rows] = kind.peak_flops * ctx.a.gemm_ceiling * curve * kind.train_efficiency
    return out


def attention_seconds(ctx: Context, kinds: Sequence[DeviceKind], tp: Ints, *, backward: bool) -> Array:
    """Seconds a FLOP of attention takes a TP group of each part; 0 where it runs as products do."""
    out = np.zeros(tp.shape)
    for row in range(0, len(kinds), _PARTS_A_BLOCK):
        for degree, at in _degrees(tp[row]):
            found = train_attention_rate(ctx, kinds[row], degree, backward=backward)
            if found is not None:
                out[row : row + _PARTS_A_BLOCK, at] = 1 / (found * degree)
    return out


def _degrees(tp: Ints) -> list[tuple[int, Ints]]:
    """(TP degree, shapes that have it)."""
    return [(degree, np.flatnonzero(tp == degree)) for degree in sorted(set(tp.tolist()))]
