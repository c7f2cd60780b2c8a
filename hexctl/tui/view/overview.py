"""What fills the room under a short fleet table: curves on the left, moves and events on the right."""

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.events import event_lines, event_spans
from hexctl.tui.view.flow import curve
from hexctl.tui.view.text import Line, Span, beside, clean, clip, line, rule, width_of
from runtime.api.wire import Snapshot

LEAST_HEIGHT = 6


def overview_lines(s: Snapshot, width: int, height: int, ctx: Context) -> tuple[Line, ...]:
    """Exactly at most `height` lines of at most `width` cells; nothing below six lines of room."""
    if height < LEAST_HEIGHT:
        return ()
    inner = width - 2
    if inner < 100:
        return tuple((Span(" "), *x) for x in ((), *_happenings(s, inner, height - 1, ctx)))[:height]
    left = (inner - 3) * 2 // 5
    out = ((), *beside(_curves(s, left, height - 1), _happenings(s, inner - left - 3, height - 1, ctx), left, 3))
    return tuple((Span(" "), *x) for x in out)[:height]


def _curves(s: Snapshot, width: int, height: int) -> tuple[Line, ...]:
    f = s.flow
    wanted = [
        ("reward", "reward", n.grouped(f.reward_mean if f else None, 3), 1.0, 2, "curve_3"),
        ("trained tok/s", "tokens_per_s", n.rate(f.tokens_per_s if f else None), None, 0, "curve_2"),
        (
            "staleness",
            "staleness_mean",
            n.grouped(f.staleness_mean if f else None, 2),
            float(max(1, f.eta)) if f else None,
            1,
            "curve",
        ),
        ("queue, batches", "queue_batches", n.grouped(f.queue_batches if f else None, 1), None, 1, "curve"),
    ]
    count = max(1, min(len(wanted), height // 5))
    rows = max(2, min(8, height // count - 2))
    out: list[Line] = []
    for title, name, now, high, decimals, tone in wanted[:count]:
        out += curve(title, s.series.get(name, ()), now, width, rows, high=high, decimals=decimals, tone=tone)  # type: ignore[arg-type]
        out.append(())
    return tuple(out[:-1])


def _happenings(s: Snapshot, width: int, height: int, ctx: Context) -> tuple[Line, ...]:
    m = s.migration
    out: list[Line] = []
    if m.running or m.waiting or m.blocked:
        out.append(rule("moves", width))
        out += [clip(line(Span("◐ ", "accent"), Span(clean(x))), width) for x in m.running[:4]]
        out += [clip(line(Span("◌ ", "dim"), Span(clean(x), "dim")), width) for x in m.waiting[:3]]
        if m.blocked:
            out.append(clip(line(Span("✕ blocked ", "fault"), Span(clean(m.blocked), "warn")), width))
        out.append(())
    if s.plan is not None and height >= 12:
        out.append(
            rule(f"plan r{s.plan.rev}", width, line(Span(clean(s.plan.trigger), "dim")) if s.plan.trigger else ())
        )
        out.append(clip(line(Span(clean(s.plan.headline))), width))
        if s.proposal is not None:
            gain = s.proposal.gain_share
            told = f"{gain * 100:+.1f} % tok/s".replace("-", n.MINUS) if gain is not None else "gain not known"
            head = line(Span(f"r{s.proposal.plan.rev} proposed: ", "accent"), Span(f"{told}: "))
            look = line(Span("   "), Span("3", "key"), Span(" to look", "dim"))
            words = clip(
                line(Span(clean(s.proposal.plan.headline), "dim")), max(8, width - width_of(head) - width_of(look))
            )
            out.append(clip((*head, *words, *look), width))
        out.append(())
    out.append(rule("events", width))
    room = max(1, height - len(out))
    rows = [event_spans(e, width, kind_too=False)[1:] for e in event_lines(s, ctx)[:room]]
    return (*out, *(rows or [line(Span("none yet", "faint"))]))
