"""The events view and the "why" line."""

from collections.abc import Sequence

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.fleet import matches
from hexctl.tui.view.text import Line, Span, Tone, clean, clip, line, pad
from planner.record import record
from runtime.api.wire import EventRow, Snapshot

LEVELS: dict[str, tuple[str, Tone]] = {"info": ("·", "dim"), "warning": ("▲", "warn"), "error": ("✕", "fault")}
IMPORTANT_FOR_S = 60.0  # a warning or error leads the why line for this long


@record
class EventLine:
    """One event, ready to draw."""

    seq: int
    time: str
    age_s: float
    level: str
    kind: str
    subject: str
    message: str


def event_lines(s: Snapshot, ctx: Context, words: str = "") -> tuple[EventLine, ...]:
    """Events that hold every word of `words`, newest first."""
    rows = (event_line(e, s, ctx) for e in reversed(s.events))
    return tuple(r for r in rows if matches(words, f"{r.level} {r.kind} {r.subject} {r.message}"))


def event_line(e: EventRow, s: Snapshot, ctx: Context) -> EventLine:
    """The view row of one event."""
    return EventLine(
        seq=e.seq,
        time=n.time_of_day(e.at_s, ctx.utc_offset_s),
        age_s=s.at_s - e.at_s + ctx.elapsed_s,
        level=e.level,
        kind=clean(e.kind),
        subject=clean(e.subject),
        message=clean(e.message),
    )


def event_spans(e: EventLine, width: int, *, cursor: bool = False, kind_too: bool = True) -> Line:
    """One event in one line."""
    glyph, tone = LEVELS.get(e.level, ("?", "warn"))
    body: Tone = "text" if e.level == "info" else tone
    head = line(Span("▸" if cursor else " ", "key"), Span(f"{e.time} ", "dim"), *pad(line(Span(n.age(e.age_s), "faint")), 7, "right"),
                Span(f" {glyph} ", tone))  # fmt: skip
    kind = pad(line(Span(e.kind, "dim")), 18) if kind_too and width >= 100 else ()
    return clip((*head, *kind, Span(" " if kind else ""), Span(e.message, body)), width)


def why_line(s: Snapshot, width: int, ctx: Context) -> Line:
    """What happened last that matters, and what follows from it: the newest warning or error of the last minute leads,
    else the newest event; then what came after it."""
    head = line(Span(" why", "label"), Span(" ─ ", "faint"))
    parts: list[Span] = []
    if s.migration.blocked:
        parts += [Span("blocked: ", "fault"), Span(clean(s.migration.blocked), "warn"), Span(" · ", "faint")]
    parts += _told(_leading(s.events, s.at_s), ctx)
    if not s.events:
        parts += [Span(clean(x), "text") for x in s.migration.running[:1]] or [Span("nothing has happened yet", "dim")]
    return clip((*head, *parts), width)


def _leading(events: Sequence[EventRow], now_s: float) -> tuple[EventRow, ...]:
    for i in range(len(events) - 1, -1, -1):
        if events[i].level != "info" and now_s - events[i].at_s <= IMPORTANT_FOR_S:
            return (events[i], *reversed(events[i + 1 :]))
    return tuple(reversed(events[-3:]))


def _told(events: Sequence[EventRow], ctx: Context) -> list[Span]:
    spans: list[Span] = []
    for i, e in enumerate(events[:4]):
        glyph, tone = LEVELS.get(e.level, ("?", "warn"))
        if i == 0:
            spans.append(Span(f"{n.time_of_day(e.at_s, ctx.utc_offset_s)} ", "dim"))
        else:
            spans.append(Span(" · ", "faint"))
        if e.level != "info":
            spans.append(Span(f"{glyph} ", tone))
        spans.append(Span(clean(e.message), "text" if e.level == "info" else tone))
    return spans
