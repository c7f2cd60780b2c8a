"""The application under a pilot: what is seen, at every size, in every theme, and when the daemon is silent."""

import pytest
from textual.widgets import Input

from hexctl.tui.screens.info import InfoScreen
from hexctl.tui.screens.main import VIEWS, MainScreen
from hexctl.tui.screens.palette import Palette
from hexctl.tui.widgets.event_list import EventList
from hexctl.tui.widgets.fleet_table import FleetTable
from hexctl.tui.widgets.lines_panel import LinesPanel
from planner.record import replace
from tests.tui.pilots import IDS, NARROW, WIDE, found, main_of, screen_text, started, until
from tests.tui.samples import FakeSource, app_on, bare_snapshot, hostile_snapshot, sample_snapshot, wide_snapshot


@pytest.mark.parametrize("size", [WIDE, NARROW, (79, 24), (20, 3)], ids=str)
async def test_every_view_draws_whatever_the_snapshot(size: tuple[int, int]) -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=size) as pilot:
        await started(pilot)
        for s in (bare_snapshot(), hostile_snapshot(), wide_snapshot(64), replace(sample_snapshot(), devices=())):
            app.show_snapshot(s)
            for key in ("1", "2", "3", "4"):
                await pilot.press(key)
                text = screen_text(app)
                assert all(ch.isprintable() for ch in text.replace("\n", ""))
                if size[0] >= 80:
                    assert s.run.label in text  # the label is always in sight
                    assert s.run.state in text


async def test_views_by_number_tab_and_click() -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        main = main_of(app)
        for key, view in zip("1234", VIEWS, strict=True):
            await pilot.press(key)
            assert main.view == view
        await pilot.press("tab")
        assert main.view == "fleet"
        await pilot.press("shift+tab")
        assert main.view == "events"
        await pilot.click("#tabs", offset=(12, 0))
        await until(pilot, lambda: main.view == "flow")
        await pilot.press("escape")
        assert main.view == "fleet"


async def test_cursor_keys_stay_inside() -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        table = main_of(app).query_one(FleetTable)
        for key, index in [("j", 1), ("down", 2), ("k", 1), ("up", 0), ("up", 0), ("G", 5), ("j", 5), ("g", 0), ("end", 5), ("home", 0),
                           ("pagedown", 5), ("pageup", 0), ("ctrl+f", 5), ("ctrl+b", 0)]:  # fmt: skip
            await pilot.press(key)
            assert table.cursor_key == IDS[index], key


async def test_the_cursor_stays_on_its_device_when_rows_move() -> None:
    source = FakeSource(sample_snapshot(1))
    app = app_on(source)
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        await pilot.press("j", "j")
        table = main_of(app).query_one(FleetTable)
        assert table.cursor_key == IDS[2]
        s = sample_snapshot(2)
        app.show_snapshot(replace(s, devices=tuple(reversed(s.devices))))
        assert table.cursor_key == IDS[2]
        app.show_snapshot(replace(s, devices=tuple(d for d in s.devices if d.id != IDS[2])))
        assert table.cursor_key in IDS
        app.show_snapshot(replace(s, devices=()))
        assert table.cursor_key is None
        await pilot.press("j", "c", "D", "enter", "space", "y", "p")  # nothing to act on, nothing breaks
        assert source.commands == []


async def test_long_fleets_scroll_with_the_cursor() -> None:
    app = app_on(FakeSource(wide_snapshot(200)))
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        table = main_of(app).query_one(FleetTable)
        await pilot.press("G")
        first, last, count = table.visible_rows
        assert (last, count) == (200, 200)
        assert first > 150
        assert "n24/gpu7" in screen_text(app)
        assert f"{first}–200 of 200" in screen_text(app)
        await pilot.press("g")
        assert table.visible_rows[0] == 1


async def test_mark_filter_sort_maximise_and_back() -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        main, table = main_of(app), main_of(app).query_one(FleetTable)
        await pilot.press("space", "space")
        assert main.marked == {IDS[0], IDS[1]}
        assert table.cursor_key == IDS[2]
        assert "✓ 2 marked" in screen_text(app)
        await pilot.press("/", *"old", "enter")
        assert main.words["fleet"] == "old"
        assert "n0/gpu0" not in screen_text(app).split("reward")[0]
        await pilot.press("escape")
        assert main.words["fleet"] == ""
        await pilot.press("escape")
        assert main.marked == frozenset()
        await pilot.press(">")
        assert main.sort_by == "device"
        await pilot.press("<", "<")
        assert main.sort_by not in (None, "device")
        await pilot.press(">")
        assert main.sort_by is None
        before = table.size.height
        await pilot.press("z")
        await until(pilot, lambda: table.size.height > before)
        assert "WAITS" not in screen_text(app)
        assert "running 12:41" in screen_text(app)
        await pilot.press("escape")
        await until(pilot, lambda: "WAITS" in screen_text(app))


async def test_filter_field_takes_keys_that_otherwise_act() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        await pilot.press("/", *"cDqR1")
        assert main_of(app).query_one("#filter", Input).value == "cDqR1"
        assert isinstance(app.screen, MainScreen)
        await pilot.press("escape")
        await pilot.press("4", "/", *"bus", "enter")
        assert len(main_of(app).query_one(EventList)._rows) == 1
        assert source.commands == []


@pytest.mark.parametrize("size", [WIDE, NARROW])
async def test_the_filter_field_shows_what_is_typed(size: tuple[int, int]) -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=size) as pilot:
        await started(pilot)
        await pilot.press("/")
        await until(pilot, lambda: "every word must match" in screen_text(app))
        await pilot.press(*"old")
        await until(pilot, lambda: any(x.strip() == "old" for x in screen_text(app).splitlines()))


async def test_details_help_and_copy() -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        await pilot.press("j", "enter")
        assert isinstance(app.screen, InfoScreen)
        assert IDS[1] in screen_text(app)
        await pilot.press("escape", "4", "G", "enter")
        assert isinstance(app.screen, InfoScreen)
        assert "run_started" in screen_text(app)
        await pilot.press("q", "?")
        assert isinstance(app.screen, InfoScreen)
        panel = app.screen.query_one(LinesPanel)
        await pilot.press("G")
        assert panel.scroll_offset.y > 0
        assert "not known; never a zero" in screen_text(app)
        await pilot.press("g", "j", "k", "pagedown", "pageup", "?")
        assert isinstance(app.screen, MainScreen)
        await pilot.press("y")
        assert app.clipboard.startswith("run local-7f3a started")
        await pilot.press("1", "y")
        assert app.clipboard == IDS[1]


async def test_the_palette_offers_what_works_here_and_does_it() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        for key in (":", "ctrl+p"):
            await pilot.press(key)
            assert isinstance(app.screen, Palette)
            names = [entry.name for entry in app.screen.entries]
            assert any("cordon" in x for x in names)
            assert not any("approve" in x for x in names)
            await pilot.press("escape")
            assert isinstance(app.screen, MainScreen)
        await pilot.press(":", *"plan in force")
        await until(pilot, lambda: found(app) == ["the plan in force and the proposed one   (3)"])
        await pilot.press("enter", "enter")
        await until(pilot, lambda: main_of(app).view == "plan")
        await pilot.press("1", ":", *"handover")
        await pilot.press("escape", "escape")
        assert source.commands == []


async def test_silence_greys_the_last_values_and_says_that_the_run_goes_on() -> None:
    lives = replace(sample_snapshot(), run=replace(sample_snapshot().run, label="gpu"))
    source = FakeSource(lives)
    now = [100.0]
    app = app_on(source, clock=lambda: now[0])
    async with app.run_test(size=WIDE) as pilot:
        await started(pilot)
        source.silent = True
        source.put(lives)
        assert app.feed is not None
        app.feed.nudge()
        await until(pilot, lambda: "daemon not answering" in screen_text(app))
        now[0] += 12.0
        app.redraw()
        text = screen_text(app)
        assert "daemon not answering 12 s" in text
        assert "run local-7f3a goes on" in text
        assert "1,842" in text  # the last values are still there,
        assert "12 s" in text.splitlines()[6]  # with their age
        assert app.screen.query_one(FleetTable)._pen is not None
        assert app.screen.query_one(FleetTable)._pen.outdated
        source.silent = False
        source.put(sample_snapshot(9))
        app.feed.nudge()
        await until(pilot, lambda: "not answering" not in screen_text(app))
        assert not app.screen.query_one(FleetTable)._pen.outdated


async def test_before_the_first_answer_it_waits_and_says_so() -> None:
    source = FakeSource()
    source.silent = True
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await until(pilot, lambda: "waiting for the daemon of local-7f3a" in screen_text(app))
        await pilot.press("c", "D", "R", "p", "u", "y", "enter", "/", "escape", "z", "<")  # nothing is there to act on
        assert source.commands == []


async def test_q_leaves_and_sends_nothing() -> None:
    source = FakeSource(sample_snapshot())
    app = app_on(source)
    async with app.run_test(size=NARROW) as pilot:
        await started(pilot)
        await pilot.press("q")
    assert app.return_value == 0
    assert source.commands == []
    assert app.farewell == "run local-7f3a goes on; hexctl attach comes back; hexctl down ends it"
    run = sample_snapshot().run
    for state, word in (("finished", "ended"), ("failed", "failed")):
        app._snapshot = replace(sample_snapshot(), run=replace(run, state=state))
        assert app.farewell == f"run local-7f3a has {word}; its folder is runs/local-7f3a"


async def test_below_eighty_columns_one_line_sums_up() -> None:
    app = app_on(FakeSource(sample_snapshot()))
    async with app.run_test(size=(70, 20)) as pilot:
        await started(pilot)
        text = screen_text(app)
        assert "local-7f3a  ● running 12:41" in text.splitlines()[0]
        assert "$0.48/Mtok" in text.splitlines()[0]
        assert "DEVICE" not in text
        await pilot.resize_terminal(100, 30)
        await until(pilot, lambda: "DEVICE" in screen_text(app))


async def test_ascii_mode_draws_nothing_else_on_any_screen() -> None:
    app = app_on(FakeSource(hostile_snapshot()), "no-colour", ascii=True)
    async with app.run_test(size=NARROW, notifications=True) as pilot:
        await until(pilot, lambda: "running" in screen_text(app))
        for keys in (["1"], ["2"], ["3"], ["4"], ["1", "?"], ["escape", "enter"], ["escape", "p"], ["escape", "j", "D"], ["n", ":"],
                     ["escape", "/"], ["escape", "c"]):  # fmt: skip
            await pilot.press(*keys)
            text = screen_text(app)
            assert text.isascii(), {ch for ch in text if not ch.isascii()}


@pytest.mark.parametrize("theme", ["dark", "light", "no-colour"])
async def test_every_theme_draws_every_screen_and_no_colour_means_none(theme: str) -> None:
    app = app_on(FakeSource(sample_snapshot()), theme)
    async with app.run_test(size=NARROW, notifications=True) as pilot:
        await started(pilot)
        coloured = False
        for keys in (
            ["2"],
            ["3"],
            ["a"],
            ["n", "4"],
            ["enter"],
            ["q", "?"],
            ["q", "1", "p"],
            ["q", "j", "D"],
            ["n", ":"],
            ["escape", "/"],
        ):
            await pilot.press(*keys)
            assert screen_text(app).strip()
            for strip in app.screen._compositor.render_strips():
                for _, style, _ in strip:
                    if style is not None:
                        coloured |= not (style.color is None or style.color.is_default)
                        coloured |= not (style.bgcolor is None or style.bgcolor.is_default)
        assert coloured == (theme != "no-colour")
