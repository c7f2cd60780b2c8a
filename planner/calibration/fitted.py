"""Curves of a kind with the points that were measured on the user's own cards."""

from collections.abc import Callable, Sequence

import numpy as np

from planner.calibration.curves import Collective, Curves, Sheet, collective
from planner.calibration.grid import Array, Correction, correction
from planner.calibration.records import Calibration, DecodePoint, KindTables
from planner.calibration.shipped import REFERENCE, curves_of, shipped
from planner.cluster import DeviceKind
from planner.record import replace

_HEAD_DIM = 128  # of the shipped tables of attention
_NO_GPU = frozenset({"host-cpu"})


def curves_with(kind: DeviceKind, calibration: Calibration | None) -> Curves | None:
    """Curves of a kind at its own datasheet, corrected by the points of `calibration` where it has the kind.

    None for a name that is neither in the catalogue nor calibrated: the assumptions hold. A calibrated name that the catalogue
    lacks starts from the reference kinds. Simulated and paced points are points too; their label stays in the provenance.
    """
    kind = kind.undivided()  # kernels of parts are those of the card, for a share of its time (`planner.cost.rates`)
    base = curves_of(kind.base, kind.peak_flops, kind.hbm_bytes_per_s)
    tables = calibration.of(kind.base) if calibration is not None and kind.base not in _NO_GPU else None
    if tables is None or (base is None and not (tables.gemm or tables.prefill or tables.decode)):
        return base
    if base is None:
        sheet = Sheet(peak_flops=kind.peak_flops, hbm_bytes_per_s=kind.hbm_bytes_per_s)
        base = Curves(sources=tuple(shipped(n) for n in REFERENCE), sheets={"bf16": sheet}, own=False)
    return corrected(base, tables)


def corrected(base: Curves, tables: KindTables) -> Curves:
    """The curves through the measured points; the host's collectives take the place of the table's, one by one."""
    fixes = {d: _gemm_fix(base, tables, d) for d in base.sheets}
    fixes["decode"] = _fix(
        [_decode_shape(p) for p in tables.decode if p.dtype != "fp32"],
        [p.seconds for p in tables.decode if p.dtype != "fp32"],
        base.decode_s,
    )
    fixes["prefill"] = _fix(
        [(p.batch, p.tokens, p.heads * p.head_dim / _HEAD_DIM) for p in tables.prefill],
        [p.seconds for p in tables.prefill],
        base.prefill_s,
    )
    measured = _collectives(tables)
    kept = {**(base.sources[0].collectives if base.own else {}), **measured}
    return replace(
        base,
        sources=(replace(base.sources[0], collectives=kept), *base.sources[1:]),
        own=base.own or bool(measured),
        fixes={k: v for k, v in fixes.items() if v is not None},
    )


def _decode_shape(p: DecodePoint) -> tuple[float, ...]:
    width = p.head_dim / _HEAD_DIM * {"fp8": 0.5}.get(p.dtype, 1.0)
    return (p.batch, p.context, p.kv_heads * width, p.heads / p.kv_heads)


def _gemm_fix(base: Curves, tables: KindTables, dtype: str) -> Correction | None:
    points = [p for p in tables.gemm if p.dtype == dtype]
    return _fix(
        [(p.m, p.n, p.k) for p in points],
        [p.seconds for p in points],
        lambda m, n, k: base.gemm_s(m, n, k, dtype),
    )


def _fix(
    shapes: Sequence[Sequence[float]], seconds: Sequence[float], predict: Callable[..., Array]
) -> Correction | None:
    if not shapes:
        return None
    return correction(shapes, seconds, predict(*np.array(shapes, dtype=float).T))


def _collectives(tables: KindTables) -> dict[tuple[str, int], Collective]:
    """Curves of the collectives measured inside one machine; the engine's all-reduce is that of the trainer unless both were."""
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for p in tables.collectives:
        if p.nodes == 1:
            found.setdefault((p.op, p.ranks), []).append((p.size_bytes, p.seconds))
    out = {key: collective([s for s, _ in v], [t for _, t in v]) for key, v in found.items()}
    engine = {("engine_all_reduce", ranks): c for (op, ranks), c in out.items() if op == "all_reduce"}
    return {**out, **engine}
