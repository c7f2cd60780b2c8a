"""Everything known of one device or one event, for the dialog behind Enter."""

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.events import event_line
from hexctl.tui.view.fleet import badge_of
from hexctl.tui.view.plan import part_of
from hexctl.tui.view.text import Line, Span, clean, line, pad, wrap
from runtime.api.wire import DeviceRow, Snapshot


def _pair(name: str, value: str) -> Line:
    return (*pad(line(Span(name, "dim")), 22), Span(value, "faint" if value == n.NA else "text"))


def device_details(s: Snapshot, device_id: str, ctx: Context, width: int) -> tuple[str, tuple[Line, ...]]:
    """Title and lines for one device; says so when the fleet no longer has it."""
    d = next((x for x in s.devices if x.id == device_id), None)
    if d is None:
        return clean(device_id), (line(Span("This device is no longer in the fleet.", "warn")),)
    badge = badge_of(d)
    age = None if d.age_s is None else d.age_s + ctx.elapsed_s
    out: list[Line] = [
        (*pad(line(Span("state", "dim")), 22), Span(f"{badge.glyph} {badge.word}", badge.tone)),
        _pair("identity", clean(d.id)),
        _pair("kind, node, index", f"{clean(d.kind)}, {clean(d.node)}, {d.index}"),
        _pair("role", f"{d.role}{' (paced device)' if d.paced else ''}"),
        _pair("plan in force", part_of(s.plan, d.id) if s.plan else n.NA),
        _pair("proposed", part_of(s.proposal.plan, d.id) if s.proposal else n.NA),
        _pair("overrides", _overrides(d)),
        (),
        _pair("replica", clean(d.replica or "") or n.NA),
        _pair("weights", n.NA if d.version is None else f"v{d.version} {clean(d.digest or '')}"),
        _pair("samples running", n.NA if d.running is None else f"{d.running} of {n.grouped(d.slots)} slots"),
        _pair(
            "process", n.NA if d.pid is None else f"pid {d.pid}{', simulated' if s.run.label == 'simulated' else ''}"
        ),
        (),
        _pair("utilisation", n.percent(d.util_share, 0)),
        _pair("memory", _memory(d)),
        _pair("power", n.NA if d.power_w is None else f"{n.grouped(d.power_w)} W"),
        _pair("temperature", n.NA if d.temperature_c is None else f"{n.grouped(d.temperature_c)} °C"),
        (),
        _pair("tokens", n.tokens_per_s(d.tokens_per_s)),
        _pair("predicted by the plan", n.tokens_per_s(d.predicted_tokens_per_s)),
        _pair("modelled at its batch", n.tokens_per_s(d.modelled_tokens_per_s)),
        _pair("drift from its peers", n.NA if d.drift_factor is None else n.signed_percent(d.drift_factor - 1)),
        _pair("plans count with", "its kind's speed" if d.speed >= 1 else f"{d.speed:.2f} of its kind's speed"),
        _pair("calibration", _calibration(d, s)),
        _pair("price", n.dollars_per(d.usd_per_h, "h")),
        _pair("cost", n.dollars_per(d.usd_per_mtok, "Mtok")),
        _pair("age of the data", n.age(age)),
    ]
    if d.note:
        out += [(), *wrap(d.note, width, "warn")]
    about = [e for e in s.events if e.subject in (d.display, d.id, d.replica) and e.subject]
    if about:
        out += [(), line(Span("lately", "label"))]
        for e in reversed(about[-4:]):
            told = event_line(e, s, ctx)
            out += wrap(f"{told.time} {told.message}", width)
    return clean(d.display), tuple(out)


def _calibration(d: DeviceRow, s: Snapshot) -> str:
    row = next((r for r in s.calibration if (r.kind, r.role) == (d.kind, d.role)), None)
    return n.NA if row is None else f"x {row.factor:.2f} for {clean(d.kind)} ({row.role}), {row.samples} samples"


def _memory(d: DeviceRow) -> str:
    used = n.byte_size(d.memory_used_bytes)
    return used if d.memory_total_bytes is None else f"{used} of {n.byte_size(d.memory_total_bytes)}"


def _overrides(d: DeviceRow) -> str:
    held = [x for x in ("cordoned" if d.cordoned else "", f"pinned to {clean(d.pinned)}" if d.pinned else "") if x]
    return ", ".join(held) or "none"


def event_details(s: Snapshot, seq: int, ctx: Context, width: int) -> tuple[str, tuple[Line, ...]]:
    """Title and lines for one event."""
    e = next((x for x in s.events if x.seq == seq), None)
    if e is None:
        return f"event {seq}", (
            line(Span("This event has left the window of the newest 200; hexctl events has it.", "dim")),
        )
    told = event_line(e, s, ctx)
    out = [_pair("time", f"{told.time} ({n.age(told.age_s)} ago)"), _pair("level", told.level), _pair("kind", told.kind),
           _pair("about", told.subject or n.NA), (), *wrap(told.message, width)]  # fmt: skip
    return f"event {seq}", tuple(out)
