"""The row of views, with what is filtered, marked and sorted at its right end."""

from rich.style import Style
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from hexctl.tui.pen import Pen
from hexctl.tui.view.text import Line, Span, clip, line, width_of


class TabBar(Widget, can_focus=False):
    """One line: the views, the open one highlighted."""

    DEFAULT_CSS = "TabBar { height: 1; width: 1fr; }"

    class Chosen(Message):
        """A view was clicked."""

        def __init__(self, view: str) -> None:
            super().__init__()
            self.view = view

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._tabs: tuple[tuple[str, str], ...] = ()
        self._open = ""
        self._note: Line = ()
        self._pen: Pen | None = None
        self._base = Style()

    def show(self, tabs: tuple[tuple[str, str], ...], open_: str, note: Line, pen: Pen) -> None:
        """`tabs`: (view, title) from left to right; `note`: shown at the right."""
        self._tabs, self._open, self._note, self._pen = tabs, open_, note, pen
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Open the view under the mouse."""
        x = 0
        for view, title in self._tabs:
            x += len(title) + 2
            if event.x < x:
                self.post_message(self.Chosen(view))
                return

    def render_lines(self, crop: Region) -> list[Strip]:
        """Rows of the viewport; the widget's own style is looked up once a frame, not once a row."""
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """The one line."""
        if self._pen is None or y:
            return Strip.blank(self.size.width, self._base)
        spans = [Span(f" {title} ", "tab" if view == self._open else "label") for view, title in self._tabs]
        note = clip(self._note, max(0, self.size.width - width_of(tuple(spans)) - 2))
        room = self.size.width - width_of(tuple(spans)) - width_of(note) - 1
        return self._pen.strip(line(*spans, Span(" " * max(0, room)), *note), self.size.width, self._base)
