"""The flow view: curves, the token identity, the ledger's states, what was wasted and why."""

from collections.abc import Sequence
from typing import Literal

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.curves import bar, chart
from hexctl.tui.view.text import Line, Span, Tone, beside, clean, clip, line, pad, rule, width_of
from runtime.api.wire import FlowView, Snapshot

AXIS = 7  # cells of a chart's axis
# Life of a sample, in order; states that a daemon adds later come after these.
LEDGER_ORDER = ("PENDING", "LEASED", "SUSPENDED", "DONE", "RESERVED", "APPLIED", "DEAD_LETTER")
NOT_SHOWN = {"time_unix_s", "step"}  # said elsewhere on the screen
METRIC_NAMES = {
    "response_tokens_mean": "answer tokens",
    "truncated_share": "truncated",
    "kl_behaviour": "KL to behaviour",
    "engine_trainer_logprob_diff": "engine − trainer logp",
    "grad_norm": "gradient norm",
    "clip_fraction": "clipped",
}


_TONES: dict[str, tuple[Tone, Tone, Tone]] = {
    "curve": ("curve", "curve_mid", "curve_low"),
    "curve_2": ("curve_2", "curve_2_mid", "curve_2_low"),
    "curve_3": ("curve_3", "curve_3_mid", "curve_3_low"),
}


def curve(
    title: str, values: Sequence[float], now: str, width: int, rows: int, *, low: float | None = 0.0, high: float | None = None,
    tone: Literal["curve", "curve_2", "curve_3"] = "curve", decimals: int = 2, note: str = "",
) -> tuple[Line, ...]:  # fmt: skip
    """A titled chart, `rows` + 1 lines high. The newest value stands in the title; no values, one line that says so."""
    head_note = line(Span(note + "  " if note else "", "dim"), Span(now, "strong"))
    out = [rule(title, width, head_note)]
    if len(values) < 2:
        return (*out, line(Span("  no points yet", "faint")), *([()] * (rows - 1)))
    drawn, bottom, top = chart(values, width - AXIS, rows, low=low, high=high, tones=_TONES[tone])
    for i, row in enumerate(drawn):
        mark = _mark(top, decimals) if i == 0 else _mark(bottom, decimals) if i == rows - 1 else ""
        out.append(line(Span(mark.rjust(AXIS - 1) + " ", "dim"), *row))
    return tuple(out)


def _mark(value: float, decimals: int) -> str:
    """A figure of a chart's axis, in the cells it has there."""
    text = n.grouped(value, decimals)
    return text if len(text) < AXIS else n.compact(value)


def flow_lines(s: Snapshot, width: int, height: int, ctx: Context) -> tuple[Line, ...]:
    """The whole view, at most `width` cells wide; it may be higher than `height` (the panel scrolls)."""
    if s.flow is None:
        return (line(Span("The data flow has not answered yet.", "dim")),)
    inner = width - 2
    if width < 100:
        rows = 3
        blocks = [_reward(s, inner, rows), _staleness(s, inner, rows), _queue(s, inner, rows), _rates(s, inner, rows)]
        out = [*_identity(s.flow, inner)]
        for block in blocks:
            out += block
        out += [*_ledger(s.flow, inner), *_wasted(s.flow, inner), *_metrics(s.flow, inner)]
        return tuple((Span(" "), *clip(x, inner)) for x in out)
    half = (inner - 3) // 2
    rest = inner - 3 - half
    rows = max(3, min(9, (height - 20) // 2))
    top = beside(_reward(s, half, rows), _staleness(s, rest, rows), half, 3)
    middle = beside(_rates(s, half, rows), _queue(s, rest, rows), half, 3)
    left = (*_ledger(s.flow, half), (), *_wasted(s.flow, half))
    below = beside(left, _metrics(s.flow, rest), half, 3)
    out = [*top, (), *middle, (), *_identity(s.flow, inner), (), *below]
    return tuple((Span(" "), *clip(x, inner)) for x in out)


def _reward(s: Snapshot, width: int, rows: int) -> tuple[Line, ...]:
    assert s.flow is not None
    return curve("reward", s.series.get("reward", ()), n.grouped(s.flow.reward_mean, 3), width, rows, high=1.0, tone="curve_3",
                 note=f"{s.flow.steps_done:,} steps")  # fmt: skip


def _staleness(s: Snapshot, width: int, rows: int) -> tuple[Line, ...]:
    assert s.flow is not None
    f = s.flow
    note = f"p95 {n.grouped(f.staleness_p95)}  max {n.grouped(f.staleness_max)}  bound {f.eta}"
    return curve("staleness", s.series.get("staleness_mean", ()), n.grouped(f.staleness_mean, 2), width, rows,
                 high=float(max(1, f.eta)), decimals=1, note=note)  # fmt: skip


def _queue(s: Snapshot, width: int, rows: int) -> tuple[Line, ...]:
    assert s.flow is not None
    return curve("queue, batches", s.series.get("queue_batches", ()), n.grouped(s.flow.queue_batches, 1), width, rows, decimals=1,
                 note=f"{s.flow.queue_groups} groups")  # fmt: skip


def _rates(s: Snapshot, width: int, rows: int) -> tuple[Line, ...]:
    assert s.flow is not None
    note = f"generated {n.rate(s.flow.generated_tokens_per_s)}  trained"
    return curve("tokens/s", s.series.get("tokens_per_s", ()), n.rate(s.flow.tokens_per_s), width, rows, tone="curve_2", decimals=0,
                 note=note)  # fmt: skip


def _identity(f: FlowView, width: int) -> tuple[Line, ...]:
    """generated = trained + masked + in flight + wasted, and whether it holds."""
    wasted = sum(f.wasted_tokens.values())
    parts: list[tuple[str, int, Tone]] = [
        ("trained", f.trained_tokens, "train"),
        ("masked", f.masked_tokens, "warn"),
        ("in flight", f.in_flight_tokens, "rollout"),
        ("wasted", wasted, "fault"),
    ]
    off = f.generated_tokens - sum(p[1] for p in parts)
    verdict = Span("identity holds ✓", "good") if off == 0 else Span(f"identity off by {off:+,} tokens", "fault")
    spans: list[Span] = [Span(f"{f.generated_tokens:,}", "strong"), Span(" generated =", "dim")]
    for i, (name, count, tone) in enumerate(parts):
        spans += [Span(" + " if i else " ", "dim"), Span(f"{count:,}", tone), Span(f" {name}", "dim")]
    sums = tuple(spans)
    shown = sums if width_of(sums) <= width else _short_identity(f, parts)
    shown = clip(shown, width)
    spanning = n.percent(f.spans_two_versions_share)
    notes = line(
        Span("redone ", "dim"),
        Span(f"{f.redone_tokens:,}"),
        Span("   samples over two versions ", "dim"),
        Span(spanning),
        *_energy(f),
    )
    return (rule("tokens", width, (verdict,)), shown, notes)


def _energy(f: FlowView) -> Line:
    """Energy per million trained tokens, where every device says its power."""
    if f.power_w is None or f.kwh_per_mtok is None:
        return ()
    return (
        Span("   energy ", "dim"),
        Span(f"{n.grouped(f.kwh_per_mtok, 3)} kWh/Mtok"),
        Span(f" at {n.grouped(f.power_w)} W", "dim"),
    )


def _short_identity(f: FlowView, parts: Sequence[tuple[str, int, Tone]]) -> Line:
    spans: list[Span] = [Span(n.compact(f.generated_tokens), "strong"), Span(" made =", "dim")]
    for i, (name, count, tone) in enumerate(parts):
        spans += [Span(" + " if i else " ", "dim"), Span(n.compact(count), tone), Span(f" {name}", "dim")]
    return tuple(spans)


def _table(rows: Sequence[tuple[str, int, Tone]], width: int) -> tuple[Line, ...]:
    total = sum(r[1] for r in rows)
    name_width = max([11, *(len(r[0]) for r in rows)]) + 1
    count_width = max([9, *(len(f"{r[1]:,}") for r in rows)])
    out = []
    for name, count, tone in rows:
        share = count / total if total else None
        room = max(4, width - name_width - count_width - 9)
        head = pad(line(Span(clean(name).lower().replace("_", " "), "text")), name_width)
        figures = Span(f"{count:>{count_width},}", "text" if count else "faint")
        out.append((*head, figures, Span(n.percent(share).rjust(8), "dim"), Span(" "), *bar(share, room, tone)))
    return tuple(out)


def _ledger(f: FlowView, width: int) -> tuple[Line, ...]:
    order = [*LEDGER_ORDER, *sorted(set(f.samples_by_state) - set(LEDGER_ORDER))]
    tones: dict[str, Tone] = {"APPLIED": "train", "LEASED": "rollout", "SUSPENDED": "warn", "DEAD_LETTER": "fault"}
    rows = [(k, f.samples_by_state[k], tones.get(k, "load_2")) for k in order if k in f.samples_by_state]
    body = _table(rows, width) or (line(Span("no samples yet", "faint")),)
    return (rule("samples in the ledger", width), *body)


def _wasted(f: FlowView, width: int) -> tuple[Line, ...]:
    total = sum(f.wasted_tokens.values())
    share = total / f.generated_tokens if f.generated_tokens else None
    note = line(Span(n.percent(share), "strong"), Span(" of generated", "dim"))
    reasons: list[tuple[str, int, Tone]] = [
        (k, v, "fault") for k, v in sorted(f.wasted_tokens.items(), key=lambda x: -x[1]) if v
    ]
    return (rule("tokens wasted, by reason", width, note), *(_table(reasons, width) or (line(Span("none", "dim")),)))


def _metrics(f: FlowView, width: int) -> tuple[Line, ...]:
    """The newest line of metrics.jsonl, in two columns where there is room."""
    head = rule("newest step", width)
    if not f.metrics:
        return (
            head,
            line(Span("no step finished yet" if not f.steps_done else "no figures of a step", "faint")),
        )
    each = width // 2 if width >= 56 else width
    cells = []
    for name in sorted(set(f.metrics) - NOT_SHOWN):
        label = METRIC_NAMES.get(name, clean(name).replace("_", " "))
        figure = n.figure(f.metrics[name])
        cells.append(
            (*pad(line(Span(label, "dim")), each - 13), *pad(line(Span(figure, "strong")), 10, "right"), Span("   "))
        )
    if each == width:
        return (head, *cells)
    half = (len(cells) + 1) // 2
    return (head, *beside(cells[:half], cells[half:], each, 0))
