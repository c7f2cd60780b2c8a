"""The palette: Textual's own, fed by the key registry."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from textual.command import CommandPalette, SearchIcon, SimpleCommand, SimpleProvider
from textual.screen import Screen

from hexctl.tui.keys import Key

NAMES = {"refresh": "refresh now", "sort.next": "sort by the next column", "copy": "copy identity or event"}


def palette_entries(keys: Iterable[Key], run: Callable[[str], None]) -> list[SimpleCommand]:
    """An entry a key: its words, and how the key itself would have done it."""
    return [SimpleCommand(NAMES.get(k.id, k.description), partial(run, k.action), f"key {k.shown}") for k in keys if k.palette]


class Palette(CommandPalette):
    """With a search mark that is one cell wide everywhere, and a box that any terminal can draw."""

    DEFAULT_CSS = """
    Palette > .command-palette--highlight { text-style: bold underline; }
    Palette #--input { border: none; background: $panel; }
    Palette SearchIcon { color: $primary; }
    Palette CommandList { border: none; background: $panel; }
    Palette CommandList:focus { border: none; }
    """

    def __init__(self, screen: Screen[Any], entries: list[SimpleCommand]) -> None:
        super().__init__(providers=[SimpleProvider(screen, entries)], placeholder="what to do")

    def on_mount(self) -> None:
        """Put our mark in place of the picture."""
        self.query_one(SearchIcon).icon = ":"
