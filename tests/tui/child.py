"""A dashboard over a source that needs no daemon, for tests that need a real terminal: `python -m tests.tui.child MODE`.

MODE: plain; crash (an error in the application at the first key); fast (64 devices, a new snapshot every 10 ms).
"""

import itertools
import os
import sys

from textual.events import Key

from hexctl.tui.app import HexApp, show_app
from hexctl.tui.terminal import wants_ascii
from hexctl.tui.theme import choose_theme
from tests.tui.samples import FakeSource, sample_snapshot, wide_snapshot


class Fast(HexApp):
    """Draws as fast as it can."""

    def on_mount(self) -> None:
        seqs = itertools.count(2)
        self.set_interval(0.01, lambda: self.show_snapshot(wide_snapshot(64, next(seqs))))


class Crashing(HexApp):
    """Dies of its first key."""

    def on_key(self, event: Key) -> None:
        raise RuntimeError(f"made to crash by {event.key}")


async def nothing() -> None:
    """There is nothing to close."""


def main(mode: str) -> int:
    kind = {"plain": HexApp, "crash": Crashing, "fast": Fast}[mode]
    app = kind(
        FakeSource(sample_snapshot()), "local-7f3a", choose_theme(None, os.environ), ascii=wants_ascii(os.environ)
    )
    return show_app(app, nothing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
