"""Every glyph beyond ASCII that the console draws, each one cell wide, with its ASCII stand-in of one cell."""

from rich.cells import cell_len

EIGHTHS_UP = " ▁▂▃▄▅▆▇█"
EIGHTHS_RIGHT = " ▏▎▍▌▋▊▉█"

ASCII_OF: dict[str, str] = {
    # marks
    "●": "*", "○": "o", "◌": "^", "◐": "~",
    "◑": "`",
    "■": "&", "▲": "!", "△": "/", "▼": "v", "✕": "x", "◇": "?", "◆": "%", "▸": ">", "✓": "+",
    "·": ".", "•": "*", "…": "~", "—": "-", "–": "-", "−": "-", "→": ">", "←": "<", "↑": "^", "↓": "v", "×": "x",
    "≤": "<", "±": "~", "°": " ", "η": "n", "Δ": "d", "Σ": "S",
    # bars and sparks
    "▁": "_", "▂": ".", "▃": ":", "▄": "-", "▅": "=", "▆": "+", "▇": "*", "█": "#",
    "▏": ".", "▎": ".", "▍": ":", "▌": ":", "▋": "+", "▊": "+", "▉": "*", "▕": "|", "▐": "|",
    # rules and boxes, ours and Textual's
    "─": "-", "│": "|", "┌": "+", "┐": "+", "└": "+", "┘": "+", "├": "+", "┤": "+", "┬": "+", "┴": "+", "┼": "+",
    "━": "=", "┃": "|", "╭": "+", "╮": "+", "╯": "+", "╰": "+", "▔": "-", "▀": "-", "╸": "-", "╺": "-", "▶": ">",
    "“": '"', "”": '"', "‘": "'", "’": "'",
}  # fmt: skip
_TABLE = str.maketrans(ASCII_OF)


def to_ascii(text: str) -> str:
    """`text` in ASCII, cell for cell: what has no stand-in becomes one `?` a cell."""
    if text.isascii():
        return text
    text = text.translate(_TABLE)
    if text.isascii():
        return text
    return "".join(ch if ch.isascii() else "?" * cell_len(ch) for ch in text)
