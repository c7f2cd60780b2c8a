"""The fleet table: line API, so that a tick costs the visible rows and nothing else."""

from collections.abc import Sequence

from hexctl.tui.pen import Pen
from hexctl.tui.view.fleet import Column, FleetRow, columns_for, head_line, row_line
from hexctl.tui.view.text import Line, Span, line
from hexctl.tui.widgets.row_list import RowList


class FleetTable(RowList, can_focus=False, inherit_bindings=False):
    """One row a device; marks and the sorted column are given by the screen."""

    head_rows = 1

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._rows: tuple[FleetRow, ...] = ()
        self._columns: tuple[Column, ...] = ()
        self._columns_width = -1
        self._marked: frozenset[str] = frozenset()
        self._sort: str | None = None
        self._descending = False

    def show(
        self, rows: Sequence[FleetRow], pen: Pen, *, marked: frozenset[str], sort: str | None, descending: bool
    ) -> None:
        """Draw these rows, already filtered and sorted."""
        self._rows = tuple(rows)
        self._marked, self._sort, self._descending = marked, sort, descending
        self._columns_width = -1
        self.set_keys([r.id for r in self._rows], pen)

    @property
    def columns(self) -> tuple[Column, ...]:
        """The columns on the screen."""
        width = self.scrollable_content_region.width
        if width != self._columns_width:
            self._columns, self._columns_width = columns_for(self._rows, width), width
        return self._columns

    def head_line(self, y: int, width: int) -> Line:
        """The column heads."""
        del y
        if not self._rows:
            return line(Span("  no device matches", "dim"))
        return head_line(self.columns, width, self._sort, self._descending)

    def row_line(self, index: int, width: int, *, cursor: bool) -> Line:
        """One device."""
        row = self._rows[index]
        return row_line(row, self.columns, width, cursor=cursor, marked=row.id in self._marked)
