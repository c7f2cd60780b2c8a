"""What all dialogs share: a box in the middle with a title and lines of toned text."""

from typing import TypeVar

from rich.text import Text
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import ModalScreen

from hexctl.tui.pen import Pen
from hexctl.tui.view.text import clean
from hexctl.tui.widgets.lines_panel import Builder, LinesPanel

T = TypeVar("T")


class Dialog(ModalScreen[T], inherit_bindings=False):
    """A box as wide as `width`, with `rows` rows of text above whatever `buttons` composes."""

    AUTO_FOCUS = ""
    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 55%; }
    Dialog > Vertical { border: solid $primary; border-title-color: $foreground; border-title-style: bold;
        background: $surface; padding: 0 1; height: auto; max-height: 100%; max-width: 100%; }
    Dialog > Vertical.-danger { border: solid $error; }
    Dialog.-ascii > Vertical { border: ascii $primary; }
    Dialog LinesPanel { height: auto; }
    """

    def __init__(
        self, title: str, build: Builder, rows: int, pen: Pen, *, width: int, ascii: bool, danger: bool = False
    ) -> None:
        super().__init__(classes="-ascii" if ascii else "")
        self._title, self._build, self._rows, self._pen = clean(title), build, rows, pen
        self._width, self._danger = width, danger

    def compose(self) -> ComposeResult:
        """The box."""
        with Vertical(classes="-danger" if self._danger else "") as box:
            box.styles.width = self._width
            yield LinesPanel()
            yield from self.buttons()

    def buttons(self) -> ComposeResult:
        """What stands below the text."""
        yield from ()

    def on_mount(self) -> None:
        """Fill the box; it leaves the screen's edge free and scrolls when there is more."""
        box, panel = self.query_one(Vertical), self.query_one(LinesPanel)
        box.border_title = Text(self._title)
        panel.styles.height = min(self._rows, max(3, self.app.size.height - 6))
        panel.show(self._build, self._pen)
