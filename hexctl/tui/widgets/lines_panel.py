"""A scrolling block of toned lines that is laid out for its own size: flow, plan, overview, details."""

from collections.abc import Callable

from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hexctl.tui.pen import Pen
from hexctl.tui.view.text import Line

Builder = Callable[[int, int], tuple[Line, ...]]  # width, height in cells -> lines


class LinesPanel(ScrollView, can_focus=False, inherit_bindings=False):
    """Shows what its builder makes for its present size; built again when the size changes."""

    DEFAULT_CSS = "LinesPanel { height: 1fr; width: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }"

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._build: Builder | None = None
        self._lines: tuple[Line, ...] = ()
        self._pen: Pen | None = None
        self._base = Style()

    def show(self, build: Builder, pen: Pen) -> None:
        """Draw what `build` makes from now on."""
        self._build, self._pen = build, pen
        self._layout_lines()

    def _layout_lines(self) -> None:
        if self._build is None or not self.size.width:
            return
        self._lines = self._build(self.scrollable_content_region.width, self.size.height)
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._lines))
        self.refresh()

    def on_resize(self, event: events.Resize) -> None:
        """A new size, a new layout."""
        del event
        self._layout_lines()

    def go(self, rows: int) -> None:
        """Scroll by rows."""
        self.scroll_relative(y=rows, animate=False)

    def page(self, pages: int) -> None:
        """Scroll by pages."""
        self.scroll_relative(y=pages * max(1, self.size.height - 1), animate=False)

    def first(self) -> None:
        """To the top."""
        self.scroll_home(animate=False)

    def last(self) -> None:
        """To the end."""
        self.scroll_end(animate=False)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Rows of the viewport; the widget's own style is looked up once a frame, not once a row."""
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Row `y` of the viewport."""
        index = y + self.scroll_offset.y
        width = self.scrollable_content_region.width
        if self._pen is None or index >= len(self._lines):
            return Strip.blank(width, self._base)
        return self._pen.strip(self._lines[index], width, self._base)
