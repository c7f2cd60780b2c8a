"""The lines that are always on top: which run, who waits for whom, how stale, how fast, how much."""

from collections.abc import Sequence

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.curves import spark
from hexctl.tui.view.text import Line, Span, Tone, clean, clip, line, width_of
from planner.record import record
from runtime.api.wire import FlowView, Snapshot

STATES: dict[str, tuple[str, Tone]] = {
    "starting": ("◌", "accent"),
    "running": ("●", "good"),
    "stopping": ("◐", "accent"),
    "finished": ("○", "dim"),
    "failed": ("✕", "fault"),
}
WIDE = 110  # from here on the header says things in full
SPARK = 7


@record
class Group:
    """Things said together, in ever shorter ways; the group with the lowest `keep` is shortened first."""

    keep: int
    ways: tuple[Line, ...]


def fit(groups: Sequence[Group], width: int, gap: int = 3) -> Line:
    """The groups from left to right in `width` cells, each said as fully as the room allows."""
    chosen = [0] * len(groups)
    while True:
        shown = [g.ways[i] for g, i in zip(groups, chosen, strict=True) if g.ways[i]]
        total = sum(width_of(s) for s in shown) + gap * max(0, len(shown) - 1)
        open_ = [i for i, g in enumerate(groups) if chosen[i] < len(g.ways) - 1]
        if total <= width or not open_:
            break
        chosen[min(open_, key=lambda i: groups[i].keep)] += 1
    out: list[Span] = []
    for spans in shown:
        if out:
            out.append(Span(" " * gap))
        out.extend(spans)
    return clip(tuple(out), width)


def header_lines(s: Snapshot, width: int, ctx: Context) -> tuple[Line, Line, Line]:
    """Three lines of at most `width` cells."""
    return (_identity(s, width), *_figures(s, width, ctx))


def summary_line(s: Snapshot, width: int, ctx: Context) -> Line:
    """All in one line, for terminals too small for the dashboard."""
    groups = [Group(keep=9, ways=(_name(s),)), Group(keep=8, ways=(_state(s), _state(s)[:1]))]
    if s.flow is not None:
        groups += [
            Group(keep=6, ways=(_stale(s.flow, ctx, short=True), ())),
            Group(keep=5, ways=(line(n.tokens_per_s(s.flow.tokens_per_s)), ())),
            Group(keep=7, ways=(line(Span(n.dollars_per(s.flow.usd_per_mtok, "Mtok"), "strong")), ())),
        ]
    return fit(groups, width, gap=2)


def _name(s: Snapshot) -> Line:
    return line(Span(clean(s.run.id), "strong"))


def _state(s: Snapshot) -> Line:
    glyph, tone = STATES.get(s.run.state, ("?", "warn"))
    return line(Span(f"{glyph} {s.run.state}", tone), Span(f" {n.clock(s.at_s - s.run.started_at_s)}", "text"))


def _label(s: Snapshot) -> tuple[Line, ...]:
    """What the fleet is; of a simulated one also whose seconds its rates are of, since the clock beside it is real."""
    if s.run.simulation_speed is None:
        return (line(Span(s.run.label, "warn" if s.run.label == "simulated" else "accent")),)
    short = line(Span(f"{s.run.label} at {s.run.simulation_speed:,.4g}x", "warn"))
    return (line(*short, Span(" real time", "dim")), short)


def _identity(s: Snapshot, width: int) -> Line:
    plan = _plan(s)
    count, name = len(s.devices), _name(s)
    groups = [
        Group(keep=3, ways=(line(Span("hexctl", "brand")), ())),
        Group(keep=9, ways=(name, clip(name, 30), clip(name, 16))),
        Group(keep=8, ways=(_state(s),)),
        Group(keep=1, ways=_label(s)),
        Group(keep=5, ways=(*plan, ())),
        Group(keep=4, ways=(line(Span(f"{count} device{'' if count == 1 else 's'}", "dim")), ())),
        Group(keep=2, ways=(_resident(s), ())),
    ]
    hint = line(Span("?", "key"), Span(" help  ", "dim"), Span(":", "key"), Span(" palette", "dim"))
    reserved = width_of(hint) + 4 if width >= WIDE else 1
    left = fit(groups, width - 1 - reserved)
    room = width - 2 - width_of(left) - width_of(hint)
    tail = (Span(" " * room), *hint) if width >= WIDE else ()
    return line(Span(" "), *left, *tail)


def _resident(s: Snapshot) -> Line:
    return () if s.resident_bytes is None else line(Span(f"{n.byte_size(s.resident_bytes)} resident", "dim"))


def _plan(s: Snapshot) -> tuple[Line, ...]:
    if s.plan is None:
        return (line(Span("no plan: infeasible", "fault")),) if s.infeasible else (line(Span("no plan yet", "dim")),)
    mode = "frozen" if s.run.frozen else s.run.consent
    head = line(Span("plan ", "dim"), Span(f"r{s.plan.rev}", "strong"))
    full = line(*head, Span(f" · {mode} · gap {n.percent(s.plan.gap)}", "dim"))
    if s.proposal is not None:
        full = line(*full, Span(f" · r{s.proposal.plan.rev} proposed", "accent"))
        return (full, line(*head, Span(f" r{s.proposal.plan.rev} proposed", "accent")), head)
    return (full, head)


def _figures(s: Snapshot, width: int, ctx: Context) -> tuple[Line, Line]:
    if s.flow is None:
        words = (
            "the data flow has not answered yet"
            if s.flow_age_s is None
            else f"the data flow last answered {n.age(s.flow_age_s)} ago"
        )
        return line(Span(f" {words}", "dim")), ()
    f = s.flow
    old = (s.flow_age_s or 0.0) + ctx.elapsed_s
    age = Group(keep=9, ways=(line(Span(f"flow {n.age(old)} old", "warn")),)) if old > 5 else None
    wide = width >= WIDE
    waits = Group(keep=8, ways=(_waits(f, full=True), _waits(f, full=False)))
    stale = Group(keep=7, ways=(_stale(f, ctx), _stale(f, ctx, short=True)))
    cost = Group(keep=6, ways=(_cost(s, spark_too=True), _cost(s, spark_too=False)))
    rates = Group(keep=5, ways=(_rates(f, full=True), _rates(f, full=False)))
    queue = Group(keep=4, ways=(_queue(s, spark_too=True), _queue(s, spark_too=False), ()))
    reward = Group(keep=6, ways=(_reward(s, spark_too=True), _reward(s, spark_too=False)))
    rest = [
        Group(keep=3, ways=(_waste(f), ())),
        Group(keep=7, ways=(_weights(s), _weights(s)[:1])),
    ]
    first, second = (
        ([waits, stale, queue], [rates, cost, reward, *rest])
        if wide
        else ([waits, stale, cost], [rates, reward, queue, *rest])
    )
    if age is not None:
        first.insert(0, age)
    gap = 4 if width >= 130 else 3 if wide else 2
    return (Span(" "), *fit(first, width - 2, gap)), (Span(" "), *fit(second, width - 2, gap))


def _share(share: float, blocks: bool) -> Span:
    return Span(n.percent(share, 0), "strong" if blocks else "text")


def _waits(f: FlowView, *, full: bool) -> Line:
    trainer = _share(f.trainer_wait_share, f.trainer_wait_share > max(0.01, f.admission_wait_share))
    rollout = _share(f.admission_wait_share, f.admission_wait_share > max(0.01, f.trainer_wait_share))
    label = Span("WAITS ", "label")
    if full:
        return line(label, Span("trainer ", "train"), trainer, Span(" for data   ", "dim"), Span("rollout ", "rollout"),
                    rollout, Span(" for admission", "dim"))  # fmt: skip
    return line(label, Span("train ", "train"), trainer, Span(" roll ", "rollout"), rollout)


def _stale(f: FlowView, ctx: Context, *, short: bool = False) -> Line:
    eta = f"{'eta' if ctx.ascii else 'η'} {f.eta}"
    mean = Span(n.grouped(f.staleness_mean, 1), "strong")
    p95, top = n.grouped(f.staleness_p95), n.grouped(f.staleness_max)
    over = f.staleness_max is not None and f.staleness_max > f.eta
    tone: Tone = "fault" if over else "text"
    if short:
        return line(Span("STALE ", "label"), mean, Span(f"/{p95}/"), Span(top, tone), Span(f" of {eta}", "dim"))
    return line(Span("STALE ", "label"), Span("mean ", "dim"), mean, Span("  p95 ", "dim"), Span(p95), Span("  max ", "dim"),
                Span(top, tone), Span(f" of {eta}", "dim"))  # fmt: skip


def _queue(s: Snapshot, *, spark_too: bool) -> Line:
    assert s.flow is not None
    head = line(Span("QUEUE ", "label"), Span(n.grouped(s.flow.queue_batches, 1), "strong"), Span(" batches", "dim"))
    return line(*head, *_spark(s, "queue_batches", low=0.0)) if spark_too else head


def _rates(f: FlowView, *, full: bool) -> Line:
    label = Span("RATE ", "label")
    made, trained = Span(n.rate(f.generated_tokens_per_s), "strong"), Span(n.rate(f.tokens_per_s), "strong")
    if full:
        return line(label, Span("generated ", "rollout"), made, Span(" tok/s   ", "dim"), Span("trained ", "train"), trained,
                    Span(" tok/s", "dim"))  # fmt: skip
    return line(label, Span("gen ", "rollout"), made, Span(" train ", "train"), trained, Span(" tok/s", "dim"))


def _cost(s: Snapshot, *, spark_too: bool) -> Line:
    assert s.flow is not None
    f = s.flow
    label = Span("COST ", "label")
    if f.usd_per_h is None and f.usd_per_mtok is None:
        return line(label, Span(n.NA, "faint"), Span(" no price", "faint"))
    head = line(
        label, Span(n.dollars_per(f.usd_per_h, "h")), Span(" "), Span(n.dollars_per(f.usd_per_mtok, "Mtok"), "strong")
    )
    return line(*head, *_spark(s, "usd_per_mtok")) if spark_too else head


def _reward(s: Snapshot, *, spark_too: bool) -> Line:
    assert s.flow is not None
    value = s.flow.reward_mean
    head = line(Span("REWARD ", "label"), Span(n.grouped(value, 2), "faint" if value is None else "strong"))
    return line(*head, *_spark(s, "reward", low=0.0, high=1.0)) if spark_too else head


def _spark(s: Snapshot, name: str, low: float | None = None, high: float | None = None) -> Line:
    values = s.series.get(name, ())
    return line(Span(" "), Span(spark(values, SPARK, low=low, high=high), "spark")) if len(values) > 1 else ()


def _waste(f: FlowView) -> Line:
    wasted = sum(f.wasted_tokens.values())
    share = wasted / f.generated_tokens if f.generated_tokens else None
    return line(Span("WASTE ", "label"), Span(n.percent(share), "faint" if share is None else "text"))


def _weights(s: Snapshot) -> Line:
    assert s.flow is not None
    digests = [d.digest for d in s.devices if d.digest and d.version == s.flow.version]
    head = line(Span(f"v{s.flow.version}", "strong"))
    return line(*head, Span(f" {clean(digests[0])[:4]}", "dim")) if digests else head
