"""A dashboard over a source that needs no daemon, for tests that need a real terminal: `python -m tests.tui.child MODE`.

MODE: plain; crash (an error in the application after the first key); fast (512 devices, a new snapshot every 50 ms).
Says `ready` on descriptor 3, if it has one, when the first snapshot was shown.
"""

import os
import sys

from textual.events import Key

from hexctl.tui.app import HexApp, show_app
from hexctl.tui.terminal import wants_ascii
from hexctl.tui.theme import choose_theme
from runtime.api.wire import Snapshot
from tests.tui.samples import FakeSource, sample_snapshot, wide_snapshot


class Busy(FakeSource):
    """A new snapshot whenever one is asked for; its seq says how many were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.seq = 0

    async def snapshot(self, after: int, wait_s: float) -> Snapshot | None:
        self.seq += 1
        return wide_snapshot(512, self.seq)


class Crashing(HexApp):
    """Dies of its first key."""

    def on_key(self, event: Key) -> None:
        raise RuntimeError(f"made to crash by {event.key}")


async def nothing() -> None:
    """There is nothing to close."""


def main(mode: str) -> int:
    source = Busy() if mode == "fast" else FakeSource(sample_snapshot())
    kind = Crashing if mode == "crash" else HexApp
    app = kind(source, "local-7f3a", choose_theme(None, os.environ), ascii=wants_ascii(os.environ))
    return show_app(app, "local-7f3a", nothing)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
