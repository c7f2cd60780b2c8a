"""Figures and tables as text. Unknown is a dash, never a zero. Pure."""

import math
from collections.abc import Sequence
from typing import Literal

DASH = "—"
Align = Literal["<", ">"]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Columns padded to their widest cell; those in `right` are aligned right."""
    cells = [list(headers), *([clean(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = []
    for row in cells:
        padded = [f"{c:>{w}}" if i in right else f"{c:<{w}}" for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def pairs(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values in two columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {clean(value)}".rstrip() for name, value in rows)


def clean(text: str) -> str:
    """Text of others without control characters: it cannot move the cursor or fake a line."""
    return "".join(c if c.isprintable() else "�" for c in text)


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """1842.4 -> "1,842"."""
    return DASH if value is None else f"{value:,.{digits}f}{unit}"


def share(value: float | None, digits: int = 0) -> str:
    """0.034 -> "3 %"."""
    return DASH if value is None else f"{100 * value:.{digits}f} %"


def money(value: float | None, per: str = "") -> str:
    """0.48 -> "$0.48/Mtok"; small amounts keep two significant digits."""
    if value is None:
        return DASH
    digits = 2 if value == 0 or abs(value) >= 0.1 else 4
    return f"${value:,.{digits}f}{per}"


def duration(value: float | None) -> str:
    """0.0042 -> "4.2 ms", 761 -> "12:41"."""
    if value is None:
        return DASH
    if value < 1:
        return f"{1000 * value:.3g} ms"
    if value < 60:
        return f"{value:.3g} s"
    minutes, s = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{s:02d}" if hours else f"{minutes}:{s:02d}"


def signed(value: float | None) -> str:
    """0.021 -> "+2 %", -0.22 -> "-22 %", nearly nothing, above or below -> "+0 %"."""
    return DASH if value is None or not math.isfinite(value) else f"{round(100 * value):+d} %"


def size(value: float | None) -> str:
    """8e10 -> "80.0 GB"."""
    if value is None:
        return DASH
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.1f} {unit}"
    return f"{value:.0f} B"


def counted(count: int, one: str, many: str) -> str:
    """(1, "process", "processes") -> "1 process"."""
    return f"{count:,} {one if count == 1 else many}"


def devices(names: Sequence[str], limit: int = 4) -> str:
    """A list of devices; a long one is cut and counted."""
    if len(names) <= limit:
        return ", ".join(names)
    return ", ".join(names[: limit - 1]) + f", … {names[-1]} ({len(names)})"
