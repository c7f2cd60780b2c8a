"""Random keys: whatever is pressed, no command of level 1 or 2 leaves without a dialog that was agreed to."""

import asyncio
import random

import pytest

from hexctl.tui.keys import KEYS
from hexctl.tui.screens.confirm import ConfirmScreen
from hexctl.tui.screens.main import MainScreen
from planner.record import replace
from tests.tui.samples import FakeSource, app_on, bare_snapshot, sample_snapshot

EVERY_KEY = sorted(
    {key for k in KEYS for key in k.keys}
    | set("abdefhilmnosvwABCEFHIJKLMNOPQSTUVWXYZ0156789!@#.,")
    | {"backspace", "delete"}
)
LEAVING = {"q", "ctrl+c", "ctrl+q"}
ACTING = (
    "c",
    "c",
    "c",
    "j",
    "1",
    "escape",
    "D",
    "p",
    "R",
    "a",
    "x",
    "u",
    "r",
    "t",
    "y",
    "n",
    "space",
    "enter",
    "j",
    "k",
    "1",
    "3",
    "escape",
)


async def press_at_random(keys: int, seed: int) -> FakeSource:
    """Press random keys; a dialog that asks for consent is always refused. Returns what was sent."""
    rng = random.Random(seed)
    s = sample_snapshot()
    worlds = [s, replace(s, devices=s.devices[:2]), replace(s, proposal=None), bare_snapshot()]
    source = FakeSource(s)
    app = app_on(source)
    usable = [k for k in EVERY_KEY if k not in LEAVING]
    async with app.run_test(size=(80, 24)) as pilot:
        async with asyncio.timeout(60):
            while not isinstance(app.screen, MainScreen) or app._snapshot is None:
                await pilot.pause()
        for i in range(keys):
            if isinstance(app.screen, ConfirmScreen):
                await pilot.press("escape")
                continue
            if i % 50 == 49:
                app.show_snapshot(rng.choice(worlds))
            typing = app.focused is not None
            pool = ("escape", "enter", *usable) if rng.random() < 0.3 and not typing else ACTING
            await pilot.press("escape" if typing and rng.random() < 0.3 else rng.choice(pool))
        assert app._exception is None
    return source


def judge(source: FakeSource) -> None:
    strong = [c.name for c in source.commands if c.force or c.name in ("drain", "replan", "approve", "down")]
    assert strong == []


async def test_random_keys_send_nothing_that_needs_consent() -> None:
    source = await press_at_random(90, seed=7)
    judge(source)
    assert source.commands  # the keys did reach the application: L0 commands were sent


@pytest.mark.accept
@pytest.mark.parametrize("seed", range(5))
async def test_ten_thousand_random_keys(seed: int) -> None:
    source = await press_at_random(2000, seed)
    judge(source)
    assert source.commands
