"""The main screen: header, views, why line, footer. It draws a `Scene`; what keys do to the run is the app's business."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Input

from hexctl.tui.keys import KEYS, MAIN, footer_keys, works_in
from hexctl.tui.pen import Pen
from hexctl.tui.screens.bindings import bindings_at
from hexctl.tui.view import chrome
from hexctl.tui.view.context import Context
from hexctl.tui.view.events import event_lines, why_line
from hexctl.tui.view.fleet import arrange, descends, fleet_rows, sortable
from hexctl.tui.view.flow import flow_lines
from hexctl.tui.view.header import header_lines, summary_line
from hexctl.tui.view.history import History
from hexctl.tui.view.overview import LEAST_HEIGHT, overview_lines
from hexctl.tui.view.plan import plan_lines
from hexctl.tui.view.text import Line, Span, line
from hexctl.tui.widgets.event_list import EventList
from hexctl.tui.widgets.fleet_table import FleetTable
from hexctl.tui.widgets.lines_bar import LinesBar
from hexctl.tui.widgets.lines_panel import LinesPanel
from hexctl.tui.widgets.row_list import RowList
from hexctl.tui.widgets.tab_bar import TabBar
from planner.record import record
from runtime.api.wire import Snapshot

VIEWS = ("fleet", "flow", "plan", "events")
LEAST_WIDTH = 80
LEAST_ROWS = 10


@record
class Scene:
    """What there is to draw: nothing yet (`snapshot` None, `banner` says why), or a snapshot and what surrounds it."""

    snapshot: Snapshot | None
    history: History
    context: Context
    pen: Pen
    banner: tuple[Line, ...]


class MainScreen(Screen[None], inherit_bindings=False):
    """Views 1 to 4 under a header that never leaves."""

    BINDINGS: ClassVar[list[BindingType]] = bindings_at(MAIN)
    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    MainScreen { background: $background; color: $foreground; layout: vertical; overflow: hidden; }
    MainScreen #body { height: 1fr; }
    MainScreen Input { height: 1; border: none; padding: 0 1; background: $panel; display: none; }
    MainScreen Input:focus { border: none; }
    MainScreen Input.-open { display: block; }
    MainScreen.-small #tabs, MainScreen.-small #body, MainScreen.-small #footer, MainScreen.-small #why { display: none; }
    MainScreen.-ascii LinesPanel, MainScreen.-ascii RowList { scrollbar-size: 0 0; }
    MainScreen #header, MainScreen #why, MainScreen #footer { background: $panel; }
    """

    class Wanted(Message):
        """A key that concerns the run or the app: its action, for the app to do."""

        def __init__(self, action: str) -> None:
            super().__init__()
            self.action = action

    def __init__(self) -> None:
        super().__init__()
        self.view = "fleet"
        self.words = {"fleet": "", "events": ""}
        self.marked: frozenset[str] = frozenset()
        self.sort_by: str | None = None
        self.descending = False
        self._maximised = False
        self._scene: Scene | None = None

    def compose(self) -> ComposeResult:
        """Top to bottom."""
        yield LinesBar(id="header")
        yield LinesBar(id="banner")
        yield TabBar(id="tabs")
        with Vertical(id="body"):
            yield FleetTable(id="fleet")
            yield LinesPanel(id="overview")
            yield LinesPanel(id="flow")
            yield LinesPanel(id="plan")
            yield EventList(id="events")
        yield Input(
            id="filter",
            placeholder="filter: every word must match, !word must not; Enter keeps, Esc clears",
            disabled=True,
        )
        yield LinesBar(id="why")
        yield LinesBar(id="footer")

    def on_mount(self) -> None:
        """Start on the fleet."""
        self._open(self.view)

    # drawing

    def draw(self, scene: Scene) -> None:
        """Draw this from now on."""
        self._scene = scene
        self._redraw()

    def on_resize(self, event: events.Resize) -> None:
        """Lay out again for the new size."""
        del event
        self.call_after_refresh(self._redraw)

    @property
    def _small(self) -> bool:
        return self.size.width < LEAST_WIDTH or self.size.height < LEAST_ROWS

    def _redraw(self) -> None:
        scene = self._scene
        if scene is None or not self.query("#footer"):
            return  # nothing to draw, or nothing to draw on: the screen is being taken down
        self.set_class(self._small, "-small")
        self.set_class(scene.context.ascii, "-ascii")
        self.query_one("#banner", LinesBar).show(scene.banner, scene.pen)
        if scene.snapshot is None:
            self.query_one("#tabs", TabBar).show(chrome.tabs(None), self.view, (), scene.pen)
            self.query_one("#footer", LinesBar).show(
                [chrome.footer_line(footer_keys(self.view, proposal_open=False), self.size.width)], scene.pen
            )
            return
        self._draw_bars(scene, scene.snapshot)
        if not self._small:
            self._draw_view(scene, scene.snapshot)
        self._draw_tabs(scene, scene.snapshot)

    def _draw_bars(self, scene: Scene, s: Snapshot) -> None:
        width, pen = self.size.width, scene.pen
        header = self.query_one("#header", LinesBar)
        if self._small:
            hint = line(Span(f"{LEAST_WIDTH}x24 or more shows the dashboard", "dim"))
            header.show(
                [summary_line(s, width, scene.context), why_line(s, width, scene.context), hint][
                    : max(1, self.size.height)
                ],
                pen,
            )
            return
        lines = header_lines(s, width, scene.context)
        header.show(lines[:1] if self._maximised else lines, pen)
        why = self.query_one("#why", LinesBar)
        why.show([] if self._maximised else [why_line(s, width, scene.context)], pen)
        keys = footer_keys(self.view, proposal_open=s.proposal is not None)
        self.query_one("#footer", LinesBar).show([chrome.footer_line(keys, width)], pen)

    def _draw_view(self, scene: Scene, s: Snapshot) -> None:
        pen, ctx = scene.pen, scene.context
        if self.view == "fleet":
            self._draw_fleet(scene, s)
        elif self.view == "flow":
            self.query_one("#flow", LinesPanel).show(lambda w, h: flow_lines(s, w, h, ctx), pen)
        elif self.view == "plan":
            self.query_one("#plan", LinesPanel).show(lambda w, h: plan_lines(s, w, h, ctx), pen)
        else:
            self.query_one("#events", EventList).show(event_lines(s, ctx, self.words["events"]), pen)

    def _draw_fleet(self, scene: Scene, s: Snapshot) -> None:
        rows = fleet_rows(s, scene.context, scene.history)
        self.marked &= {r.id for r in rows}
        shown = arrange(rows, self.words["fleet"], self.sort_by, self.descending)
        table, overview = self.query_one("#fleet", FleetTable), self.query_one("#overview", LinesPanel)
        room = self.query_one("#body").size.height
        left = room - len(shown) - 1
        split = left >= LEAST_HEIGHT and not self._maximised
        table.styles.height = max(2, len(shown) + 1) if split else "1fr"
        overview.display = split
        table.show(shown, scene.pen, marked=self.marked, sort=self.sort_by, descending=self.descending)
        if split:
            overview.show(lambda w, h: overview_lines(s, w, h, scene.context), scene.pen)

    def _draw_tabs(self, scene: Scene, s: Snapshot) -> None:
        words = self.words.get(self.view, "")
        listed = self.query_one(f"#{self.view}")
        visible = listed.visible_rows if isinstance(listed, RowList) else None
        marked = len(self.marked) if self.view == "fleet" else 0
        sort = (
            next((c.title for c in self.query_one(FleetTable).columns if c.id == self.sort_by), "")
            if self.view == "fleet"
            else ""
        )
        note = chrome.tabs_note(words=words, marked=marked, sort=sort, visible=visible)
        self.query_one("#tabs", TabBar).show(chrome.tabs(s), self.view, note, scene.pen)

    # keys that change what is seen

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Keys of other views do nothing here."""
        called = f"{action}({', '.join(repr(p) for p in parameters)})" if parameters else action
        entries = [k for k in KEYS if k.where in MAIN and k.action == called]
        if self._small and any(k.level is not None for k in entries):
            return False  # nobody sees what it would act on
        return not entries or any(works_in(k, self.view, proposal_open=self._proposal_open) for k in entries)

    @property
    def _proposal_open(self) -> bool:
        return (
            self._scene is not None and self._scene.snapshot is not None and self._scene.snapshot.proposal is not None
        )

    @property
    def _body(self) -> RowList | LinesPanel:
        body = self.query_one(f"#{self.view}")
        assert isinstance(body, RowList | LinesPanel)
        return body

    def _open(self, view: str) -> None:
        self.view = view
        for name in VIEWS:
            self.query_one(f"#{name}").display = name == view
        self.query_one("#overview").display = False
        self._close_filter()
        self._redraw()
        self.call_after_refresh(self._redraw)

    def action_ask(self, what: str) -> None:
        """Something that concerns the run or a dialog: the app does it."""
        self.post_message(self.Wanted(what))

    def action_view(self, view: str) -> None:
        """Open a view."""
        self._open(view)

    def on_tab_bar_chosen(self, message: TabBar.Chosen) -> None:
        """A tab was clicked."""
        self._open(message.view)

    def on_row_list_opened(self, message: RowList.Opened) -> None:
        """A row was clicked twice."""
        message.stop()
        self.post_message(self.Wanted("details"))

    def action_step_view(self, step: int) -> None:
        """The next or previous view."""
        self._open(VIEWS[(VIEWS.index(self.view) + step) % len(VIEWS)])

    def action_go(self, rows: int) -> None:
        """Up and down."""
        self._body.go(rows)
        self._after_move()

    def action_page(self, pages: int) -> None:
        """Page up and down."""
        self._body.page(pages)
        self._after_move()

    def action_first(self) -> None:
        """To the first row."""
        self._body.first()
        self._after_move()

    def action_last(self) -> None:
        """To the last row."""
        self._body.last()
        self._after_move()

    def _after_move(self) -> None:
        if self._scene is not None and self._scene.snapshot is not None:
            self._draw_tabs(self._scene, self._scene.snapshot)

    def action_mark(self) -> None:
        """Mark the device under the cursor, and go on to the next."""
        key = self.query_one(FleetTable).cursor_key
        if key is not None:
            self.marked ^= {key}
            self._redraw()
            self.query_one(FleetTable).go(1)

    def action_sort(self, step: int) -> None:
        """Sort by another column; the daemon's order is one of the stops."""
        stops = sortable(self.query_one(FleetTable).columns)
        at = stops.index(self.sort_by) if self.sort_by in stops else 0
        self.sort_by = stops[(at + step) % len(stops)]
        self.descending = descends(self.sort_by)
        self._redraw()

    def action_maximise(self) -> None:
        """Give the view the room of header, overview and why line."""
        self._maximised = not self._maximised
        self._redraw()
        self.call_after_refresh(self._redraw)

    def action_filter(self) -> None:
        """Open the filter."""
        field = self.query_one("#filter", Input)
        field.disabled = False
        field.add_class("-open")
        field.value = self.words[self.view]
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while typing."""
        if event.input.has_class("-open") and self.view in self.words:
            self.words[self.view] = event.value
            self._redraw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter."""
        event.stop()
        self._close_filter()

    def _close_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.remove_class("-open")
        if field.has_focus:
            self.set_focus(None)
        field.disabled = True

    def action_back(self) -> None:
        """One step back: the filter's field, the filter, the marks, the larger view, the fleet."""
        field = self.query_one("#filter", Input)
        if field.has_class("-open") or self.words.get(self.view):
            if self.view in self.words:
                self.words[self.view] = ""
            self._close_filter()
        elif self.view == "fleet" and self.marked:
            self.marked = frozenset()
        elif self._maximised:
            self._maximised = False
        elif self.view != "fleet":
            self._open("fleet")
            return
        self._redraw()

    # what the app needs

    def chosen_devices(self) -> tuple[str, ...]:
        """Ids of the marked devices, else of the one under the cursor."""
        if self.marked and self._scene is not None and self._scene.snapshot is not None:
            return tuple(d.id for d in self._scene.snapshot.devices if d.id in self.marked)
        key = self.query_one(FleetTable).cursor_key
        return (key,) if key is not None else ()

    def chosen_event(self) -> int | None:
        """Seq of the event under the cursor."""
        key = self.query_one(EventList).cursor_key
        return int(key) if key is not None else None

    def clear_marks(self) -> None:
        """After an action on the marked devices."""
        self.marked = frozenset()
        self._redraw()
