"""Toned text: what every view row is made of.

A `Span` is text with a tone (a name that a theme turns into a style); a `Line` is spans from left to right.
Text from the daemon passes through `clean`, and nothing here or in the widgets ever parses markup.
"""

import unicodedata
from collections.abc import Iterable
from typing import Literal, NamedTuple, get_args

from rich.cells import cell_len, set_cell_size

Tone = Literal[
    "text",  # ordinary words and figures
    "dim",  # units, labels of little weight
    "faint",  # the dash of "not known", tracks, rules
    "strong",  # the figure to look at
    "brand",
    "label",  # WAITS, STALE, column heads
    "tab",  # the open view
    "key",  # a key to press
    "train",
    "rollout",
    "idle",
    "load_1",  # fill of bars: little, some, much load
    "load_2",
    "load_3",
    "spark",
    "curve",  # rows of a chart: the top third, the middle, the bottom; three colours
    "curve_mid",
    "curve_low",
    "curve_2",
    "curve_2_mid",
    "curve_2_low",
    "curve_3",
    "curve_3_mid",
    "curve_3_low",
    "good",
    "accent",  # in transition: starting, draining, proposed
    "warn",  # throttled, stale, cordoned
    "fault",  # faults only
    "cursor",  # the row under the cursor (its style is laid over the row's own)
    "banner",
    "outdated",  # every value while the daemon does not answer
]
TONES: tuple[Tone, ...] = get_args(Tone)


class Span(NamedTuple):
    """A piece of text and its tone."""

    text: str
    tone: Tone = "text"


Line = tuple[Span, ...]
Align = Literal["left", "right"]


def clean(text: str) -> str:
    """Text of the daemon made harmless: one line, no control or format characters, nothing of zero width."""
    if text.isascii() and text.isprintable():
        return text
    out = []
    for ch in text:
        if ch in "\n\t\r":
            out.append(" ")
        elif unicodedata.category(ch)[0] in "CM" or cell_len(ch) == 0:
            out.append("?")
        else:
            out.append(ch)
    return "".join(out)


def line(*parts: Span | str) -> Line:
    """A line of spans and plain strings."""
    return tuple(p if isinstance(p, Span) else Span(p) for p in parts)


def plain(spans: Line) -> str:
    """The line's text alone."""
    return "".join(s.text for s in spans)


def width_of(spans: Line) -> int:
    """Terminal cells a line takes."""
    return sum(cell_len(s.text) for s in spans)


def clip(spans: Line, width: int) -> Line:
    """The line cut to at most `width` cells; an ellipsis stands where something was cut off."""
    if width <= 0:
        return ()
    if width_of(spans) <= width:
        return spans
    out: list[Span] = []
    left = width - 1
    for span in spans:
        cells = cell_len(span.text)
        if cells > left:
            out.append(Span(set_cell_size(span.text, left) + "…", span.tone))
            return tuple(out)
        out.append(span)
        left -= cells
    return tuple(out)


def pad(spans: Line, width: int, align: Align = "left") -> Line:
    """The line in exactly `width` cells: cut, or filled with spaces."""
    spans = clip(spans, width)
    room = width - width_of(spans)
    if room <= 0:
        return spans
    blank = Span(" " * room)
    return (*spans, blank) if align == "left" else (blank, *spans)


def beside(left: Iterable[Line], right: Iterable[Line], left_width: int, gap: int = 2) -> tuple[Line, ...]:
    """Two blocks of lines side by side; the left one in `left_width` cells."""
    a, b = list(left), list(right)
    rows = max(len(a), len(b))
    a += [()] * (rows - len(a))
    b += [()] * (rows - len(b))
    return tuple((*pad(x, left_width), Span(" " * gap), *y) for x, y in zip(a, b, strict=True))


def rule(title: str, width: int, note: Line = ()) -> Line:
    """A titled rule over the whole width, with an optional note at its right end."""
    head = line(Span("─ ", "faint"), Span(title, "label"), Span(" ", "faint"))
    tail = (Span(" ", "faint"), *note, Span(" ─", "faint")) if note else ()
    fill = width - width_of(head) - width_of(tail)
    return clip((*head, Span("─" * max(0, fill), "faint"), *tail), width)


def wrap(text: str, width: int, tone: Tone = "text") -> tuple[Line, ...]:
    """Words of `text` in lines of at most `width` cells; a word longer than a line is cut."""
    lines: list[Line] = []
    current = ""
    for word in clean(text).split():
        candidate = f"{current} {word}" if current else word
        if cell_len(candidate) <= width or not current:
            current = candidate
        else:
            lines.append(clip(line(Span(current, tone)), width))
            current = word
    if current:
        lines.append(clip(line(Span(current, tone)), width))
    return tuple(lines)
