"""Every key of the console, once. Bindings, footer, help, palette and the documentation's table all come from here.

`keys` are Textual's names. `level` is the least consent an action needs (None: it changes nothing on the run);
an action on the last rollout device, on the trainer or on everything asks for more (hexctl.tui.view.consent).
"""

from collections.abc import Iterable
from typing import Literal

from planner.record import record

Where = Literal["everywhere", "fleet", "plan", "lists", "pin", "dialog"]


@record
class Key:
    """One entry. `id` is stable: a user's remapping names it. `order` > 0 puts it into the footer, smaller first, as `brief`."""

    id: str
    keys: tuple[str, ...]
    shown: str
    action: str
    description: str
    level: int | None = None
    where: Where = "everywhere"
    order: int = 0
    brief: str = ""
    palette: bool = True


KEYS: tuple[Key, ...] = (
    Key(id="view.fleet", keys=("1",), shown="1", action="view('fleet')", description="the fleet, a row a device"),
    Key(
        id="view.flow", keys=("2",), shown="2", action="view('flow')", description="rewards, staleness, queues, tokens"
    ),
    Key(
        id="view.plan",
        keys=("3",),
        shown="3",
        action="view('plan')",
        description="the plan in force and the proposed one",
    ),
    Key(id="view.events", keys=("4",), shown="4", action="view('events')", description="what happened and why"),
    Key(id="view.next", keys=("tab",), shown="Tab", action="step_view(1)", description="next view", palette=False),
    Key(
        id="view.previous",
        keys=("shift+tab",),
        shown="Shift+Tab",
        action="step_view(-1)",
        description="previous view",
        palette=False,
    ),
    Key(id="go.down", keys=("j", "down"), shown="j ↓", action="go(1)", description="down", palette=False),
    Key(id="go.up", keys=("k", "up"), shown="k ↑", action="go(-1)", description="up", palette=False),
    Key(
        id="go.page_down",
        keys=("pagedown", "ctrl+f"),
        shown="PgDn",
        action="page(1)",
        description="a page down",
        palette=False,
    ),
    Key(
        id="go.page_up",
        keys=("pageup", "ctrl+b"),
        shown="PgUp",
        action="page(-1)",
        description="a page up",
        palette=False,
    ),
    Key(id="go.first", keys=("g", "home"), shown="g Home", action="first", description="first row", palette=False),
    Key(id="go.last", keys=("G", "end"), shown="G End", action="last", description="last row", palette=False),
    Key(
        id="mark",
        keys=("space",),
        shown="Space",
        action="mark",
        description="mark the device; actions take all marked ones",
        where="fleet",
        order=1,
        brief="mark",
    ),
    Key(
        id="cordon",
        keys=("c",),
        shown="c",
        action="ask('cordon')",
        description="cordon or uncordon",
        level=0,
        where="fleet",
        order=2,
        brief="cordon",
    ),
    Key(
        id="drain",
        keys=("D",),
        shown="D",
        action="ask('drain')",
        description="drain: finish or hand over, then stay empty",
        level=1,
        where="fleet",
        order=3,
        brief="drain",
    ),
    Key(
        id="pin",
        keys=("p",),
        shown="p",
        action="ask('pin')",
        description="pin to a role",
        level=0,
        where="fleet",
        order=4,
        brief="pin",
    ),
    Key(
        id="approve",
        keys=("a",),
        shown="a",
        action="ask('approve')",
        description="approve the proposed plan",
        level=1,
        where="plan",
        order=1,
        brief="approve",
    ),
    Key(
        id="reject",
        keys=("x",),
        shown="x",
        action="ask('reject')",
        description="reject the proposed plan",
        level=0,
        where="plan",
        order=2,
        brief="reject",
    ),
    Key(
        id="replan",
        keys=("R",),
        shown="R",
        action="ask('replan')",
        description="plan again now",
        level=1,
        order=5,
        brief="re-plan",
    ),
    Key(
        id="undo",
        keys=("u",),
        shown="u",
        action="ask('undo')",
        description="undo the last override",
        level=0,
        order=6,
        brief="undo",
    ),
    Key(
        id="filter",
        keys=("/",),
        shown="/",
        action="filter",
        description="filter by words; !word excludes",
        where="lists",
        order=7,
        brief="filter",
    ),
    Key(
        id="sort.previous",
        keys=("<",),
        shown="<",
        action="sort(-1)",
        description="sort by the column before",
        where="fleet",
    ),
    Key(id="sort.next", keys=(">",), shown=">", action="sort(1)", description="sort by the next column", where="fleet"),
    Key(
        id="details",
        keys=("enter",),
        shown="Enter",
        action="ask('details')",
        description="details",
        where="lists",
        order=8,
        brief="details",
    ),
    Key(id="copy", keys=("y",), shown="y", action="ask('copy')", description="copy identity or event", where="lists"),
    Key(id="maximise", keys=("z",), shown="z", action="maximise", description="more room for the view"),
    Key(id="refresh", keys=("r",), shown="r", action="ask('refresh_now')", description="refresh (changes nothing)"),
    Key(
        id="palette",
        keys=(":", "ctrl+p"),
        shown=":",
        action="ask('palette')",
        description="palette",
        order=9,
        brief="palette",
        palette=False,
    ),
    Key(id="help", keys=("?", "f1"), shown="?", action="ask('help')", description="help", order=10, brief="help"),
    Key(id="back", keys=("escape",), shown="Esc", action="back", description="one step back", palette=False),
    Key(
        id="quit",
        keys=("q", "ctrl+c", "ctrl+q"),
        shown="q",
        action="ask('leave')",
        description="leave (the run goes on)",
        order=11,
        brief="leave",
    ),
    Key(
        id="pin.rollout",
        keys=("r",),
        shown="r",
        action="choose('rollout')",
        description="pin to rollout",
        level=0,
        where="pin",
    ),
    Key(
        id="pin.train",
        keys=("t",),
        shown="t",
        action="choose('train')",
        description="pin to training",
        level=0,
        where="pin",
    ),
    Key(id="pin.remove", keys=("x",), shown="x", action="choose('')", description="unpin", level=0, where="pin"),
    Key(
        id="dialog.confirm", keys=("y",), shown="y", action="confirm", description="do it (L1 dialogs)", where="dialog"
    ),
    Key(id="dialog.cancel", keys=("n", "escape"), shown="n Esc", action="cancel", description="cancel", where="dialog"),
    Key(
        id="dialog.other",
        keys=("left", "right", "tab", "shift+tab"),
        shown="← → Tab",
        action="other",
        description="other button",
        where="dialog",
    ),
    Key(
        id="dialog.press",
        keys=("enter", "space"),
        shown="Enter",
        action="press",
        description="press the focused button",
        where="dialog",
    ),
)

MAIN: tuple[Where, ...] = ("everywhere", "fleet", "plan", "lists")
LISTS = ("fleet", "events")
SECTIONS: tuple[tuple[Where, str], ...] = (
    ("everywhere", "Everywhere"),
    ("lists", "Fleet and events"),
    ("fleet", "Fleet"),
    ("plan", "Plan, while a proposal is open"),
    ("pin", "After p"),
    ("dialog", "Dialogs"),
)
LEVEL_WORDS = {None: "", 0: "at once", 1: "asks first", 2: "name typed"}


def keys_at(where: Iterable[Where]) -> tuple[Key, ...]:
    """The keys of these places, in the registry's order."""
    places = set(where)
    return tuple(k for k in KEYS if k.where in places)


def works_in(key: Key, view: str, *, proposal_open: bool) -> bool:
    """Whether a key of the main screen does something in a view."""
    if key.where == "lists":
        return view in LISTS
    if key.where == "plan":
        return view == "plan" and proposal_open
    return key.where in ("everywhere", view)


def footer_keys(view: str, *, proposal_open: bool) -> tuple[Key, ...]:
    """What the footer offers in a view, most useful first."""
    return tuple(
        sorted(
            (k for k in keys_at(MAIN) if k.order and works_in(k, view, proposal_open=proposal_open)),
            key=lambda k: k.order,
        )
    )


def keys_markdown() -> str:
    """The documentation's tables."""
    out = ["<!-- generated from hexctl/tui/keys.py -->"]
    for where, title in SECTIONS:
        out += ["", f"### {title}", "", "| key | does | confirmation | id |", "|---|---|---|---|"]
        out += [f"| {_code(k.keys)} | {k.description} | {LEVEL_WORDS[k.level]} | `{k.id}` |" for k in keys_at((where,))]
    return "\n".join(out) + "\n"


def _code(keys: tuple[str, ...]) -> str:
    return " ".join(f"`{k}`" for k in keys)
