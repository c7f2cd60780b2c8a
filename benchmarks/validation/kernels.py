"""Kernel tables: matrix products, attention, collectives.

Curves fitted on A100 and H100 predict the kinds that were held out, as a kind without a table is predicted; within a kind,
every second number of rows (every second context) is left out of the table and predicted from the others. RTX PRO 6000 is
among the held-out kinds and was looked at once, when everything else was done.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.curves import (
    DECODE_AXES,
    GEMM_AXES,
    KINDS,
    Points,
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
from planner.calibration.shipped import REFERENCE

HELD_OUT_BARS = {"H200": 0.10, "L40S": 0.15}
WITHIN_BAR, DECODE_BAR = 0.06, 0.15
LARGE_KV_BYTES = 64e6
FITTED = "+".join(REFERENCE)


def _axes(points: Points, axes: Sequence[Sequence[int]], drop: int | None = None) -> list[list[int]]:
    """The coordinates of a grid that the points have; every second one of axis `drop` left out, its ends kept."""
    have = [{s[i] for s in points} for i in range(len(axes))]
    out = [[c for c in a if c in h] for a, h in zip(axes, have, strict=True)]
    if drop is not None:
        every = sorted(have[drop])
        out[drop] = sorted({*every[::2], every[-1]})
    return out


def _split(points: Points) -> tuple[np.ndarray, np.ndarray]:
    shapes = sorted(points)
    return np.array(shapes, dtype=float).T, np.array([points[s] for s in shapes])


def _as_unmeasured(kind: str, curves: Mapping[str, KindCurves], sources: Sequence[str]) -> Curves:
    """A kind as if it had no table, at its own datasheet."""
    return Curves(sources=tuple(curves[s] for s in sources), sheets=curves[kind].sheets, own=False)


def gemm(raw: Path, curves: Mapping[str, KindCurves], only: Sequence[str]) -> list[Figure]:
    """bf16 and fp8 products with n, k >= 1024."""
    out: list[Figure] = []
    known = sheets(raw)
    for dtype in ("bf16", "fp8"):
        for kind, points in gemm_points(raw, dtype, only).items():
            large = {s: t for s, t in points.items() if min(s[1:]) >= 1024}
            shape, seconds = _split(large)
            if kind not in REFERENCE and dtype == "bf16":
                bar = HELD_OUT_BARS.get(kind)
                got = _as_unmeasured(kind, curves, REFERENCE).gemm_s(shape[0], shape[1], shape[2], dtype)
                out.append(figure("GEMM, held-out kind", kind, got, seconds, fitted=FITTED, median=bar))
                for name, rows in (("m <= 64", shape[0] <= 64), ("m >= 512", shape[0] >= 512)):
                    part = f"{kind}, {name}"
                    out.append(figure("GEMM, held-out kind", part, got[rows], seconds[rows], fitted=FITTED))
            axes = _axes(points, GEMM_AXES, drop=0)
            own = fit_gemm(points, dtype, known[kind][dtype], axes)
            rows = ~np.isin(shape[0], axes[0])
            flops, size = gemm_work(shape[0], shape[1], shape[2], width_of(dtype))
            got = own.seconds(roof(flops, size, known[kind][dtype]), *shape)[rows]
            name = "GEMM, held-out m within a kind"
            out.append(figure(name, f"{kind} {dtype}", got, seconds[rows], fitted="its other rows", median=WITHIN_BAR))
    return out


def decode(raw: Path, curves: Mapping[str, KindCurves], only: Sequence[str]) -> list[Figure]:
    """Attention of one layer for one new token a sample."""
    out: list[Figure] = []
    known = sheets(raw)
    for kind, points in decode_points(raw, only).items():
        shape, seconds = _split(points)
        large = decode_work(*shape)[1] >= LARGE_KV_BYTES
        if kind not in REFERENCE:
            got = _as_unmeasured(kind, curves, REFERENCE).decode_s(*shape)
            out += _sized("Decode attention, held-out kind", kind, got, seconds, large, fitted=FITTED)
        if kind == "H200":
            got = _as_unmeasured(kind, curves, ("H100",)).decode_s(*shape)
            out += _sized("Decode attention, held-out kind", f"{kind} as H100", got, seconds, large, fitted="H100")
        axes = _axes(points, DECODE_AXES, drop=1)
        own = table(points, axes, decode_work, known[kind]["bf16"])
        got = own.seconds(roof(*decode_work(*shape), known[kind]["bf16"]), *shape)
        rows = ~np.isin(shape[1], axes[1])
        name = "Decode attention, held-out contexts within a kind"
        out += _sized(name, kind, got[rows], seconds[rows], large[rows], fitted="its other contexts")
        got = curves[kind].decode.seconds(roof(*decode_work(*shape), known[kind]["bf16"]), *shape)
        out += _sized(
            "Decode attention, shipped table", kind, got, seconds, large, fitted="a grid of its rows", bar=None
        )
    return out


def _sized(
    name: str,
    kind: str,
    got: np.ndarray,
    seconds: np.ndarray,
    large: np.ndarray,
    *,
    fitted: str,
    bar: float | None = DECODE_BAR,
) -> list[Figure]:
    return [
        figure(name, f"{kind}, >= 64 MB", got[large], seconds[large], fitted=fitted, median=bar),
        figure(name, f"{kind}, smaller", got[~large], seconds[~large], fitted=fitted),
    ]


def prefill(raw: Path, curves: Mapping[str, KindCurves], only: Sequence[str]) -> list[Figure]:
    """Causal attention of one layer over prompts; 10 GFLOP and more."""
    out: list[Figure] = []
    for kind, points in prefill_points(raw, only).items():
        shape, seconds = _split(points)
        flops, size = prefill_work(*shape)
        rows = flops >= 1e10
        if kind not in REFERENCE:
            got = _as_unmeasured(kind, curves, REFERENCE).prefill_s(*shape)
            out.append(figure("Prefill attention, held-out kind", kind, got[rows], seconds[rows], fitted=FITTED))
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
    curves = fit(raw, only)
    return [
        *gemm(raw, curves, only),
        *decode(raw, curves, only),
        *prefill(raw, curves, only),
        *links(raw, only),
    ]
