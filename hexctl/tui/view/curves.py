"""Bars, sparks and charts in block characters."""

import math
from collections.abc import Sequence

from hexctl.tui.view.glyphs import EIGHTHS_RIGHT, EIGHTHS_UP
from hexctl.tui.view.text import Line, Span, Tone


def bar(share: float | None, cells: int, tone: Tone | None = None) -> Line:
    """A horizontal bar of `cells` cells filled to `share` of 1; unknown is an empty bar of spaces.

    Without a tone of its own the fill tells little, some and much load apart.
    """
    if share is None or not math.isfinite(share):
        return (Span(" " * cells),)
    eighths = round(min(1.0, max(0.0, share)) * cells * 8)
    if share > 0 and eighths == 0:
        eighths = 1
    full, part = divmod(eighths, 8)
    fill = "█" * full + (EIGHTHS_RIGHT[part] if part else "")
    load: Tone = "load_1" if share < 0.5 else "load_2" if share < 0.9 else "load_3"
    return (Span(fill, tone or load), Span(" " * (cells - len(fill))))


def resample(values: Sequence[float], points: int) -> list[float]:
    """At most `points` values: the means of equal stretches; NaN and infinities are left out."""
    finite = [v for v in values if math.isfinite(v)]
    if len(finite) <= points:
        return finite
    out = []
    for i in range(points):
        part = finite[i * len(finite) // points : (i + 1) * len(finite) // points]
        out.append(sum(part) / len(part))
    return out


def spark(values: Sequence[float], cells: int, low: float | None = None, high: float | None = None) -> str:
    """A curve one cell high in `cells` cells, newest at the right; no values, no curve (spaces)."""
    points = resample(values, cells)
    if not points:
        return " " * cells
    bottom, top = _range(points, low, high)
    return "".join(EIGHTHS_UP[_level(v, bottom, top, 8)] for v in points).rjust(cells)


def chart(
    values: Sequence[float], cells: int, rows: int, *, low: float | None, high: float | None, tones: Sequence[Tone]
) -> tuple[list[Line], float, float]:
    """A filled curve, `rows` lines from the top down, and the range (bottom, top) it was drawn in.

    `tones`: of the rows, from the top down; equal stretches of rows share one.
    """
    points = resample(values, cells)
    if not points:
        return [(Span(" " * cells),)] * rows, low or 0.0, high or 0.0
    bottom, top = _range(points, low, high)
    heights = [_level(v, bottom, top, rows * 8) for v in points]
    out: list[Line] = []
    for row in range(rows):
        base = (rows - 1 - row) * 8
        text = "".join(EIGHTHS_UP[min(8, max(0, h - base))] for h in heights)
        out.append((Span(text.rjust(cells), tones[row * len(tones) // rows]),))
    return out, bottom, top


def _range(points: Sequence[float], low: float | None, high: float | None) -> tuple[float, float]:
    bottom = min(points) if low is None else min(low, *points)
    top = max(points) if high is None else max(high, *points)
    return (bottom, top) if top > bottom else (bottom - 1.0, top + 1.0) if low is None else (bottom, bottom + 1.0)


def _level(value: float, bottom: float, top: float, levels: int) -> int:
    """1..levels: even the lowest point leaves a mark."""
    return 1 + round((value - bottom) / (top - bottom) * (levels - 1))
