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
        self._base = Style()
        self._styles: dict[tuple[Tone, Tone | None], Style] = {}

    def strip(self, spans: Line, width: int, base: Style, over: Tone | None = None) -> Strip:
        """A strip of exactly `width` cells: the line over the widget's own style, `over` laid on top."""
        if base is not self._base:  # another widget, or another frame: what was mixed is of no use
            self._base, self._styles = base, {}
        segments = [Segment(text, self._mixed(tone, over)) for text, tone in spans]
        strip = Strip(segments, width_of(spans))
        return strip.adjust_cell_length(width, base if over is None else base + self.theme.styles[over])

    def _mixed(self, tone: Tone, over: Tone | None) -> Style:
        style = self._styles.get((tone, over))
        if style is None:
            style = self._base + self.theme.styles["outdated" if self.outdated else tone]
            if over is not None:
                style += self.theme.styles[over]
            self._styles[tone, over] = style
        return style


class AsciiFilter(LineFilter):
    """Nothing but ASCII leaves for the terminal, whoever drew it: ours, Textual's chrome, or text of the daemon."""

    def apply(self, segments: list[Segment], background: Color) -> list[Segment]:
        """Each segment in ASCII, cell for cell."""
        del background
        return [s if s.text.isascii() else Segment(to_ascii(s.text), s.style, s.control) for s in segments]


def joined(lines: Sequence[Line]) -> str:
    """Plain text of lines, for the clipboard."""
    return "\n".join("".join(s.text for s in spans).rstrip() for spans in lines)
