"""A few lines of toned text that do not scroll: header, banner, why line, footer."""

from collections.abc import Sequence

from rich.style import Style
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.widget import Widget

from hexctl.tui.pen import Pen
from hexctl.tui.view.text import Line, Tone


class LinesBar(Widget, can_focus=False):
    """Shows the lines it is given, as high as they are many."""

    DEFAULT_CSS = "LinesBar { height: auto; width: 1fr; }"

    def __init__(self, *, over: Tone | None = None, id: str | None = None) -> None:
        super().__init__(id=id)
        self._over: Tone | None = over
        self._lines: tuple[Line, ...] = ()
        self._pen: Pen | None = None
        self._base = Style()

    def show(self, lines: Sequence[Line], pen: Pen) -> None:
        """Draw these lines from now on."""
        fresh = tuple(lines)
        if fresh == self._lines and pen is self._pen:
            return
        taller = len(fresh) != len(self._lines)
        self._lines, self._pen = fresh, pen
        self.refresh(layout=taller)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """As many rows as there are lines."""
        return len(self._lines)

    def render_lines(self, crop: Region) -> list[Strip]:
        """Rows of the viewport; the widget's own style is looked up once a frame, not once a row."""
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Row `y`."""
        if self._pen is None or y >= len(self._lines):
            return Strip.blank(self.size.width, self._base)
        return self._pen.strip(self._lines[y], self.size.width, self._base, self._over)
