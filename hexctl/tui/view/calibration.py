"""Predicted beside measured, by device kind and role: what the next plan counts with."""

from rich.cells import cell_len

from hexctl.tui.view import numbers as n
from hexctl.tui.view.text import Line, Span, Tone, clean, line, pad, rule
from runtime.api.wire import CalibrationRow, Snapshot

_TITLES = ("KIND", "ROLE", "MODEL", "MEASURED", "STEP model / meas.", "FACTOR", "SAMPLES", "AGE")
_WIDTHS = (11, 9, 9, 9, 20, 8, 8, 6)


def calibration_lines(s: Snapshot, width: int) -> tuple[Line, ...]:
    """A row a kind and role that was measured; nothing where none was."""
    if not s.calibration:
        return ()
    rows = [tuple(Span(t, "label") for t in _TITLES), *(_cells(r) for r in s.calibration)]
    widths = [max(least, *(cell_len(r[i].text) + 1 for r in rows)) for i, least in enumerate(_WIDTHS)]
    shown = _columns(widths, width)
    heading = line(Span("tok/s a device; the next plan counts with the factor", "dim"))
    table = (tuple(x for i in shown for x in pad(line(r[i]), widths[i])) for r in rows)
    return (rule("calibration", width, heading), *table)


def _columns(widths: list[int], width: int) -> tuple[int, ...]:
    """The columns that fit, by index."""
    for without in ((), (7,), (7, 6), (7, 6, 4)):
        kept = tuple(i for i in range(len(_TITLES)) if i not in without)
        if sum(widths[i] for i in kept) <= width:
            return kept
    return (0, 1, 2, 3, 5)


def _cells(r: CalibrationRow) -> tuple[Span, ...]:
    tone: Tone = "train" if r.role == "train" else "rollout"
    off = abs(r.factor - 1.0) >= 0.2
    return (
        Span(clean(r.kind)),
        Span(r.role, tone),
        Span(n.rate(r.modelled_tokens_per_s), "dim"),
        Span(n.rate(r.measured_tokens_per_s)),
        Span(f"{n.seconds(r.modelled_step_s)} / {n.seconds(r.measured_step_s)}", "dim"),
        Span(f"x {r.factor:.2f}", "warn" if off else "text"),
        Span(n.grouped(r.samples), "dim"),
        Span(n.age(r.age_s), "dim"),
    )
