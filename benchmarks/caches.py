"""What last-level caches hide in the measured tables, and how it is taken out of them.

The tables are of kernels that were repeated over the same data: what fits into the chip's cache is read from there, above the
speed of memory. In a decode step it never is, since all other layers' weights and samples' caches pass in between. So the
curves are fitted to *streamed* seconds: those measured and, where the data fitted, what reading it from memory takes longer.
Who predicts the tables themselves takes that off again.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from planner.calibration.curves import Sheet, decode_work, gemm_work, roof
from planner.calibration.grid import Array
from planner.record import record, replace

Shape = tuple[int, ...]
Points = Mapping[Shape, float]
_MIB = 2.0**20
CACHE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "A100-80": 40 * _MIB,  # NVIDIA A100 architecture paper
        "H100": 50 * _MIB,  # NVIDIA H100 architecture paper
        "H200": 50 * _MIB,  # the same chip
        "L40S": 96 * _MIB,  # NVIDIA Ada architecture paper (AD102)
        "RTX-PRO-6000": 128 * _MIB,  # NVIDIA RTX Blackwell PRO architecture paper (GB202)
    }
)
"""Last-level (L2) caches by data sheet."""

GEMM_COPIES = 6
"""Copies of the weights that the tables' benchmark of products uses in turn (aiconfigurator, collector/vllm/collect_gemm.py): only
a sixth of the cache holds one of them. Its benchmark of attention has one copy of the key-value cache."""

_LARGE_BYTES = 256e6  # reads that no cache holds
_BEST = 95  # percentile of the rates that counts as the best


@record
class Cache:
    """A kind's last-level cache, and how fast it and the memory behind it were read at best."""

    size_bytes: float
    bytes_per_s: float | None  # None where no read shows that it came from the cache
    hbm_share: float  # of the data sheet's HBM rate

    def reached(self, sheet: Sheet) -> Sheet:
        """The data sheet at the memory bandwidth that was reached."""
        return replace(sheet, hbm_bytes_per_s=sheet.hbm_bytes_per_s * self.hbm_share)

    def saved_s(self, flops: ArrayLike, held: ArrayLike, rest: ArrayLike, sheet: Sheet, copies: int = 1) -> Array:
        """Seconds that a repeated kernel saves whose `held` bytes fit in so many copies; `rest` bytes always stream."""
        if self.bytes_per_s is None:
            return np.zeros(np.broadcast_shapes(np.shape(flops), np.shape(held)))
        reached = self.reached(sheet)
        read, others = np.asarray(held, dtype=float), np.asarray(rest, dtype=float)
        streamed = roof(flops, read + others, reached)
        cached = roof(flops, read * reached.hbm_bytes_per_s / self.bytes_per_s + others, reached)
        out: Array = np.where(copies * read <= self.size_bytes, np.maximum(streamed - cached, 0.0), 0.0)
        return out

    def decode_saved_s(self, shape: ArrayLike, sheet: Sheet) -> Array:
        """The same of attention while decoding; `shape` holds (batch, context, key-value heads, queries a head) x rows."""
        batch, context, heads, per_kv = np.asarray(shape, dtype=float)
        flops, size = decode_work(batch, context, heads, per_kv)
        return self.saved_s(flops, size, 0.0, sheet)

    def gemm_saved_s(self, shape: ArrayLike, width: int, sheet: Sheet) -> Array:
        """The same of products with weights of `width` bytes an element; `shape` holds (m, n, k) x rows."""
        m, n, k = np.asarray(shape, dtype=float)
        flops, size = gemm_work(m, n, k, width)
        weights = width * n * k
        return self.saved_s(flops, weights, size - weights, sheet, GEMM_COPIES)


def best_share(points: Points, sheet: Sheet) -> float:
    """The share of HBM bandwidth that the best twentieth of large reads (256 MB and more) exceeds."""
    shape, seconds = arrays(points)
    size = decode_work(*shape)[1]
    large = size >= _LARGE_BYTES
    return float(np.percentile(size[large] / seconds[large], _BEST) / sheet.hbm_bytes_per_s)


def cache_of(kind: str, points: Points, sheet: Sheet) -> Cache:
    """The cache as a table of decode attention shows it.

    Its rate is what the best twentieth of the reads exceeds that fit in it and fill a quarter of it and more, less the table's
    shortest time. Where none of them is faster than the data sheet's memory nothing shows that they came from the cache: all
    seconds are taken as streamed.
    """
    shape, seconds = arrays(points)
    size, capacity, least = decode_work(*shape)[1], CACHE_BYTES[kind], seconds.min()
    held = (size >= capacity / 4) & (size <= capacity) & (seconds > least)
    shown = held.any() and (size[held] / seconds[held]).max() > sheet.hbm_bytes_per_s
    return Cache(
        size_bytes=capacity,
        bytes_per_s=float(np.percentile(size[held] / (seconds[held] - least), _BEST)) if shown else None,
        hbm_share=best_share(points, sheet),
    )


def unmeasured_cache(kind: str, seen: Mapping[str, Cache], source: str) -> Cache:
    """The cache of a kind as if it had no table: its own bytes, the rate of all other kinds that show one (geometric mean), and
    the share of memory bandwidth of the kind it is likened to."""
    rates = [c.bytes_per_s for k, c in seen.items() if k != kind and c.bytes_per_s is not None]
    rate = float(np.exp(np.mean(np.log(rates)))) if rates else None
    return Cache(size_bytes=CACHE_BYTES[kind], bytes_per_s=rate, hbm_share=seen[source].hbm_share)


def arrays(points: Points) -> tuple[Array, Array]:
    """(coordinates x shapes, seconds), shapes ascending."""
    shapes = sorted(points)
    return np.array(shapes, dtype=float).T, np.array([points[s] for s in shapes])


def streamed_decode(points: Points, cache: Cache, sheet: Sheet) -> dict[Shape, float]:
    """Decode attention as a step runs it, by shape: seconds with the key-value cache from memory."""
    shape, seconds = arrays(points)
    return dict(zip(sorted(points), (seconds + cache.decode_saved_s(shape, sheet)).tolist(), strict=True))


def streamed_gemm(points: Points, width: int, cache: Cache, sheet: Sheet) -> dict[Shape, float]:
    """Products as a step runs them, by shape: seconds with weights of `width` bytes an element from memory.

    Only what is faster than the floor and memory together was read from the cache: some kernels, those of one row on L40S among
    them, stream weights that would fit.
    """
    shape, seconds = arrays(points)
    size = gemm_work(shape[0], shape[1], shape[2], width)[1]
    memory = seconds.min() + size / cache.reached(sheet).hbm_bytes_per_s
    saved = np.where(seconds < memory, cache.gemm_saved_s(shape, width, sheet), 0.0)
    return dict(zip(sorted(points), (seconds + saved).tolist(), strict=True))
