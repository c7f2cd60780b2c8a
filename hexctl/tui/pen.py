"""From toned lines to strips of the screen: the only place where a tone becomes a style."""

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual.color import Color
from textual.filter import LineFilter
from textual.strip import Strip

from hexctl.tui.theme import Theme
from hexctl.tui.view.glyphs import to_ascii
from hexctl.tui.view.text import Line, Tone, width_of


class Pen:
    """Draws lines in a theme. `outdated` draws everything in one grey: the daemon does not answer."""

    def __init__(self, theme: Theme, *, outdated: bool = False) -> None:
        self.theme = theme
        self.outdated = outdated

    def strip(self, spans: Line, width: int, base: Style, over: Tone | None = None) -> Strip:
        """A strip of exactly `width` cells: the line over the widget's own style, `over` laid on top."""
        styles = self.theme.styles
        top = styles[over] if over is not None else None
        grey = styles["outdated"] if self.outdated else None
        segments = []
        for text, tone in spans:
            style = base + (grey if grey is not None else styles[tone])
            segments.append(Segment(text, style + top if top is not None else style))
        filler = base + top if top is not None else base
        return Strip(segments, width_of(spans)).adjust_cell_length(width, filler)


class AsciiFilter(LineFilter):
    """Nothing but ASCII leaves for the terminal, whoever drew it: ours, Textual's chrome, or text of the daemon."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Each segment in ASCII, cell for cell."""
        del background
        return [s if s.text.isascii() else Segment(to_ascii(s.text), s.style, s.control) for s in segments]


def joined(lines: Sequence[Line]) -> str:
    """Plain text of lines, for the clipboard."""
    return "\n".join("".join(s.text for s in spans).rstrip() for spans in lines)
