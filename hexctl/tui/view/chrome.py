"""The lines around the views: footer, banner, the note beside the tabs, help."""

from collections.abc import Sequence

from hexctl.tui.keys import LEVEL_WORDS, SECTIONS, Key, keys_at
from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Health
from hexctl.tui.view.header import Group, fit
from hexctl.tui.view.text import Line, Span, Tone, clean, clip, line, pad
from runtime.api.wire import RunView, Snapshot

STUCK_AFTER_S = 6.0


def footer_line(keys: Sequence[Key], width: int) -> Line:
    """Keys and what they do, as many as fit; what comes first in `keys` stays longest, help and leaving always."""
    groups = []
    for i, key in enumerate(keys):
        keep = 100 if key.id in ("help", "quit") else 50 - i
        said = line(Span(key.shown.split(" ")[0], "key"), Span(f" {key.brief}", "dim"))
        groups.append(Group(keep=keep, ways=(said,) if keep == 100 else (said, ())))
    return (Span(" "), *fit(groups, width - 2, gap=2))


def silence_banner(health: Health, run: RunView) -> Line:
    """The daemon does not answer. Only a simulated run has no life of its own."""
    fate = "stands still without its daemon" if run.label == "simulated" else "goes on"
    retry = f" · next try within {n.age(health.retry_s)}" if health.retry_s else ""
    told = f" ({clean(health.reason)})" if health.reason else ""
    return line(
        Span(
            f" daemon not answering {n.age(health.silent_s)}{told} · last values greyed · run {clean(run.id)} {fate}{retry} ",
            "banner",
        )
    )


def waiting_banner(health: Health, run_id: str) -> Line:
    """Nothing has been seen yet."""
    told = f" ({clean(health.reason)})" if health.reason else ""
    return line(Span(f" waiting for the daemon of {clean(run_id)}, {n.age(health.silent_s)}{told} ", "banner"))


def banner_lines(s: Snapshot, elapsed_s: float, health: Health) -> tuple[Line, ...]:
    """What stands above the views when not all is well; usually nothing."""
    out: list[Line] = []
    if s.run.state in ("finished", "failed") or (s.run.state == "stopping" and not health.answering):
        word = "has failed" if s.run.state == "failed" else "has ended"
        out.append(
            line(Span(f" run {clean(s.run.id)} {word} · its folder is {clean(s.run.folder)} · q leaves ", "banner"))
        )
    elif s.run.state == "stopping":
        out.append(line(Span(" the run is ending: samples are suspended, actors stopped ", "banner")))
    elif not health.answering:
        out.append(silence_banner(health, s.run))
    elif elapsed_s > STUCK_AFTER_S:
        out.append(
            line(
                Span(
                    f" no new snapshot for {n.age(elapsed_s)}: the daemon answers, its control loop is late · the run goes on ",
                    "banner",
                )
            )
        )
    if s.infeasible:
        out.append(line(Span(" no plan is possible: ", "fault"), Span(clean(s.infeasible), "warn")))
    if s.problems:
        more = f"  (+{len(s.problems) - 1})" if len(s.problems) > 1 else ""
        out.append(line(Span(" ▲ ", "warn"), Span(clean(s.problems[0]) + more, "warn")))
    return tuple(out)


def tabs(s: Snapshot | None) -> tuple[tuple[str, str], ...]:
    """(view, title); the plan's title tells of an open proposal, the events' of nothing."""
    plan = "3 Plan •1" if s is not None and s.proposal is not None else "3 Plan"
    return (("fleet", "1 Fleet"), ("flow", "2 Flow"), ("plan", plan), ("events", "4 Events"))


def tabs_note(*, words: str, marked: int, sort: str, visible: tuple[int, int, int] | None) -> Line:
    """What changes which rows are seen."""
    parts: list[Span] = []
    if words:
        parts += [Span("/", "key"), Span(clean(words), "warn"), Span("  ")]
    if marked:
        parts += [Span(f"✓ {marked} marked", "accent"), Span("  ")]
    if sort:
        parts += [Span(f"by {sort}", "dim"), Span("  ")]
    if visible is not None and visible[2] > visible[1] - visible[0] + 1:
        parts.append(Span(f"{visible[0]}–{visible[1]} of {visible[2]}", "dim"))
    return tuple(parts)


def help_lines(width: int) -> tuple[Line, ...]:
    """Every key with what it does and what it asks first, by place; then the words of the fleet."""
    blocks: list[Line] = []
    for where, title in SECTIONS:
        blocks += [line(Span(title, "label")), *(_help_line(k) for k in keys_at((where,))), ()]
    blocks.append(line(Span("Words of the fleet", "label")))
    for glyph, word, tone, told in _WORDS:
        blocks.append(line(Span(f"{glyph} ", tone), *pad(line(Span(word, tone)), 12), Span(told, "dim")))
    return tuple(clip(x, width) for x in blocks)


def _help_line(k: Key) -> Line:
    level = LEVEL_WORDS[k.level]
    return line(
        *pad(line(Span(k.shown, "key")), 12),
        *pad(line(Span(k.description)), 49),
        Span(level, "warn" if k.level else "dim"),
    )


_WORDS: tuple[tuple[str, str, Tone, str], ...] = (
    ("✕", "LOST", "fault", "the driver or the node says that it is gone"),
    ("▼", "HUNG", "fault", "it is there and does not get on"),
    ("◇", "STALE", "warn", "no fresh data; not known to be dead"),
    ("◆", "HOST-BOUND", "warn", "a paced device that its host cannot keep up with"),
    ("△", "slow", "warn", "slower than its kind for some time; plans count with it"),
    ("▲", "throttled", "warn", "slower than it could be: heat or power"),
    ("○", "cordoned", "warn", "an operator keeps work away from it"),
    ("◐", "draining", "accent", "it finishes or hands over what it holds"),
    ("■", "quarantined", "fault", "what it reported could not be trusted"),
    ("◑", "stopping", "accent", "its replica ends"),
    ("◌", "starting", "accent", "it loads weights"),
    ("—", "a dash", "faint", "not known; never a zero"),
)
