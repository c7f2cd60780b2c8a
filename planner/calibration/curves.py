"""Seconds of kernels and collectives from measured tables, for the kinds measured and, by their datasheets, for others.

A kernel's *roof* is what its FLOPs at the peak and its bytes at the HBM rate take together, as a norm of the two; a table
holds its *slowness*, measured seconds over (floor + roof), where the floor is the shortest time any shape of the table
takes. Efficiency is the inverse. Tables are of data that streams from memory, as in a step, where other layers pass in between:
what a repeated benchmark read from the chip's cache was taken out of them. A kind without a table is given the geometric mean
of the slowness of the kinds it is likened to, at its own roof.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from planner.calibration.grid import Array, Correction, Grid
from planner.record import record

ROOF_NORM = 1.5
"""p of the roof (compute^p + memory^p)^(1/p): between no overlap (1) and a perfect one; of 1, 1.5, 2, 3, 4 the one with
which A100 and H100 tables predict each other best."""

COLLECTIVE_OPS = ("all_reduce", "all_gather", "reduce_scatter")


@record
class Sheet:
    """Datasheet figures of a device for one dtype."""

    peak_flops: float
    hbm_bytes_per_s: float


@record
class Table:
    """Measured slowness of one kernel over its shapes."""

    floor_s: float
    slowness: Grid

    def seconds(self, roof_s: Array, *shape: ArrayLike) -> Array:
        """Seconds of a kernel at a shape whose roof is known."""
        out: Array = (self.floor_s + roof_s) * self.slowness.at(*shape)
        return out


@record
class Collective:
    """Seconds of one collective on one host over bytes, both as natural logarithms, ascending."""

    log_bytes: Array
    log_seconds: Array

    def seconds(self, size_bytes: ArrayLike) -> Array:
        """Interpolated; beyond the last size in proportion to it, below the first its time."""
        size = np.log(np.maximum(np.asarray(size_bytes, dtype=float), 1.0))
        inside = np.interp(size, self.log_bytes, self.log_seconds)
        out: Array = np.exp(inside + np.maximum(0.0, size - self.log_bytes[-1]))
        return out


@record
class KindCurves:
    """Everything measured on one kind."""

    kind: str
    sheets: Mapping[str, Sheet]  # by dtype
    gemm: Mapping[str, Table]  # by dtype; shape (m, n, k)
    decode: Table  # shape (batch, context, key-value heads, query heads a key-value head)
    prefill: Table  # shape (batch, tokens, heads)
    hbm_share: float  # best share of HBM bandwidth that decode attention reached
    collectives: Mapping[tuple[str, int], Collective]  # by (op, ranks), inside one host


def roof(flops: ArrayLike, size_bytes: ArrayLike, sheet: Sheet) -> Array:
    """Seconds that FLOPs and bytes take together at datasheet rates."""
    compute = np.asarray(flops, dtype=float) / sheet.peak_flops
    memory = np.asarray(size_bytes, dtype=float) / sheet.hbm_bytes_per_s
    out: Array = (compute**ROOF_NORM + memory**ROOF_NORM) ** (1 / ROOF_NORM)
    return out


def gemm_work(m: ArrayLike, n: ArrayLike, k: ArrayLike, width: int) -> tuple[Array, Array]:
    """(FLOPs, bytes) of C[m, n] = A[m, k] B[k, n]; operands of `width` bytes, a result of two where they are narrower."""
    rows, columns, inner = (np.asarray(x, dtype=float) for x in (m, n, k))
    size = width * inner * (rows + columns) + max(width, 2) * rows * columns
    return 2 * rows * columns * inner, size


def decode_work(batch: ArrayLike, context: ArrayLike, kv_heads: ArrayLike, per_kv: ArrayLike) -> tuple[Array, Array]:
    """(FLOPs, bytes of KV) of one layer's attention for a token each; bf16, heads of 128."""
    samples, length, heads, queries = (np.asarray(x, dtype=float) for x in (batch, context, kv_heads, per_kv))
    cells = samples * length * heads
    return 4.0 * 128 * cells * queries, 4.0 * 128 * cells


def prefill_work(batch: ArrayLike, tokens: ArrayLike, heads: ArrayLike) -> tuple[Array, Array]:
    """(FLOPs, bytes) of one layer's causal attention; bf16, heads of 128. Bytes: queries and results."""
    samples, length, queries = (np.asarray(x, dtype=float) for x in (batch, tokens, heads))
    rows = samples * length * queries
    return 2.0 * 128 * rows * length, 4.0 * 128 * rows


@record
class Curves:
    """Kernels of one device kind: its own table, or those it is likened to at its own datasheet."""

    sources: tuple[KindCurves, ...]
    sheets: Mapping[str, Sheet]
    own: bool  # the table is this kind's; only then do its collectives count
    fixes: Mapping[str, Correction] = dataclasses.field(default_factory=dict)  # by points of the user's own cards

    def _fixed(self, what: str, seconds: Array, *shape: ArrayLike) -> Array:
        fix = self.fixes.get(what)
        return seconds if fix is None else seconds * fix.at(*shape)

    def gemm_s(self, m: ArrayLike, n: ArrayLike, k: ArrayLike, dtype: str = "bf16") -> Array:
        """Seconds of one matrix product."""
        dtype = dtype if all(dtype in c.gemm for c in self.sources) and dtype in self.sheets else "bf16"
        width = 1 if dtype == "fp8" else 2
        flops, size = gemm_work(m, n, k, width)
        at = roof(flops, size, self.sheets[dtype])
        found = _mean([c.gemm[dtype].seconds(at, m, n, k) for c in self.sources])
        # No card is above its peak, which a table carried to a card with far more bandwidth a FLOP could say, and no weights
        # come faster than memory.
        found = np.maximum(found, flops / self.sheets[dtype].peak_flops)
        found = np.maximum(found, width * np.asarray(n, dtype=float) * k / self.sheets[dtype].hbm_bytes_per_s)
        return self._fixed(dtype, found, m, n, k)

    def decode_s(self, batch: ArrayLike, context: ArrayLike, kv_heads: ArrayLike, per_kv: ArrayLike) -> Array:
        """Seconds of one layer's attention for one new token of each of `batch` samples."""
        flops, size = decode_work(batch, context, kv_heads, per_kv)
        shape, mine = (batch, context, kv_heads, per_kv), self.sheets["bf16"]
        found: list[Array] = []
        for c in self.sources:
            theirs = c.sheets["bf16"]
            seconds = c.decode.seconds(roof(flops, size, theirs), *shape)
            if mine != theirs:
                # Reading scales with bandwidth; what is lost besides (few blocks, short contexts) does not.
                gain = 1 / mine.hbm_bytes_per_s - 1 / theirs.hbm_bytes_per_s
                seconds = seconds + size / c.hbm_share * gain
            found.append(np.maximum(seconds, size / mine.hbm_bytes_per_s))
        return self._fixed("decode", _mean(found), *shape)

    def prefill_s(self, batch: ArrayLike, tokens: ArrayLike, heads: ArrayLike) -> Array:
        """Seconds of one layer's causal attention over `batch` prompts of `tokens` each."""
        at = roof(*prefill_work(batch, tokens, heads), self.sheets["bf16"])
        found = _mean([c.prefill.seconds(at, batch, tokens, heads) for c in self.sources])
        return self._fixed("prefill", found, batch, tokens, heads)

    def collective_s(self, op: str, ranks: int, size_bytes: ArrayLike) -> Array | None:
        """Seconds of a collective inside one host; None where this kind's host was not measured so."""
        found = self.sources[0].collectives.get((op, ranks)) if self.own else None
        return None if found is None else found.seconds(size_bytes)


def _mean(values: Sequence[Array]) -> Array:
    """The geometric mean; one value comes back as it is."""
    if len(values) == 1:
        return values[0]
    out: Array = np.exp(sum(np.log(v) for v in values) / len(values))
    return out


def collective(size_bytes: Sequence[float], seconds: Sequence[float]) -> Collective:
    """A collective's curve from its points, which may come in any order; the least of several at one size."""
    best: dict[float, float] = {}
    for size, s in zip(size_bytes, seconds, strict=True):
        best[size] = min(s, best.get(size, math.inf))
    order = sorted(best)
    return Collective(
        log_bytes=np.log(np.array(order, dtype=float)), log_seconds=np.log(np.array([best[x] for x in order]))
    )
