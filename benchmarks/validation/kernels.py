"""Kernel tables: matrix products, attention, collectives.

Curves fitted on A100 and H100 predict the kinds that were held out, as a kind without a table is predicted; within a kind,
every second number of rows (every second context) is left out of the table and predicted from the others. RTX PRO 6000 is
among the held-out kinds; nothing is fitted on it.

The tables are of repeated kernels and the curves of streamed ones (`benchmarks.caches`), so a prediction of a table takes off what
the cache saves. A held-out kind's cache has the bytes of its data sheet and the rate of the other kinds' caches.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.caches import (
    CACHE_BYTES,
    Cache,
    Points,
    arrays,
    cache_of,
    streamed_decode,
    unmeasured_cache,
)
from benchmarks.curves import (
    DECODE_AXES,
    GEMM_AXES,
    KINDS,
    caches,
    collectives,
    decode_points,
    fit,
    fit_gemm,
    gemm_points,
    prefill_points,
    sheets,
    table,
    width_of,
)
from benchmarks.validation.figures import Figure, figure
from planner.calibration.curves import Curves, KindCurves, collective, decode_work, gemm_work, prefill_work, roof
from planner.calibration.grid import Array
from planner.calibration.shipped import REFERENCE

HELD_OUT_BARS = {"H200": 0.10, "L40S": 0.15}
WITHIN_BAR, DECODE_BAR = 0.06, 0.15
LARGE_KV_BYTES = 64e6


def _axes(points: Points, axes: Sequence[Sequence[int]], drop: int | None = None) -> list[list[int]]:
    """The coordinates of a grid that the points have; every second one of axis `drop` left out, its ends kept."""
    have = [{s[i] for s in points} for i in range(len(axes))]
    out = [[c for c in a if c in h] for a, h in zip(axes, have, strict=True)]
    if drop is not None:
        every = sorted(have[drop])
        out[drop] = sorted({*every[::2], every[-1]})
    return out


def _as_unmeasured(kind: str, curves: Mapping[str, KindCurves], sources: Sequence[str]) -> Curves:
    """A kind as if it had no table, at its own datasheet."""
    return Curves(sources=tuple(curves[s] for s in sources), sheets=curves[kind].sheets, own=False)


def _fitted(kind: str, seen: Mapping[str, Cache], sources: Sequence[str]) -> str:
    """What a prediction of a held-out kind has seen."""
    shown = [k for k, c in seen.items() if k != kind and c.bytes_per_s is not None]
    return "+".join(sources) + (f"; cache rate of {'+'.join(shown)}" if shown else "")


def _repeated(
    kind: str,
    curves: Mapping[str, KindCurves],
    seen: Mapping[str, Cache],
    sources: Sequence[str],
    seconds: Callable[[Curves, Cache], Array],
) -> Array:
    """Seconds of a kind's repeated kernels as if it had no table: the geometric mean of what each source says; `seconds` takes
    off what the cache saves."""
    found = [np.log(seconds(_as_unmeasured(kind, curves, (s,)), unmeasured_cache(kind, seen, s))) for s in sources]
    out: Array = np.exp(np.mean(found, axis=0))
    return out


def gemm(raw: Path, curves: Mapping[str, KindCurves], seen: Mapping[str, Cache], only: Sequence[str]) -> list[Figure]:
    """bf16 and fp8 products with n, k >= 1024."""
    out: list[Figure] = []
    known = sheets(raw)
    for dtype in ("bf16", "fp8"):
        for kind, points in gemm_points(raw, dtype, only).items():
            shape, seconds = arrays({s: t for s, t in points.items() if min(s[1:]) >= 1024})
            sheet = known[kind][dtype]
            if kind not in REFERENCE and dtype == "bf16":
                out += _unmeasured_gemm(kind, curves, seen, shape, seconds)
            axes = _axes(points, GEMM_AXES, drop=0)
            # As measured: whether weights fit into the cache depends on n and k alone.
            own = fit_gemm(points, dtype, sheet, axes)
            rows = ~np.isin(shape[0], axes[0])
            flops, size = gemm_work(shape[0], shape[1], shape[2], width_of(dtype))
            got = own.seconds(roof(flops, size, sheet), *shape)[rows]
            name = "GEMM, held-out m within a kind"
            out.append(figure(name, f"{kind} {dtype}", got, seconds[rows], fitted="its other rows", median=WITHIN_BAR))
    return out


def _unmeasured_gemm(
    kind: str, curves: Mapping[str, KindCurves], seen: Mapping[str, Cache], shape: Array, seconds: Array
) -> list[Figure]:
    """A kind's bf16 products from the reference kinds."""

    def repeated(source: Curves, cache: Cache) -> Array:
        return source.gemm_s(*shape) - cache.gemm_saved_s(shape, width_of("bf16"), source.sheets["bf16"])

    got = _repeated(kind, curves, seen, REFERENCE, repeated)
    name, bar, fitted = "GEMM, held-out kind", HELD_OUT_BARS.get(kind), _fitted(kind, seen, REFERENCE)
    out = [figure(name, kind, got, seconds, fitted=fitted, median=bar)]
    for part, rows in (("m <= 64", shape[0] <= 64), ("m >= 512", shape[0] >= 512)):
        out.append(figure(name, f"{kind}, {part}", got[rows], seconds[rows], fitted=fitted))
    return out


def decode(raw: Path, curves: Mapping[str, KindCurves], seen: Mapping[str, Cache], only: Sequence[str]) -> list[Figure]:
    """Attention of one layer for one new token a sample."""
    out: list[Figure] = []
    known = sheets(raw)
    for kind, points in decode_points(raw, only).items():
        shape, seconds = arrays(points)
        size, sheet = decode_work(*shape)[1], known[kind]["bf16"]

        def repeated(source: Curves, cache: Cache, shape: Array = shape) -> Array:
            return source.decode_s(*shape) - cache.decode_saved_s(shape, source.sheets["bf16"])

        name = "Decode attention, held-out kind"
        if kind not in REFERENCE:
            got, fitted = _repeated(kind, curves, seen, REFERENCE, repeated), _fitted(kind, seen, REFERENCE)
            out += _sized(name, kind, got, seconds, size, fitted=fitted)
        if kind == "H200":
            got, fitted = _repeated(kind, curves, seen, ("H100",), repeated), _fitted(kind, seen, ("H100",))
            out += _sized(name, f"{kind} as H100", got, seconds, size, fitted=fitted, capacity=CACHE_BYTES[kind])
        axes = _axes(points, DECODE_AXES, drop=1)
        kept = cache_of(kind, {s: t for s, t in points.items() if s[1] in axes[1]}, sheet)
        own = table(streamed_decode(points, kept, sheet), axes, decode_work, sheet)
        got = own.seconds(roof(*decode_work(*shape), sheet), *shape) - kept.decode_saved_s(shape, sheet)
        rows = ~np.isin(shape[1], axes[1])
        name = "Decode attention, held-out contexts within a kind"
        out += _sized(name, kind, got[rows], seconds[rows], size[rows], fitted="its other contexts")
        got = curves[kind].decode.seconds(roof(*decode_work(*shape), sheet), *shape)
        got = got - seen[kind].decode_saved_s(shape, sheet)
        out += _sized(
            "Decode attention, shipped table", kind, got, seconds, size, fitted="a grid of its rows", bar=None
        )
    return out


def _sized(
    name: str,
    kind: str,
    got: Array,
    seconds: Array,
    size: Array,
    *,
    fitted: str,
    bar: float | None = DECODE_BAR,
    capacity: float | None = None,
) -> list[Figure]:
    """Figures of reads by size: large ones, of them those that no cache of the kind (of `capacity` bytes) holds, and small ones."""
    large, beyond = size >= LARGE_KV_BYTES, size > max(LARGE_KV_BYTES, capacity or CACHE_BYTES[kind])
    parts = [(f"{kind}, >= 64 MB", large, bar), (f"{kind}, smaller", ~large, None)]
    if (beyond != large).any():
        parts.insert(1, (f"{kind}, beyond its cache", beyond, None))
    return [figure(name, part, got[rows], seconds[rows], fitted=fitted, median=b) for part, rows, b in parts]


def prefill(raw: Path, curves: Mapping[str, KindCurves], only: Sequence[str]) -> list[Figure]:
    """Causal attention of one layer over prompts; 10 GFLOP and more."""
    out: list[Figure] = []
    for kind, points in prefill_points(raw, only).items():
        shape, seconds = arrays(points)
        flops, size = prefill_work(*shape)
        rows = flops >= 1e10
        if kind not in REFERENCE:
            got = _as_unmeasured(kind, curves, REFERENCE).prefill_s(*shape)
            out.append(
                figure("Prefill attention, held-out kind", kind, got[rows], seconds[rows], fitted="+".join(REFERENCE))
            )
        got = curves[kind].prefill.seconds(roof(flops, size, curves[kind].sheets["bf16"]), *shape)
        name = "Prefill attention, shipped table"
        out.append(figure(name, kind, got[rows], seconds[rows], fitted="a grid of its rows"))
    return out


def links(raw: Path, only: Sequence[str]) -> list[Figure]:
    """Collectives inside a host: every second size left out; and what carrying them over from H100 would cost."""
    out: list[Figure] = []
    curves = collectives(raw, only)
    for kind, ops in curves.items():
        within: list[tuple[float, float]] = []
        carried: list[tuple[float, float]] = []
        for key, curve in ops.items():
            sizes, seconds = np.exp(curve.log_bytes), np.exp(curve.log_seconds)
            kept = np.arange(len(sizes)) % 2 == 0
            kept[-1] = True
            part = collective(sizes[kept].tolist(), seconds[kept].tolist())
            within += zip(part.seconds(sizes[~kept]).tolist(), seconds[~kept].tolist(), strict=True)
            if kind != "H100" and key in curves.get("H100", {}):
                carried += zip(curves["H100"][key].seconds(sizes).tolist(), seconds.tolist(), strict=True)
        got, measured = np.array(within).T
        out.append(figure("Collectives, held-out sizes", kind, got, measured, fitted="its other sizes"))
        if carried:
            got, measured = np.array(carried).T
            out.append(figure("Collectives, carried over (never done)", kind, got, measured, fitted="H100's host"))
    return out


def run(raw: Path, only: Sequence[str] = tuple(KINDS)) -> list[Figure]:
    """All kernel figures. The curves are fitted here anew, so that a thinned sample stands on its own."""
    curves, seen = fit(raw, only), caches(decode_points(raw, only), sheets(raw))
    return [
        *gemm(raw, curves, seen, only),
        *decode(raw, curves, seen, only),
        *prefill(raw, curves, only),
        *links(raw, only),
    ]
