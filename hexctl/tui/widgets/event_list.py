"""The event list, newest first."""

from collections.abc import Sequence

from hexctl.tui.pen import Pen
from hexctl.tui.view.events import EventLine, event_spans
from hexctl.tui.view.text import Line, Span, line
from hexctl.tui.widgets.row_list import RowList


class EventList(RowList, can_focus=False, inherit_bindings=False):
    """One event a row. On the first row the cursor follows what is new."""

    head_rows = 1

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: tuple[EventLine, ...] = ()

    def show(self, rows: Sequence[EventLine], pen: Pen) -> None:
        """Draw these events, already filtered."""
        self._rows = tuple(rows)
        self.set_keys([str(r.seq) for r in self._rows], pen, follow_first=True)

    def head_line(self, y: int, width: int) -> Line:
        """Column heads, or that there is nothing."""
        del y
        if not self._rows:
            return line(Span("  no event matches", "dim"))
        kind = "KIND".ljust(18) if width >= 100 else ""
        return line(
            Span(f" {'TIME':<8} {'AGO':>7}   {kind} MESSAGE" if kind else f" {'TIME':<8} {'AGO':>7}   MESSAGE", "label")
        )

    def row_line(self, index: int, width: int, *, cursor: bool) -> Line:
        """One event."""
        return event_spans(self._rows[index], width, cursor=cursor)
