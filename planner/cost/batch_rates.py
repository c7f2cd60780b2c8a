"""Training rates of many shapes at once: the array twins of `train_rate` and `train_attention_rate`, for blocks of one kind."""

import numpy as np
from numpy.typing import NDArray

from planner.cluster import DeviceKind
from planner.cost.context import Context
from planner.cost.flops import train_attention_rate
from planner.cost.parts import Block
from planner.record import record

Array = NDArray[np.float64]
Ints = NDArray[np.int_]


@record
class Alike:
    """What tells blocks of many shapes apart where it comes to rates, each once. Axis d: distinct ones."""

    kind: DeviceKind
    tp: Ints  # [d]
    dp: Ints
    widest: Ints  # the highest DP degree of the shape's blocks, by which micro-batches are counted

    @property
    def degrees(self) -> list[tuple[int, Ints]]:
        """(TP degree, distinct ones that have it)."""
        return [(degree, np.flatnonzero(self.tp == degree)) for degree in sorted(set(self.tp.tolist()))]


def alike(kind: DeviceKind, block: Block, widest: Ints) -> tuple[Alike, Ints]:
    """The distinct ones among many shapes' blocks, and which of them each shape has."""
    most = int(widest.max(initial=0)) + 1  # no block has a higher degree
    codes, which = np.unique((block.tp * most + block.dp) * most + widest, return_inverse=True)
    found = Alike(kind=kind, tp=codes // most**2, dp=codes // most % most, widest=codes % most)
    return found, np.asarray(which).reshape(-1)


def train_rates(ctx: Context, blocks: Alike, tokens: Array) -> Array:
    """FLOP/s of one device of each distinct block on products of `tokens` rows."""
    kind, tp = blocks.kind, blocks.tp
    if kind.paced:
        return np.full(len(tp), kind.peak_flops * kind.train_efficiency)
    if ctx.rates.curves(kind) is not None:
        out = np.empty(len(tp))
        for degree, at in blocks.degrees:
            rate = ctx.rates.product_rate(kind, ctx.model, degree, tokens[at])
            out[at] = ctx.a.train_products * rate * kind.train_efficiency
        return out
    width = np.minimum(ctx.model.hidden, ctx.model.intermediate / tp)
    some = np.maximum(tokens, 1.0)
    curve: Array = some / (some + ctx.a.gemm_half_tokens) * width / (width + ctx.a.gemm_half_width)
    return kind.peak_flops * ctx.a.gemm_ceiling * curve * kind.train_efficiency


def attention_seconds(ctx: Context, blocks: Alike) -> Array:
    """Seconds a FLOP of a forward pass of attention takes a TP group of each distinct block; 0 where it runs as products do."""
    out = np.zeros(len(blocks.tp))
    for degree, at in blocks.degrees:
        found = train_attention_rate(ctx, blocks.kind, degree)
        if found is not None:
            out[at] = 1 / (found * degree)
    return out
