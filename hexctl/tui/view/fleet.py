"""The fleet: one row a device, the columns that fit, sorting and filtering."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.curves import bar, spark
from hexctl.tui.view.history import History
from hexctl.tui.view.text import Align, Line, Span, Tone, clean, line, pad
from planner.record import record
from runtime.api.wire import DeviceRow, Snapshot

STALE_AFTER_S = 10.0  # a row whose data is older than this is drawn as outdated


class Badge(NamedTuple):
    """A state as glyph, word and tone: colour is never the only carrier."""

    glyph: str
    word: str
    tone: Tone


ROLES: dict[str, Badge] = {
    "train": Badge("●", "train", "train"),
    "rollout": Badge("●", "rollout", "rollout"),
    "idle": Badge("·", "idle", "idle"),
}
STATUSES: dict[str, Badge] = {
    "starting": Badge("◌", "starting", "accent"),
    "draining": Badge("◐", "draining", "accent"),
    "cordoned": Badge("○", "cordoned", "warn"),
    "slow": Badge("△", "slow", "warn"),
    "throttled": Badge("▲", "throttled", "warn"),
    "HOST-BOUND": Badge("◆", "HOST-BOUND", "warn"),
    "STALE": Badge("◇", "STALE", "warn"),
    "stopping": Badge("◑", "stopping", "accent"),
    "quarantined": Badge("■", "quarantined", "fault"),
    "HUNG": Badge("▼", "HUNG", "fault"),
    "LOST": Badge("✕", "LOST", "fault"),
}


@record
class FleetRow:
    """One device, ready to draw."""

    id: str
    display: str
    kind: str
    node: str
    badge: Badge
    role: str
    status: str
    replica: str
    version: int | None
    util_share: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    power_w: float | None
    temperature_c: float | None
    tokens_per_s: float | None
    against_model: float | None  # share above (+) or below (-) what the cost model says of its work
    drift: float | None  # share above (+) or below (-) its peers
    usd_per_mtok: float | None
    running: int | None
    slots: int | None
    pinned: str
    age_s: float | None
    note: str
    recent: tuple[float, ...]  # tokens/s lately, newest last
    outdated: bool


def badge_of(d: DeviceRow) -> Badge:
    """The state to show: whatever is not "ok" comes before the role."""
    if d.status in STATUSES:
        return STATUSES[d.status]
    if d.status != "ok":
        return Badge("?", clean(d.status), "warn")
    if d.cordoned:
        return STATUSES["cordoned"]
    return ROLES.get(d.role, Badge("?", clean(d.role), "warn"))


def fleet_rows(s: Snapshot, ctx: Context, history: History) -> tuple[FleetRow, ...]:
    """A row a device, in the daemon's order."""
    return tuple(_row(d, ctx, history) for d in s.devices)


def _row(d: DeviceRow, ctx: Context, history: History) -> FleetRow:
    age_s = None if d.age_s is None else d.age_s + ctx.elapsed_s
    return FleetRow(
        id=d.id,
        display=clean(d.display),
        kind=clean(d.kind),
        node=d.node,
        badge=badge_of(d),
        role=d.role,
        status=d.status,
        replica=clean(d.replica or ""),
        version=d.version,
        util_share=d.util_share,
        memory_used_bytes=d.memory_used_bytes,
        memory_total_bytes=d.memory_total_bytes,
        power_w=d.power_w,
        temperature_c=d.temperature_c,
        tokens_per_s=d.tokens_per_s,
        against_model=d.against_model,
        drift=None if d.drift_factor is None else d.drift_factor - 1,
        usd_per_mtok=d.usd_per_mtok,
        running=d.running,
        slots=d.slots,
        pinned=d.pinned or "",
        age_s=age_s,
        note=clean(d.note),
        recent=history.of(d.id),
        outdated=d.status in ("STALE", "HUNG") or (age_s is not None and age_s > STALE_AFTER_S and d.status != "LOST"),
    )


SortValue = float | str | None
CellMaker = Callable[[FleetRow, int], Line]


class Column(NamedTuple):
    """A column: `keep` says which go first when room is short; `known` whether any row has a figure for it."""

    id: str
    title: str
    width: int
    keep: int
    align: Align
    cell: CellMaker
    value: Callable[[FleetRow], SortValue]


_DASH = Span(n.NA, "faint")


def _text(text: str, tone: Tone = "text") -> Line:
    return line(_DASH if text in ("", n.NA) else Span(text, tone))


def _role(r: FleetRow, _: int) -> Line:
    spans = line(Span(f"{r.badge.glyph} {r.badge.word}", r.badge.tone))
    return (*spans, Span(" pin", "accent")) if r.pinned else spans


UTIL_BAR, MEMORY_BAR, SLOTS_BAR = 10, 7, 5  # cells of the bars; what is left of their columns belongs to the figures


def _gauge(share: float | None, cells: int, figure: str, width: int) -> Line:
    """A bar of `cells` cells and its figure, right-aligned in what is left of `width`."""
    return (*bar(share, cells), Span(" "), Span(figure.rjust(width - cells - 1)))


def _util(r: FleetRow, width: int) -> Line:
    if r.util_share is None:
        return line(_DASH)
    return _gauge(r.util_share, UTIL_BAR, n.percent(r.util_share, 0), width)


def _memory(r: FleetRow, width: int) -> Line:
    if r.memory_used_bytes is None:
        return line(_DASH)
    if not r.memory_total_bytes:
        return _gauge(None, MEMORY_BAR, n.gibibytes(r.memory_used_bytes), width)
    figure = f"{n.gibibytes(r.memory_used_bytes)}/{n.gibibytes(r.memory_total_bytes)}"
    return _gauge(r.memory_used_bytes / r.memory_total_bytes, MEMORY_BAR, figure, width)


def _slots(r: FleetRow, width: int) -> Line:
    if r.running is None:
        return line(_DASH)
    share = r.running / r.slots if r.slots else None
    return _gauge(share, SLOTS_BAR, f"{n.grouped(r.running)}/{n.grouped(r.slots)}", width)


def _rate(r: FleetRow, width: int) -> Line:
    text = n.rate(r.tokens_per_s)
    head = Span(text.rjust(7), "faint" if text == n.NA else "strong")
    if width < 12:
        return line(head)
    curve = (
        spark(r.recent, width - 8, low=0.0) if len(r.recent) > 1 and r.tokens_per_s is not None else " " * (width - 8)
    )
    return line(head, Span(" "), Span(curve, "spark"))


def _against(r: FleetRow, _: int) -> Line:
    low = r.against_model is not None and r.against_model < -0.1
    return _text(n.signed_percent(r.against_model), "warn" if low else "text")


def _watts(power_w: float | None) -> str:
    text = n.grouped(power_w)
    return text if text == n.NA else f"{text} W"


def _drift(r: FleetRow, _: int) -> Line:
    tone: Tone = "warn" if r.drift is not None and r.drift <= -0.1 else "text"
    return _text(n.signed_percent(r.drift), tone)


def _version(version: float | None) -> str:
    return n.NA if version is None else f"{version:.0f}"


@record
class Widths:
    """Widths that depend on what is in the rows: names up to a limit, figures as wide as the widest one."""

    device: int = 8
    kind: int = 4
    role: int = 9
    replica: int = 7
    util: int = 16
    slots: int = 13
    memory: int = 15
    power: int = 6
    temperature: int = 3
    cost: int = 7
    against: int = 8
    drift: int = 6
    version: int = 4
    note: int = 18


def _widths(rows: Sequence[FleetRow]) -> Widths:
    def longest(least: int, most: int, words: Collection[str]) -> int:
        return min(most, max([least, *(cell_len(w) for w in words)]))

    def widest(least: int, show: Callable[[float | None], str], values: Iterable[float | None]) -> int:
        """Cells of the widest figure: the smallest or the largest."""
        known = [v for v in values if v is not None and math.isfinite(v)]
        return max(least, cell_len(show(min(known))), cell_len(show(max(known)))) if known else least

    slots = widest(3, n.grouped, [v for r in rows for v in (r.running, r.slots)])
    memory = widest(3, n.gibibytes, [v for r in rows for v in (r.memory_used_bytes, r.memory_total_bytes)])
    return Widths(
        slots=SLOTS_BAR + 1 + slots + 1 + slots,
        memory=MEMORY_BAR + 1 + memory + 1 + memory,
        power=widest(6, _watts, (r.power_w for r in rows)),
        temperature=widest(3, n.grouped, (r.temperature_c for r in rows)),
        cost=widest(7, n.price, (r.usd_per_mtok for r in rows)),
        against=widest(8, n.signed_percent, (r.against_model for r in rows)),
        drift=widest(6, n.signed_percent, (r.drift for r in rows)),
        version=widest(4, _version, (r.version for r in rows)),
        device=longest(6, 20, {r.display for r in rows}),
        kind=longest(4, 16, {r.kind for r in rows}),
        role=longest(9, 16, {f"{r.badge.glyph} {r.badge.word}{' pin' if r.pinned else ''}" for r in rows}),
        replica=longest(7, 10, {r.replica for r in rows}),
        util=UTIL_BAR + 6 if any(r.util_share is not None for r in rows) else 5,
        note=longest(4, 18, {r.note for r in rows}),
    )


def _columns(w: Widths) -> tuple[Column, ...]:
    util_align: Align = "left" if w.util > 5 else "right"
    return (
        Column("device", "DEVICE", w.device, 99, "left", lambda r, _: _text(r.display, "strong"), lambda r: r.display),
        Column("kind", "KIND", w.kind, 60, "left", lambda r, _: _text(r.kind), lambda r: r.kind),
        Column("role", "ROLE", w.role, 98, "left", _role, lambda r: f"{r.role} {r.badge.word}"),
        Column("replica", "REPLICA", w.replica, 70, "left", lambda r, _: _text(r.replica), lambda r: r.replica or None),
        Column("util", "UTIL", w.util, 97, util_align, _util, lambda r: r.util_share),
        Column("slots", "SLOTS", w.slots, 40, "left", _slots, lambda r: r.running),
        Column("memory", "MEM GiB", w.memory, 50, "left", _memory, lambda r: r.memory_used_bytes),
        Column("power", "POWER", w.power, 45, "right", lambda r, _: _text(_watts(r.power_w)), lambda r: r.power_w),
        Column("temp", "°C", w.temperature, 46, "right", lambda r, _: _text(n.grouped(r.temperature_c)), lambda r: r.temperature_c),
        Column("rate", "TOK/S", 15, 96, "left", _rate, lambda r: r.tokens_per_s),
        Column("cost", "$/Mtok", w.cost, 55, "right", lambda r, _: _text(n.price(r.usd_per_mtok)), lambda r: r.usd_per_mtok),
        Column("against", "vs MODEL", w.against, 95, "right", _against, lambda r: r.against_model),
        Column("drift", "DRIFT", w.drift, 35, "right", _drift, lambda r: r.drift),
        Column("version", "v", w.version, 62, "right", lambda r, _: _text(_version(r.version)), lambda r: r.version),
        Column("age", "AGE", 6, 65, "right", lambda r, _: _text(n.age(r.age_s), "dim"), lambda r: r.age_s),
        Column("note", "NOTE", w.note, 30, "left", lambda r, _: _text(r.note, "dim"), lambda r: r.note or None),
    )  # fmt: skip


MARGIN = 2  # cursor and mark


def columns_for(rows: Sequence[FleetRow], width: int) -> tuple[Column, ...]:
    """The columns that fit into `width` cells, in order. Columns that no device has a figure for go first."""
    every = _columns(_widths(rows))
    known = {c.id for c in every if any(c.value(r) is not None for r in rows)} if rows else {c.id for c in every}
    gap = gap_for(width)
    chosen: list[Column] = []
    room = width - MARGIN
    for column in sorted(every, key=lambda c: -c.keep - (200 if c.id in known or c.keep >= 90 else 0)):
        if column.width + gap <= room:
            chosen.append(column)
            room -= column.width + gap
    kept = {c.id for c in chosen}
    columns = [c for c in every if c.id in kept]
    if columns and columns[-1].id == "note":
        columns[-1] = columns[-1]._replace(width=columns[-1].width + room)
    return tuple(columns)


def gap_for(width: int) -> int:
    """Cells between columns."""
    return 2 if width >= 110 else 1


def head_line(columns: Sequence[Column], width: int, sort: str | None, descending: bool) -> Line:
    """The column heads; the sorted one has an arrow."""
    gap = gap_for(width)
    out: list[Span] = [Span(" " * MARGIN)]
    for c in columns:
        title = c.title.rjust(7) if c.id == "rate" else c.title
        if c.id != sort:
            out += [*pad(line(Span(title, "label")), c.width, c.align), Span(" " * gap)]
            continue
        # The arrow has a cell of the gap: a title may be as wide as its column.
        arrow = Span("↓" if descending else "↑", "key")
        head = (
            *pad(line(Span(title, "key")), min(c.width, len(title)) if c.align == "left" else c.width, c.align),
            arrow,
        )
        out += pad(head, c.width + gap)
    return tuple(out)


def row_line(r: FleetRow, columns: Sequence[Column], width: int, *, cursor: bool, marked: bool) -> Line:
    """One row. A row of old data is drawn whole in the tone of outdated values, its state excepted."""
    gap = Span(" " * gap_for(width))
    out: list[Span] = [Span("▸" if cursor else " ", "key"), Span("✓" if marked else " ", "accent")]
    for c in columns:
        spans = pad(c.cell(r, c.width), c.width, c.align)
        if r.outdated and c.id not in ("role", "age", "note"):
            spans = tuple(Span(s.text, "outdated") for s in spans)
        out += [*spans, gap]
    return tuple(out)


def arrange(rows: Sequence[FleetRow], words: str, sort: str | None, descending: bool) -> tuple[FleetRow, ...]:
    """Rows that hold every word of `words` (`!word`: that do not hold it), sorted by the column `sort`; unknown values last."""
    kept = [r for r in rows if matches(words, _filter_text(r))] if words.strip() else list(rows)
    if sort is None:
        return tuple(kept)
    value = next(c.value for c in _columns(Widths()) if c.id == sort)
    have = [r for r in kept if value(r) is not None]
    rest = [r for r in kept if value(r) is None]
    have.sort(key=lambda r: _sort_key(value(r)), reverse=descending)
    return (*have, *rest)


def _filter_text(r: FleetRow) -> str:
    return f"{r.display} {r.kind} {r.badge.word} {r.role} {r.replica} {r.node} {r.note} {r.id}"


def _sort_key(value: SortValue) -> tuple[float, str]:
    return (0.0, value) if isinstance(value, str) else (float(value or 0.0), "")


def matches(words: str, text: str) -> bool:
    """Whether `text` holds every word, whatever the case; `!word` asks for its absence."""
    low = text.lower()
    return all((w[1:] not in low) if w.startswith("!") and len(w) > 1 else w in low for w in words.lower().split())


def sortable(columns: Sequence[Column]) -> tuple[str | None, ...]:
    """What `<` and `>` step through: the daemon's order, then every column on the screen."""
    return (None, *(c.id for c in columns))


def descends(column: str | None) -> bool:
    """Figures start with the largest, words with the first."""
    return column not in (None, "device", "kind", "role", "replica", "note")
