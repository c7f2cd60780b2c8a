"""What a profile found, in few figures, and the tables of several nodes as one calibration. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from planner.calibration import Calibration, KindTables
from runtime.profile.measure import Measured

SLOWER = 0.10  # a node whose kernels are slower than its peers' by more is named


def merged_tables(measured: Sequence[Measured]) -> tuple[Calibration, tuple[str, ...]]:
    """One table a kind: of the node that shows most points, the first among equals. Notes name nodes that differ by more
    than a tenth in what they compute."""
    best: dict[str, tuple[Measured, KindTables]] = {}
    for m in measured:
        for t in m.tables:
            if t.kind not in best or points_of(t) > points_of(best[t.kind][1]):
                best[t.kind] = (m, t)
    notes: list[str] = []
    for m in measured:
        for t in m.tables:
            whose, chosen = best[t.kind]
            mine, theirs = best_flops(t), best_flops(chosen)
            if whose is not m and mine is not None and theirs is not None and abs(mine / theirs - 1) > SLOWER:
                notes.append(
                    f"{t.kind} of {m.host} computes at {mine / theirs:.2f} of that of {whose.host}, which is kept"
                )
    return Calibration(kinds=tuple(t for _, t in best.values())), tuple(notes)


def points_of(t: KindTables) -> int:
    """Points of all tables."""
    tables = (t.gemm, t.prefill, t.decode, t.collectives, t.hbm_copy, t.links, t.engine, t.trainer, t.updates)
    return sum(len(x) for x in tables)


def best_flops(t: KindTables) -> float | None:
    """FLOP/s of the fastest matrix product."""
    return max((2.0 * p.m * p.n * p.k / p.seconds for p in t.gemm), default=None)


def kind_summary(t: KindTables) -> Mapping[str, Any]:
    """The figures people look at first. Bytes/s of a collective: the tensor's size over the time."""
    reduces = [c for c in t.collectives if c.op == "all_reduce"]
    best = max(reduces, key=lambda c: c.size_bytes / c.seconds, default=None)
    links = {p.path: max(x.bytes_per_s for x in t.links if x.path == p.path) for p in t.links}
    return {
        "kind": t.kind,
        "how": t.provenance.how,
        "device": t.provenance.device,
        "points": points_of(t),
        "gemm_flops": best_flops(t),
        "copy_bytes_per_s": max((c.bytes_per_s for c in t.hbm_copy), default=None),
        "decode_attention_bytes_per_s": max((d.kv_bytes / d.seconds for d in t.decode), default=None),
        "all_reduce_bytes_per_s": None if best is None else best.size_bytes / best.seconds,
        "all_reduce_ranks": None if best is None else best.ranks,
        "links_bytes_per_s": links,
        "engine": [
            {
                "phase": e.phase,
                "model": e.model,
                "running": e.running,
                "held": e.held,
                "tokens_per_s": e.tokens_per_s,
                "slowest": e.slowest,
            }
            for e in t.engine
        ],
        "trainer": [
            {
                "model": r.model,
                "tokens_per_s": r.tokens_per_s,
                "samples": r.samples,
                "rows": r.rows,
                "step_s": r.step_s,
                "recompute": r.recompute,
                "attention": r.attention,
                "compiled": r.compiled,
                "checkpoint_s": r.checkpoint_s,
            }
            for r in t.trainer
        ],
        "updates": [{"path": u.path, "model": u.model, "engine": u.engine, "swap_s": u.swap_s} for u in t.updates],
    }
