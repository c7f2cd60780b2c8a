"""What the tests with a pilot share: waiting, and reading the screen."""

import asyncio
from collections.abc import Callable

from textual.command import CommandList
from textual.pilot import Pilot

from hexctl.tui.app import HexApp
from hexctl.tui.screens.main import MainScreen
from tests.tui.samples import (
    sample_snapshot,
)

IDS = [d.id for d in sample_snapshot().devices]
WIDE, NARROW = (140, 45), (80, 24)


async def until(pilot: Pilot[int], holds: Callable[[], bool]) -> None:
    """Let the application run until `holds`; fails after a minute, which a busy machine may need."""
    async with asyncio.timeout(60):
        while not holds():
            await pilot.pause()


def main_of(app: HexApp) -> MainScreen:
    screen = app.screen_stack[0]
    assert isinstance(screen, MainScreen)
    return screen


def screen_text(app: HexApp) -> str:
    """What stands on the screen, as text."""
    return "\n".join("".join(segment.text for segment in strip) for strip in app.screen._compositor.render_strips())


def toasts(app: HexApp) -> str:
    return "\n".join(n.message for n in app._notifications)


def found(app: HexApp) -> list[str]:
    """What the palette lists."""
    entries = app.screen.query_one(CommandList)
    return [str(entries.get_option_at_index(i).prompt) for i in range(entries.option_count)]


async def started(pilot: Pilot[int]) -> None:
    await until(pilot, lambda: "local-7f3a" in screen_text(pilot.app))  # type: ignore[arg-type]
