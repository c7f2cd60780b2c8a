"""What fleet table and event list share: a cursor that stays on its row while rows come, go and change places."""

from collections.abc import Sequence

from rich.style import Style
from textual import events
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hexctl.tui.pen import Pen
from hexctl.tui.view.text import Line


class RowList(ScrollView, can_focus=False, inherit_bindings=False):
    """Rows by key, one line each, drawn only where they are visible; `head_rows` lines stay on top."""

    DEFAULT_CSS = "RowList { height: 1fr; width: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }"
    head_rows = 0

    class Opened(Message):
        """A row was clicked twice."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._keys: tuple[str, ...] = ()
        self._index: dict[str, int] = {}
        self._pen: Pen | None = None
        self._base = Style()
        self._cursor = 0

    def set_keys(self, keys: Sequence[str], pen: Pen, *, follow_first: bool = False) -> None:
        """New rows by key. The cursor keeps its row; on row 0 with `follow_first` it keeps the place instead."""
        old = self.cursor_key
        self._keys, self._pen = tuple(keys), pen
        self._index = {key: i for i, key in enumerate(self._keys)}
        if not (follow_first and self._cursor == 0):
            self._cursor = self._index.get(old or "", self._cursor)
        self._cursor = max(0, min(self._cursor, len(self._keys) - 1))
        self.virtual_size = Size(self.scrollable_content_region.width, len(self._keys) + self.head_rows)
        self._reveal()
        self.refresh()

    @property
    def cursor_key(self) -> str | None:
        """Key of the row under the cursor; None when there are no rows."""
        return self._keys[self._cursor] if self._cursor < len(self._keys) else None

    @property
    def visible_rows(self) -> tuple[int, int, int]:
        """First and last visible row (from 1) and the number of rows."""
        count = len(self._keys)
        top = self.scroll_offset.y
        return (min(top + 1, count), min(count, top + max(0, self.size.height - self.head_rows)), count)

    def go(self, rows: int) -> None:
        """Move the cursor."""
        self.move_to(self._cursor + rows)

    def page(self, pages: int) -> None:
        """Move the cursor by pages."""
        self.go(pages * max(1, self.size.height - self.head_rows - 1))

    def first(self) -> None:
        """Cursor to the first row."""
        self.move_to(0)

    def last(self) -> None:
        """Cursor to the last row."""
        self.move_to(len(self._keys) - 1)

    def move_to(self, index: int) -> None:
        """Cursor to a row, which is scrolled into view."""
        self._cursor = max(0, min(index, len(self._keys) - 1))
        self._reveal()
        self.refresh()

    def _reveal(self) -> None:
        height = max(1, self.size.height - self.head_rows)
        top = self.scroll_offset.y
        if self._cursor < top:
            self.scroll_to(y=self._cursor, animate=False, immediate=True)
        elif self._cursor >= top + height:
            self.scroll_to(y=self._cursor - height + 1, animate=False, immediate=True)

    def on_resize(self, event: events.Resize) -> None:
        """Keep the cursor in view."""
        del event
        self._reveal()
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """A click moves the cursor, a second one opens the row."""
        row = event.y - self.head_rows
        if row < 0:
            return
        index = row + self.scroll_offset.y
        if index < len(self._keys):
            self.move_to(index)
            if event.chain == 2:
                self.post_message(self.Opened())

    def head_line(self, y: int, width: int) -> Line:
        """Row `y` of the head."""
        raise NotImplementedError

    def row_line(self, index: int, width: int, *, cursor: bool) -> Line:
        """The line of one row."""
        raise NotImplementedError

    def render_lines(self, crop: Region) -> list[Strip]:
        """Rows of the viewport; the widget's own style is looked up once a frame, not once a row."""
        self._base = self.rich_style
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Row `y` of the viewport."""
        width = self.scrollable_content_region.width
        if self._pen is None:
            return Strip.blank(width, self._base)
        if y < self.head_rows:
            return self._pen.strip(self.head_line(y, width), width, self._base)
        index = y - self.head_rows + self.scroll_offset.y
        if index >= len(self._keys):
            return Strip.blank(width, self._base)
        here = index == self._cursor
        return self._pen.strip(self.row_line(index, width, cursor=here), width, self._base, "cursor" if here else None)
