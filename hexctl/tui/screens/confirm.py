"""Consent: L1 asks with Cancel focused, L2 wants a name typed. Nothing is sent unless this screen returns True."""

from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Input

from hexctl.tui.pen import Pen
from hexctl.tui.screens.bindings import bindings_at
from hexctl.tui.screens.dialog import Dialog
from hexctl.tui.view.consent import Ask
from hexctl.tui.view.text import Line, Span, line, width_of
from hexctl.tui.widgets.lines_bar import LinesBar


class ConfirmScreen(Dialog[bool], inherit_bindings=False):
    """The dialog for one `Ask`; returns whether to go on."""

    BINDINGS: ClassVar[list[BindingType]] = bindings_at(("dialog",))
    DEFAULT_CSS = """
    ConfirmScreen LinesBar { margin-top: 1; }
    ConfirmScreen Input { border: none; height: 1; margin-top: 1; padding: 0 1; background: $panel; }
    """

    def __init__(self, ask: Ask, pen: Pen, *, width: int, ascii: bool) -> None:
        wide = min(width - 4, max(56, *(width_of(x) + 4 for x in ask.impact), len(ask.title) + 6))
        super().__init__(
            ask.title, lambda _w, _h: ask.impact, len(ask.impact), pen, width=wide, ascii=ascii, danger=ask.level == 2
        )
        self._ask = ask
        self._on_cancel = True
        self._typed = ""

    def buttons(self) -> ComposeResult:
        """Cancel, the deed, and for L2 the field to type into."""
        if self._ask.type_to_confirm:
            yield Input(placeholder=f"type {self._ask.type_to_confirm} to confirm")
        yield LinesBar(id="buttons")

    def on_mount(self) -> None:
        """Cancel has the focus; at L2 the field takes what is typed."""
        self._draw()
        if self._ask.type_to_confirm:
            self.query_one(Input).focus()

    def _draw(self) -> None:
        deed = self._ask.verb
        ready = not self._ask.type_to_confirm or self._typed == self._ask.type_to_confirm
        cancel = Span("[ Cancel ]", "tab") if self._on_cancel else Span("  Cancel  ", "dim")
        go = Span(f"[ {deed} ]", "tab") if not self._on_cancel else Span(f"  {deed}  ", "strong" if ready else "faint")
        hint = Span("y", "key") if not self._ask.type_to_confirm else Span("Enter" if ready else "", "key")
        spans: Line = line(cancel, Span("    "), go, Span(" "), hint)
        room = max(0, (self.query_one("#buttons", LinesBar).size.width or 52) - width_of(spans)) // 2
        self.query_one("#buttons", LinesBar).show([line(Span(" " * room), *spans)], self._pen)

    def on_resize(self, event: events.Resize) -> None:
        """Keep the buttons in the middle."""
        del event
        self.call_after_refresh(self._draw)

    def on_input_changed(self, event: Input.Changed) -> None:
        """The name as typed so far."""
        self._typed = event.value.strip()
        self._on_cancel = self._typed != self._ask.type_to_confirm
        self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Enter in the field goes on only with the right name."""
        if event.value.strip() == self._ask.type_to_confirm:
            self.dismiss(True)

    def action_confirm(self) -> None:
        """`y`: go on, at L1 only."""
        if not self._ask.type_to_confirm:
            self.dismiss(True)

    def action_cancel(self) -> None:
        """Leave everything as it is."""
        self.dismiss(False)

    def action_other(self) -> None:
        """The other button."""
        if not self._ask.type_to_confirm:
            self._on_cancel = not self._on_cancel
            self._draw()

    def action_press(self) -> None:
        """Press the focused button."""
        if self._on_cancel or not self._ask.type_to_confirm:
            self.dismiss(not self._on_cancel)
