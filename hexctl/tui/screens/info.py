"""Help and details: text to read. It scrolls with the usual keys; Esc, q, ? and Enter close it."""

from typing import ClassVar

from textual.binding import BindingType

from hexctl.tui.screens.bindings import bindings_of
from hexctl.tui.screens.dialog import Dialog
from hexctl.tui.widgets.lines_panel import LinesPanel


class InfoScreen(Dialog[None], inherit_bindings=False):
    """Shows lines and returns nothing."""

    BINDINGS: ClassVar[list[BindingType]] = bindings_of(
        {
            **dict.fromkeys(("back", "quit", "help", "details"), "close"),
            **dict.fromkeys(("go.down", "go.up", "go.page_down", "go.page_up", "go.first", "go.last"), ""),
        }
    )

    def action_close(self) -> None:
        """Back to the screen below."""
        self.dismiss(None)

    def action_go(self, rows: int) -> None:
        """Scroll."""
        self.query_one(LinesPanel).go(rows)

    def action_page(self, pages: int) -> None:
        """Scroll by pages."""
        self.query_one(LinesPanel).page(pages)

    def action_first(self) -> None:
        """To the top."""
        self.query_one(LinesPanel).first()

    def action_last(self) -> None:
        """To the end."""
        self.query_one(LinesPanel).last()
