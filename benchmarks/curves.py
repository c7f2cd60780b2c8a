"""`python -m benchmarks.curves [RAW_FOLDER]`: write planner/calibration/data/*.json anew from the measured tables.

RAW_FOLDER holds aiconfigurator's tables as CSV (default: ../shared/data/planner beside the checkout); their source and
licence stand in planner/calibration/data/README.md. Only figures are kept, thinned to a grid, and what the last-level cache hid in
them added (`benchmarks.caches`).
"""

import csv
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.caches import Cache, Points, Shape, cache_of, streamed_decode, streamed_gemm
from planner.calibration.curves import (
    Collective,
    KindCurves,
    Sheet,
    Table,
    collective,
    decode_work,
    gemm_work,
    prefill_work,
    roof,
)
from planner.calibration.grid import Grid, filled

ROOT = Path(__file__).resolve().parents[1]
RAW = ROOT.parent / "shared" / "data" / "planner"
DATA = ROOT / "planner" / "calibration" / "data"
KINDS: Mapping[str, str] = {
    "a100_sxm": "A100-80",
    "h100_sxm": "H100",
    "h200_sxm": "H200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX-PRO-6000",
}
GEMM_AXES = (
    (1, 4, 16, 32, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096, 8192),
    (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 65536),
    (64, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 65536),
)
DECODE_AXES = (
    (1, 4, 16, 64, 256, 1024),
    tuple(2**i for i in (5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17)),
    (1, 2, 4, 8),
    (1, 4, 8, 16),
)
PREFILL_AXES = ((1, 4, 16, 64), (32, 128, 512, 1024, 2048, 4096, 8192, 16384), (1, 4, 8, 16, 32, 64))


def rows(raw: Path, name: str, only: Iterable[str] = KINDS) -> Iterator[Mapping[str, str]]:
    """Rows of a table, of some of its kinds only."""
    kept = frozenset(only)
    with (raw / name).open(newline="") as file:
        yield from (r for r in csv.DictReader(file) if r["gpu"] in kept)


def gemm_points(raw: Path, dtype: str, only: Iterable[str] = KINDS) -> dict[str, dict[Shape, float]]:
    """Seconds by (m, n, k), by kind."""
    out: dict[str, dict[Shape, float]] = defaultdict(dict)
    for r in rows(raw, f"aic_gemm_{dtype}.csv", only):
        out[KINDS[r["gpu"]]][int(r["m"]), int(r["n"]), int(r["k"])] = float(r["latency_ms"]) / 1e3
    return out


def decode_points(raw: Path, only: Iterable[str] = KINDS) -> dict[str, dict[Shape, float]]:
    """Seconds by (batch, context, key-value heads, query heads a key-value head), whole ones only."""
    out: dict[str, dict[Shape, float]] = defaultdict(dict)
    for r in rows(raw, "aic_attention_generation.csv", only):
        heads, kv = int(r["num_heads"]), int(r["num_key_value_heads"])
        shape = (int(r["batch_size"]), int(r["step"]) + 1, kv, heads // kv)
        out[KINDS[r["gpu"]]][shape] = float(r["latency_ms"]) / 1e3
    return out


def prefill_points(raw: Path, only: Iterable[str] = KINDS) -> dict[str, dict[Shape, float]]:
    """Seconds by (batch, tokens, heads); the median over key-value heads, which matter little."""
    found: dict[str, dict[Shape, list[float]]] = defaultdict(lambda: defaultdict(list))
    for r in rows(raw, "aic_attention_context.csv", only):
        shape = (int(r["batch_size"]), int(r["isl"]), int(r["num_heads"]))
        found[KINDS[r["gpu"]]][shape].append(float(r["latency_ms"]) / 1e3)
    return {g: {s: float(np.median(v)) for s, v in shapes.items()} for g, shapes in found.items()}


def collectives(raw: Path, only: Iterable[str] = KINDS) -> dict[str, dict[tuple[str, int], Collective]]:
    """Curves by (op, ranks): NCCL's, and the faster of NCCL and the engine's own kernel (`engine_all_reduce`)."""
    found: dict[str, dict[tuple[str, int], list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for r in rows(raw, "aic_nccl.csv", only):
        point = (float(r["message_bytes"]), float(r["latency_ms"]) / 1e3)
        if r["op_name"] in ("all_reduce", "all_gather", "reduce_scatter"):
            found[KINDS[r["gpu"]]][r["op_name"], int(r["num_gpus"])].append(point)
        if r["op_name"] == "all_reduce":
            found[KINDS[r["gpu"]]]["engine_all_reduce", int(r["num_gpus"])].append(point)
    for r in rows(raw, "aic_custom_allreduce.csv", only):
        if r["kernel_source"].endswith("graph"):
            point = (2 * float(r["message_size"]), float(r["latency_ms"]) / 1e3)
            found[KINDS[r["gpu"]]]["engine_all_reduce", int(r["num_gpus"])].append(point)
    return {g: {key: collective(*zip(*_doublings(v), strict=True)) for key, v in of.items()} for g, of in found.items()}


def _doublings(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points at powers of two, of which every host has measured some."""
    return [p for p in points if math.log2(p[0]) % 1 == 0]


def sheets(raw: Path) -> dict[str, dict[str, Sheet]]:
    """Datasheet figures by kind and dtype."""
    out: dict[str, dict[str, Sheet]] = {}
    for r in rows(raw, "aic_gpu_specs.csv"):
        peaks = {"bf16": r["bfloat16_tc_flops"], "fp8": r["fp8_tc_flops"]}
        hbm = float(r["mem_bw"])
        out[KINDS[r["gpu"]]] = {
            d: Sheet(peak_flops=float(p), hbm_bytes_per_s=hbm) for d, p in peaks.items() if p not in ("", None)
        }
    return out


def table(points: Points, axes: Sequence[Sequence[int]], work: Any, sheet: Sheet) -> Table:
    """The slowness at a grid of shapes; `work(*shape)` gives (FLOPs, bytes)."""
    have = [{s[i] for s in points} for i in range(len(axes))]
    axes = [[c for c in a if c in h] for a, h in zip(axes, have, strict=True)]  # a thinned sample lacks some
    floor = min(points.values())
    values = np.full(tuple(len(a) for a in axes), np.nan)
    for at in np.ndindex(*values.shape):
        shape = tuple(a[i] for a, i in zip(axes, at, strict=True))
        if shape in points:
            values[at] = math.log2(points[shape] / (floor + _roof_s(work(*shape), sheet)))
    kept = tuple(np.log2(np.array(a, dtype=float)) for a in axes)
    return Table(floor_s=floor, slowness=Grid(axes=kept, values=filled(values)))


def _roof_s(work: tuple[Any, Any], sheet: Sheet) -> float:
    return float(roof(work[0], work[1], sheet))


def width_of(dtype: str) -> int:
    """Bytes of an operand."""
    return 1 if dtype == "fp8" else 2


def fit_gemm(points: Points, dtype: str, sheet: Sheet, axes: Sequence[Sequence[int]] = GEMM_AXES) -> Table:
    """The table of matrix products."""
    return table(points, axes, lambda m, n, k: gemm_work(m, n, k, width_of(dtype)), sheet)


def caches(decode: Mapping[str, Points], known: Mapping[str, Mapping[str, Sheet]]) -> dict[str, Cache]:
    """What every kind's table of decode attention shows of its cache."""
    return {g: cache_of(g, points, known[g]["bf16"]) for g, points in decode.items()}


def fit(raw: Path, only: Iterable[str] = KINDS) -> dict[str, KindCurves]:
    """Curves of every kind from the raw tables: of streamed seconds (`benchmarks.caches`)."""
    only = tuple(only)
    known = sheets(raw)
    products = {d: gemm_points(raw, d, only) for d in ("bf16", "fp8")}
    decode, prefill, ops = decode_points(raw, only), prefill_points(raw, only), collectives(raw, only)
    seen = caches(decode, known)
    return {
        g: KindCurves(
            kind=g,
            sheets=known[g],
            gemm={
                d: fit_gemm(streamed_gemm(p[g], width_of(d), seen[g], known[g][d]), d, known[g][d])
                for d, p in products.items()
                if g in p
            },
            decode=table(
                streamed_decode(decode[g], seen[g], known[g]["bf16"]), DECODE_AXES, decode_work, known[g]["bf16"]
            ),
            prefill=table(prefill[g], PREFILL_AXES, prefill_work, known[g]["bf16"]),
            hbm_share=seen[g].hbm_share,
            collectives=ops[g],
        )
        for g in (KINDS[o] for o in only)
    }


def main() -> int:
    """Write the files."""
    from planner.calibration.shipped import encode_curves

    raw = Path(sys.argv[1]) if len(sys.argv) > 1 else RAW
    if not raw.is_dir():
        print(f"{raw}: no such folder\nhint: name the folder of the measured tables", file=sys.stderr)
        return 2
    for kind, curves in fit(raw).items():
        path = DATA / f"{kind}.json"
        path.write_text(json.dumps(encode_curves(curves), separators=(",", ":")) + "\n")
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
