"""The plan view: in force beside proposed, device by device; predicted beside measured; why; what is moving."""

from collections.abc import Callable

from rich.cells import cell_len

from hexctl.tui.view import numbers as n
from hexctl.tui.view.calibration import calibration_lines
from hexctl.tui.view.context import Context
from hexctl.tui.view.text import Line, Span, Tone, beside, clean, clip, line, pad, rule, width_of, wrap
from planner.record import record
from runtime.api.wire import PlanView, Snapshot

ROLE_TONES: dict[str, Tone] = {"train": "train", "rollout": "rollout", "idle": "idle"}
_SHOWN = {"train": "train", "rollout": "rollout"}


@record
class Change:
    """One device whose part differs between the plan in force and the proposed one."""

    device: str
    now: str
    proposed: str


def part_of(plan: PlanView | None, device_id: str) -> str:
    """What a plan has a device do, in words: "train (DP 2)", "rollout (TP 2)", "idle"."""
    for p in plan.placements if plan is not None else ():
        if device_id in p.devices:
            degrees = " ".join(
                f"{name} {value}" for name, value in (("TP", p.tp), ("PP", p.pp), ("DP", p.dp)) if value > 1
            )
            role = _SHOWN.get(p.role, clean(p.role))
            return f"{role} ({degrees})" if degrees else role
    return "idle"


def changes(s: Snapshot) -> tuple[Change, ...]:
    """Devices that the open proposal would move, in the fleet's order."""
    if s.proposal is None:
        return ()
    out = []
    for d in s.devices:
        now, then = part_of(s.plan, d.id), part_of(s.proposal.plan, d.id)
        if now != then:
            out.append(Change(device=clean(d.display), now=now, proposed=then))
    return tuple(out)


def remaining_s(s: Snapshot, ctx: Context) -> float | None:
    """Seconds until the proposal expires; None when it does not."""
    if s.proposal is None or s.proposal.expires_at_s is None:
        return None
    return max(0.0, s.proposal.expires_at_s - s.at_s - ctx.elapsed_s)


def plan_lines(s: Snapshot, width: int, height: int, ctx: Context) -> tuple[Line, ...]:
    """The whole view; the panel scrolls."""
    del height
    inner = width - 2
    out: list[Line] = [*_headline(s, inner, ctx)]
    if s.infeasible:
        out += [rule("no plan is possible", inner), *wrap(s.infeasible, inner, "fault"), ()]
    if s.plan is None and s.proposal is None:
        if not s.infeasible:
            out.append(line(Span("No plan yet: the planner starts when the fleet has been seen.", "dim")))
        return tuple((Span(" "), *x) for x in (*out, *_migration(s, inner)))
    table = _devices(s, inner if inner < 100 else inner * 3 // 5)
    if inner >= 100:
        left = inner * 3 // 5
        out += beside(table, _figures(s, inner - left - 3), left, 3)
    else:
        out += [*table, (), *_figures(s, inner)]
    out += [(), *_why(s, inner), (), *_migration(s, inner)]
    if s.calibration:
        out += [(), *calibration_lines(s, inner)]
    return tuple((Span(" "), *clip(x, inner)) for x in out)


def _headline(s: Snapshot, width: int, ctx: Context) -> tuple[Line, ...]:
    if s.plan is None:
        head = line(Span("no plan in force", "dim"))
    else:
        head = line(Span(f"r{s.plan.rev}", "strong"), Span(" in force", "text"),
                    Span(f" ({clean(s.plan.scheduler)}, {n.seconds(s.plan.solve_s)},", "dim"),
                Span(f" since {n.clock(s.at_s - s.plan.made_at_s)})", "dim"))  # fmt: skip
    if s.proposal is None:
        hint = "R re-plan" if s.run.consent == "ask" else "plans are adopted without asking"
        return (line(*head, Span(f"   no proposal open · {hint}", "dim")),)
    p = s.proposal.plan
    then = line(Span("→ ", "accent"), Span(f"r{p.rev}", "accent"), Span(" proposed", "text"),
                Span(f" ({clean(p.scheduler)}, {n.seconds(p.solve_s)}, gap {n.percent(p.gap)})", "dim"))  # fmt: skip
    left = remaining_s(s, ctx)
    expires = line(Span("expires ", "dim"), Span(n.clock(left), "warn"), Span("   ")) if left is not None else ()
    tail = line(*expires, Span("a", "key"), Span(" approve  ", "text"), Span("x", "key"), Span(" reject", "text"))
    both = line(*head, Span("  "), *then)
    if width_of(both) + 3 + width_of(tail) <= width:
        return ((*pad(both, width - width_of(tail)), *tail),)
    return (head, (*pad(then, max(0, width - width_of(tail))), *tail))


def _devices(s: Snapshot, width: int) -> tuple[Line, ...]:
    """A row a device: what it does now, what it would do, what it does worse or better than predicted. Without the room
    for all the kind goes first."""
    open_ = s.proposal is not None
    rates = {
        d: p.rate_tokens_per_s for p in (s.plan.placements if s.plan else ()) if len(p.devices) == 1 for d in p.devices
    }
    rows: list[tuple[Span, ...]] = [
        tuple(Span(x, "label") for x in ("DEVICE", "KIND", "IN FORCE", "PROPOSED", "TOK/S measured / planned"))
    ]
    for d in s.devices:
        now = part_of(s.plan, d.id)
        then = part_of(s.proposal.plan, d.id) if s.proposal is not None else now
        moved = then != now
        planned = rates.get(d.id, d.predicted_tokens_per_s)
        rows.append(
            (
                Span(clean(d.display), "strong" if moved else "text"),
                Span(clean(d.kind), "dim"),
                Span(now, _tone(now)),
                Span(("→ " if moved else "  ") + then, _tone(then) if moved else "faint"),
                Span(f"{n.rate(d.tokens_per_s)} / {n.rate(planned)}", "dim"),
            )
        )
    return tuple(pad(x, width) for x in _table(rows, (10, 10, 17, 17 if open_ else 0), width))


def _tone(part: str) -> Tone:
    return ROLE_TONES.get(part.split(" ", 1)[0], "text")


def _table(rows: list[tuple[Span, ...]], least: tuple[int, ...], width: int) -> list[Line]:
    """Rows as lines: columns as wide as their longest cell and `least` (0: left out); the last one takes what is left."""
    wide = [max(w, *(cell_len(r[i].text) + 2 for r in rows)) if w else 0 for i, w in enumerate(least)]
    if sum(wide) + max(cell_len(r[-1].text) for r in rows[1:] or rows) > width:
        wide[1] = 0
    return [(*(x for c, w in zip(r, wide, strict=False) for x in (pad(line(c), w) if w else ())), r[-1]) for r in rows]


def _figures(s: Snapshot, width: int) -> tuple[Line, ...]:
    """Measured, predicted and proposed, one line a figure."""
    p, q, f = s.plan, s.proposal.plan if s.proposal is not None else None, s.flow
    columns = ("", "measured", f"r{p.rev} says" if p else "", f"r{q.rev} says" if q else "")

    def row(name: str, show: Callable[[float | None], str], measured: float | None, field: str) -> tuple[str, ...]:
        said = (show(getattr(plan, field)) if plan is not None else "" for plan in (p, q))
        return (name, show(measured), *said)

    rows = [
        row("tok/s trained", n.rate, f.tokens_per_s if f else None, "tokens_per_s"),
        row("$/Mtok", n.dollars, f.usd_per_mtok if f else None, "usd_per_mtok"),
        row("$/h", n.dollars, f.usd_per_h if f else None, "usd_per_h"),
        row("step", n.seconds, None, "step_s"),
        row("  training", n.seconds, f.metrics.get("cycle_s") if f else None, "train_s"),
        row("  rollout", n.seconds, None, "rollout_s"),
        row("bound tok/s", n.rate, None, "bound_tokens_per_s"),
        row("gap to bound", n.percent, None, "gap"),
    ]
    each = max(9, min(12, (width - 15) // 3))
    out: list[Line] = [
        (
            *pad(line(Span("", "label")), 15),
            *(x for c in columns[1:] for x in pad(line(Span(c, "label")), each, "right")),
        )
    ]
    for name, *values in rows:
        spans: list[Span] = list(pad(line(Span(name, "dim")), 15))
        for i, value in enumerate(values):
            tone: Tone = "faint" if value == n.NA else "strong" if i == 0 else "accent" if i == 2 else "text"
            spans += pad(line(Span(value, tone)), each, "right")
        out.append(tuple(spans))
    if s.proposal is not None and s.proposal.gain_share is not None:
        out.append(
            line(
                *pad(line(Span("predicted gain", "dim")), 15),
                Span(f"{s.proposal.gain_share * 100:+.1f} % tok/s".replace("-", n.MINUS), "good"),
            )
        )
    scope = (q or p).bound_scope if (q or p) else ""  # type: ignore[union-attr]
    if scope:
        out += wrap(f"bound over {scope}", width, "dim")
    return tuple(out)


def _why(s: Snapshot, width: int) -> tuple[Line, ...]:
    out: list[Line] = []
    for plan, tone in ((s.proposal.plan if s.proposal else None, "accent"), (s.plan, "strong")):
        if plan is None:
            continue
        if out:
            out.append(())
        out.append(rule(f"why r{plan.rev}", width, line(Span(clean(plan.trigger), "dim")) if plan.trigger else ()))
        out += wrap(plan.headline, width, tone)  # type: ignore[arg-type]
        for reason in plan.why:
            first, *more = wrap(reason, width - 2) or ((),)
            out += [line(Span("• ", "dim"), *first), *(line(Span("  "), *x) for x in more)]
    return tuple(out)


def _migration(s: Snapshot, width: int) -> tuple[Line, ...]:
    """What moves, what waits, what is blocked and why."""
    m = s.migration
    if not (m.running or m.waiting or m.blocked):
        return (rule("moves", width), line(Span("nothing moves: the fleet is as the plan wants it", "dim")))
    out: list[Line] = [rule("moves", width)]
    out += [line(Span("◐ ", "accent"), Span(clean(x))) for x in m.running]
    out += [line(Span("◌ ", "dim"), Span(clean(x), "dim")) for x in m.waiting]
    if m.blocked:
        first, *more = wrap(m.blocked, width - 10, "warn")
        out += [line(Span("✕ blocked ", "fault"), *first), *(line(Span(" " * 10), *x) for x in more)]
    return tuple(out)
