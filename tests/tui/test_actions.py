"""Keys that act on the run: every level of consent, refusals, undo."""

import pytest

from hexctl.tui.keys import keys_at
from hexctl.tui.screens.confirm import ConfirmScreen
from hexctl.tui.screens.main import MainScreen
from hexctl.tui.screens.pin import PinScreen
from planner.record import replace
from runtime.api.wire import CommandResult
from tests.tui.pilots import IDS, NARROW, WIDE, main_of, screen_text, started, toasts, until
from tests.tui.samples import FakeSource, app_on, quiet_snapshot, sample_snapshot


async def test_cordon_acts_at_once_toggles_and_can_be_undone() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("j", "c")
        await until(pilot, lambda: len(source.commands) == 1)
        assert source.sent == [("cordon", IDS[1], None)]
        assert source.commands[0].author == "mia"
        assert source.commands[0].key
        await until(pilot, lambda: "u undoes" in toasts(app))
        await pilot.press("u")
        await until(pilot, lambda: len(source.commands) == 2)
        assert source.sent[1] == ("uncordon", IDS[1], None)
        assert source.commands[0].key != source.commands[1].key
        await pilot.press("u")
        await until(pilot, lambda: "nothing to undo" in toasts(app))
        await pilot.press("G", "c")
        await until(pilot, lambda: len(source.commands) == 3)
        assert source.sent[2] == ("uncordon", IDS[5], None)


async def test_marked_devices_are_cordoned_together() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("j", "space", "space", "c")
        await until(pilot, lambda: len(source.commands) == 2)
        assert source.sent == [("cordon", IDS[1], None), ("cordon", IDS[2], None)]
        assert main_of(app).marked == frozenset()


async def test_drain_asks_with_cancel_focused() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        for cancel in ("enter", "escape", "n", "space"):
            await pilot.press("j", "D")
            assert isinstance(app.screen, ConfirmScreen)
            assert "they go on elsewhere from their tokens" in screen_text(app) or "holds no replica" in screen_text(
                app
            )
            assert "[ Cancel ]" in screen_text(app)
            await pilot.press(cancel)
            assert isinstance(app.screen, MainScreen)
        assert source.commands == []
        await pilot.press("g", "j", "D", "y")
        await until(pilot, lambda: len(source.commands) == 1)
        await pilot.press("D", "tab", "enter")
        await until(pilot, lambda: len(source.commands) == 2)
        assert source.sent == [("drain", IDS[1], None)] * 2
        assert not any(c.force for c in source.commands)


async def test_the_last_rollout_device_wants_its_name_typed() -> None:
    s = sample_snapshot()
    source = FakeSource(replace(s, devices=s.devices[:2]))
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("j", "c")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("enter", "y", "tab", "right", "enter", "backspace")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press(*"n0/gpu0", "enter")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("backspace")
        assert source.commands == []
        await pilot.press("1", "enter")
        await until(pilot, lambda: len(source.commands) == 1)
        assert source.commands[0].force
        assert source.sent == [("cordon", IDS[1], None)]


@pytest.mark.parametrize(
    ("key", "name", "role"), [("r", "pin", "rollout"), ("t", "pin", "train"), ("x", "unpin", None)]
)
async def test_pin_then_a_role(key: str, name: str, role: str | None) -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("j", "p")
        assert isinstance(app.screen, PinScreen)
        for entry in keys_at(("pin",)):
            assert entry.description in screen_text(app)
        await pilot.press(key)
        await until(pilot, lambda: len(source.commands) == 1)
        assert source.sent == [(name, IDS[1], role)]


@pytest.mark.parametrize("key", ["escape", "q", "p", "enter", "R", "down"])
async def test_pin_then_anything_else_goes_back(key: str) -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("p", key)
        assert isinstance(app.screen, MainScreen)
        assert source.commands == []


async def test_replan_asks() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("2", "R", "escape")
        assert source.commands == []
        await pilot.press("R", "y")
        await until(pilot, lambda: source.sent == [("replan", None, None)])


async def test_approve_and_reject_only_in_the_plan_view_with_the_revision_seen() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("a", "x", "2", "a", "x", "4", "a", "x")
        assert isinstance(app.screen, MainScreen)
        assert source.commands == []
        await pilot.press("3", "a")
        assert isinstance(app.screen, ConfirmScreen)
        await pilot.press("y")
        await until(pilot, lambda: len(source.commands) == 1)
        await pilot.press("x")
        await until(pilot, lambda: len(source.commands) == 2)
        assert [(c.name, c.plan_rev) for c in source.commands] == [("approve", 7), ("reject", 7)]
        app.show_snapshot(quiet_snapshot())
        await pilot.press("a", "x")
        assert isinstance(app.screen, MainScreen)
        assert len(source.commands) == 2


async def test_r_only_refreshes() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("r")
        assert source.commands == []
        assert isinstance(app.screen, MainScreen)


async def test_refusals_are_said_and_not_undone() -> None:
    source = FakeSource(sample_snapshot())
    source.refuse = "plan r7 is no longer open"
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("3", "a", "y")
        await until(pilot, lambda: "plan r7 is no longer open (look again)" in toasts(app))
        await pilot.press("1", "j", "c")
        await until(pilot, lambda: len(source.commands) == 2)
        await pilot.press("u")
        await until(pilot, lambda: "nothing to undo" in toasts(app))


async def test_a_daemon_that_does_not_accept_is_quoted_without_its_markup_being_read() -> None:
    source = FakeSource(
        sample_snapshot(),
        answer=lambda c: CommandResult(accepted=False, message="[red]no[/]", override_rev=0, plan_rev=None),
    )
    app = app_on(source)
    async with app.run_test(size=WIDE, notifications=True) as pilot:
        await started(pilot)
        await pilot.press("j", "c")
        await until(pilot, lambda: "[red]no[/]" in screen_text(app))


async def test_nothing_acts_on_rows_that_a_small_terminal_hides() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.resize_terminal(70, 20)
        await pilot.press("j", "c", "D", "R", "u", "p")
        assert isinstance(app.screen, MainScreen)
        assert source.commands == []
        await pilot.resize_terminal(*NARROW)
        await pilot.press("c")
        await until(pilot, lambda: len(source.commands) == 1)


async def test_an_undo_that_is_refused_may_be_tried_again() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("j", "c")
        await until(pilot, lambda: "u undoes" in toasts(app))
        source.refuse = "the run is ending"
        await pilot.press("u")
        await until(pilot, lambda: "the run is ending" in toasts(app))
        source.refuse = ""
        await pilot.press("u")
        await until(pilot, lambda: source.sent[-1] == ("uncordon", IDS[1], None) and "undone" in toasts(app))
        assert "nothing to undo" not in toasts(app)
