"""The palette: Textual's own, fed by the key registry."""

from collections.abc import Callable, Iterable
from functools import partial

from textual.command import CommandPalette, DiscoveryHit, Hit, Hits, Provider, SearchIcon, SimpleCommand

from hexctl.tui.keys import Key

NAMES = {"refresh": "refresh now", "sort.next": "sort by the next column", "copy": "copy identity or event"}


def palette_entries(keys: Iterable[Key], run: Callable[[str], None]) -> list[SimpleCommand]:
    """An entry a key: its words, and how the key itself would have done it."""
    return [
        SimpleCommand(f"{NAMES.get(k.id, k.description)}   ({k.shown})", partial(run, k.action))
        for k in keys
        if k.palette
    ]


class Entries(Provider):
    """The entries of the palette that asks."""

    async def discover(self) -> Hits:
        """All of them, before anything is typed."""
        for entry in self._entries():
            yield DiscoveryHit(entry.name, entry.callback)

    async def search(self, query: str) -> Hits:
        """Those that match."""
        matcher = self.matcher(query)
        for entry in self._entries():
            score = matcher.match(entry.name)
            if score > 0:
                yield Hit(score, matcher.highlight(entry.name), entry.callback)

    def _entries(self) -> list[SimpleCommand]:
        palette = self.app.screen
        return palette.entries if isinstance(palette, Palette) else []


class Palette(CommandPalette):
    """With a search mark that is one cell wide everywhere, and a box that any terminal can draw."""

    DEFAULT_CSS = """
    Palette > .command-palette--highlight { text-style: bold underline; }
    Palette #--container { width: 64; max-width: 100%; }
    Palette #--input { border: none; background: $panel; }
    Palette SearchIcon { color: $primary; }
    Palette CommandList { border: none; background: $panel; }
    Palette CommandList:focus { border: none; }
    """

    def __init__(self, entries: list[SimpleCommand]) -> None:
        super().__init__(providers=[Entries], placeholder="what to do")
        self.entries = entries

    def on_mount(self) -> None:
        """Put our mark in place of the picture."""
        self.query_one(SearchIcon).icon = ":"
