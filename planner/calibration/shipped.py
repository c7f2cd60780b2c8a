"""The curves that come with the package: `planner/calibration/data/<kind>.json`, and which kind is likened to which.

A table is stored as whole numbers: a hundred times log2 of the slowness, so within 0.35 % of what was measured there.
Sizes of collectives are stored by powers of two, seconds in nanoseconds. The README beside the files names source and licence.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

import numpy as np

from planner.calibration.curves import Collective, Curves, KindCurves, Sheet, Table
from planner.calibration.grid import Grid

MEASURED = ("A100-80", "H100", "H200", "L40S", "RTX-PRO-6000")
REFERENCE = ("A100-80", "H100")
"""Kinds whose geometric mean stands for a kind of another family: it predicts H200 and L40S products better than either."""

LIKENED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        **{k: (k,) for k in MEASURED},
        **dict.fromkeys(("A100-40", "A100-80-PCIe"), ("A100-80",)),  # the same chip
        **dict.fromkeys(("H100-PCIe", "H800", "H20"), ("H100",)),  # the same architecture
        **dict.fromkeys(("L4", "RTX-4090"), ("L40S",)),
        **dict.fromkeys(("B200", "A30", "A10G", "A6000", "RTX-3090", "V100-16", "T4"), REFERENCE),
    }
)
_SCALE = 100.0


def encode_curves(curves: KindCurves) -> dict[str, Any]:
    """Plain values for a JSON file."""
    return {
        "kind": curves.kind,
        "sheets": {d: [s.peak_flops, s.hbm_bytes_per_s] for d, s in curves.sheets.items()},
        "hbm_share": round(curves.hbm_share, 4),
        "gemm": {d: _table(t) for d, t in curves.gemm.items()},
        "decode": _table(curves.decode),
        "prefill": _table(curves.prefill),
        "collectives": [
            [op, ranks, np.round(c.log_bytes / np.log(2)).astype(int).tolist(), _nanoseconds(c)]
            for (op, ranks), c in sorted(curves.collectives.items())
        ],
    }


def _nanoseconds(curve: Collective) -> list[int]:
    out: list[int] = np.round(np.exp(curve.log_seconds) * 1e9).astype(int).tolist()
    return out


def _table(table: Table) -> dict[str, Any]:
    return {
        "floor_s": table.floor_s,
        "axes": [np.round(np.exp2(a)).astype(int).tolist() for a in table.slowness.axes],
        "values": np.round(table.slowness.values * _SCALE).astype(int).ravel().tolist(),
    }


def decode_curves(value: Mapping[str, Any]) -> KindCurves:
    """What `encode_curves` made."""
    return KindCurves(
        kind=value["kind"],
        sheets={d: Sheet(peak_flops=p, hbm_bytes_per_s=b) for d, (p, b) in value["sheets"].items()},
        gemm={d: _read(t) for d, t in value["gemm"].items()},
        decode=_read(value["decode"]),
        prefill=_read(value["prefill"]),
        hbm_share=value["hbm_share"],
        collectives={(op, ranks): _collective(sizes, ns) for op, ranks, sizes, ns in value["collectives"]},
    )


def _collective(log2_bytes: Sequence[int], nanoseconds: Sequence[int]) -> Collective:
    return Collective(
        log_bytes=np.array(log2_bytes) * np.log(2), log_seconds=np.log(np.array(nanoseconds, dtype=float) / 1e9)
    )


def _read(value: Mapping[str, Any]) -> Table:
    axes = tuple(np.log2(np.array(a, dtype=float)) for a in value["axes"])
    values = np.array(value["values"], dtype=float).reshape([len(a) for a in axes]) / _SCALE
    return Table(floor_s=value["floor_s"], slowness=Grid(axes=axes, values=values))


@functools.cache  # files of the package do not change while it runs
def shipped(kind: str) -> KindCurves:
    """The measured curves of one of the kinds `MEASURED`."""
    text = resources.files("planner.calibration").joinpath("data", f"{kind}.json").read_text()
    return decode_curves(json.loads(text))


def curves_of(kind: str, peak_flops: float, hbm_bytes_per_s: float) -> Curves | None:
    """Curves for a kind of the catalogue at the datasheet given (bf16); None for any other name.

    A card with eight-bit units is taken to have twice the bf16 peak with them.
    """
    names = LIKENED.get(kind)
    if names is None:
        return None
    sources = tuple(shipped(n) for n in names)
    sheets = {"bf16": Sheet(peak_flops=peak_flops, hbm_bytes_per_s=hbm_bytes_per_s)}
    if all("fp8" in s.gemm for s in sources):
        sheets["fp8"] = Sheet(peak_flops=2 * peak_flops, hbm_bytes_per_s=hbm_bytes_per_s)
    return Curves(sources=sources, sheets=sheets, own=names == (kind,))
