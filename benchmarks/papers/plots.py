"""Ranges as an SVG: what we model as a bar, what the paper prints as a red mark or span, on a logarithmic axis."""

import math
from collections.abc import Sequence
from html import escape

from planner.record import record

LEFT, WIDTH, ROW = 380, 420, 20
OURS, PAPER, BEST = "#1b6ca8", "#d1495b", "#3a7d44"


@record
class Bar:
    """One claim."""

    label: str
    low: float
    middle: float
    high: float
    paper: tuple[float, float]  # equal where the paper prints one value
    mark: float | None = None  # a third figure: our reading of the paper's own rates


def drawn(title: str, middle: str, bars: Sequence[Bar], mark: str = "") -> str:
    """An SVG of all bars; `middle` and `mark` name what the tick and the diamond are."""
    values = [v for b in bars for v in (b.low, b.high, *b.paper)]
    low, high = min(values, default=1.0) / 1.1, max(values, default=2.0) * 1.1
    span = math.log(high / low)

    def x(value: float) -> float:
        return LEFT + WIDTH * math.log(value / low) / span

    out = [f'<text x="10" y="20" font-weight="bold">{escape(title)}</text>']
    bottom = 62 + ROW * len(bars)
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low <= t <= high]
    for t in ticks:
        out.append(f'<path d="M{x(t):.1f} 50V{bottom}" stroke="{"#888" if t == 1 else "#ddd"}"/>')
        out.append(f'<text x="{x(t):.1f}" y="{bottom + 14}" text-anchor="middle" fill="#555">{t:g}x</text>')
    out += _legend(middle, mark)
    for i, b in enumerate(bars):
        y = 64 + ROW * i
        out.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{escape(b.label)}</text>')
        out.append(
            f'<path d="M{x(b.low):.1f} {y}H{max(x(b.high), x(b.low) + 1):.1f}" stroke="{OURS}" stroke-width="8" opacity="0.35"/>'
        )
        out.append(f'<path d="M{x(b.middle):.1f} {y - 6}V{y + 6}" stroke="{OURS}" stroke-width="3"/>')
        if b.paper[0] < b.paper[1]:
            out.append(f'<path d="M{x(b.paper[0]):.1f} {y}H{x(b.paper[1]):.1f}" stroke="{PAPER}" stroke-width="3"/>')
        else:
            out.append(f'<circle cx="{x(b.paper[0]):.1f}" cy="{y}" r="4" fill="{PAPER}"/>')
        if b.mark is not None and low <= b.mark <= high:
            c = x(b.mark)
            shape = f"M{c - 5:.1f} {y}L{c:.1f} {y - 5}L{c + 5:.1f} {y}L{c:.1f} {y + 5}Z"
            out.append(f'<path d="{shape}" fill="none" stroke="{BEST}" stroke-width="2"/>')
    size = f"0 0 {LEFT + WIDTH + 30} {bottom + 24}"
    body = "\n".join(out)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" font-family="sans-serif" font-size="12">\n'
        f'<rect width="{LEFT + WIDTH + 30}" height="{bottom + 24}" fill="#fff"/>\n{body}\n</svg>\n'
    )


def _legend(middle: str, mark: str) -> list[str]:
    words = [(OURS, f"modelled: range, and {middle}"), (PAPER, "the paper")]
    if mark:
        words.append((BEST, mark))
    at, out = 10, []
    for colour, word in words:
        out.append(f'<text x="{at}" y="40" fill="{colour}">{escape(word)}</text>')
        at += 30 + 7 * len(word)
    return out
