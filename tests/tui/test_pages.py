"""Flow, plan, overview, events, details, chrome: what they say, and that they always fit."""

import pytest

from hexctl.tui.keys import footer_keys
from hexctl.tui.view import chrome
from hexctl.tui.view.calibration import calibration_lines
from hexctl.tui.view.context import Context, Health
from hexctl.tui.view.details import device_details, event_details
from hexctl.tui.view.events import event_lines, event_spans, why_line
from hexctl.tui.view.flow import flow_lines
from hexctl.tui.view.overview import overview_lines
from hexctl.tui.view.plan import changes, part_of, plan_lines, remaining_s
from hexctl.tui.view.text import Line, plain, width_of
from planner.record import replace
from runtime.api.wire import MigrationView, PlacementRow, Snapshot
from tests.tui.samples import (
    NOW_S,
    bare_snapshot,
    hostile_snapshot,
    paced_snapshot,
    quiet_snapshot,
    sample_snapshot,
    wide_snapshot,
)

CTX = Context()
SNAPSHOTS = {
    "sample": sample_snapshot(),
    "quiet": quiet_snapshot(),
    "paced": paced_snapshot(),
    "bare": bare_snapshot(),
    "hostile": hostile_snapshot(),
    "wide": wide_snapshot(40),
}


def _text(lines: tuple[Line, ...]) -> str:
    return "\n".join(plain(x) for x in lines)


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize(
    "size", [(80, 19), (100, 30), (140, 40), (220, 60), (400, 100)], ids=lambda s: f"{s[0]}x{s[1]}"
)
def test_every_page_fits_its_width_and_is_clean(name: str, size: tuple[int, int]) -> None:
    s, (width, height) = SNAPSHOTS[name], size
    pages = [
        flow_lines(s, width, height, CTX),
        plan_lines(s, width, height, CTX),
        overview_lines(s, width, height, CTX),
        (why_line(s, width, CTX),),
        chrome.banner_lines(s, 0.0, Health(answering=True, silent_s=0.0)),
        tuple(event_spans(e, width) for e in event_lines(s, CTX)),
        device_details(s, s.devices[0].id, CTX, width)[1],
        chrome.help_lines(width),
    ]
    for i, page in enumerate(pages):
        for spans in page:
            if i not in (4, 6):  # banner and details are cut where they are drawn
                assert width_of(spans) <= width, (i, plain(spans))
            assert all(ch.isprintable() for ch in plain(spans)), plain(spans)
    assert len(pages[2]) <= height


def test_flow_says_energy_only_where_power_is_known() -> None:
    s = sample_snapshot()
    assert s.flow is not None
    assert "kWh" not in _text(flow_lines(s, 140, 40, CTX))
    known = replace(s, flow=replace(s.flow, power_w=1289.0, kwh_per_mtok=0.2))
    assert "energy 0.200 kWh/Mtok at 1,289 W" in _text(flow_lines(known, 140, 40, CTX))


def test_flow_says_that_the_identity_holds_and_when_not() -> None:
    s = sample_snapshot()
    text = _text(flow_lines(s, 140, 40, CTX))
    assert "1,402,118 generated = 1,362,604 trained + 2,211 masked + 31,695 in flight + 5,608 wasted" in text
    assert "identity holds ✓" in text
    assert s.flow is not None
    off = replace(s, flow=replace(s.flow, masked_tokens=2_210))
    assert "identity off by +1 tokens" in _text(flow_lines(off, 140, 40, CTX))


def test_flow_lists_ledger_wasted_and_metrics() -> None:
    text = _text(flow_lines(sample_snapshot(), 140, 40, CTX))
    for word in (
        "pending",
        "suspended",
        "dead letter",
        "54,272",
        "reward timeout",
        "4,000",
        "71 %",
        "redone 118",
        "entropy",
        "KL to behaviour",
    ):
        assert word in text
    assert text.index("pending") < text.index("leased") < text.index("reserved") < text.index("applied")


def test_flow_without_data_says_so_instead_of_drawing_zeroes() -> None:
    s = sample_snapshot()
    assert s.flow is not None
    empty = replace(s, series={}, flow=replace(s.flow, samples_by_state={}, wasted_tokens={}, metrics={}))
    text = _text(flow_lines(empty, 140, 40, CTX))
    assert text.count("no points yet") == 4
    assert "no samples yet" in text
    assert "no figures of a step" in text
    assert "no step finished" not in text  # some hundred have
    begun = _text(flow_lines(replace(empty, flow=replace(s.flow, metrics={}, steps_done=0)), 140, 40, CTX))
    assert "no step finished yet" in begun
    assert "has not answered" in _text(flow_lines(bare_snapshot(), 140, 40, CTX))


def test_plan_shows_in_force_beside_proposed() -> None:
    s = sample_snapshot()
    text = _text(plan_lines(s, 140, 40, CTX))
    assert "r6 in force" in text
    assert "r7 proposed" in text
    assert "expires 0:42" in text
    assert "a approve  x reject" in text
    rows = {x.split()[0]: x for x in text.splitlines() if x.strip().startswith("n")}
    assert "→ train (DP 2)" in rows["n0/gpu2"]
    assert "→ idle" in rows["n1/gpu0"]
    assert "→" not in rows["n0/gpu1"]
    for word in ("1,730", "1,838", "$0.52", "$0.47", "+6.2 % tok/s", "1,960", "all divisions", "drain r1", "◌ stop r1"):
        assert word in text


WIDE_PARTS = PlacementRow(
    role="train", kind="RTX-PRO-6000", devices=("a", "b"), tp=8, pp=12, dp=16, rate_tokens_per_s=1.0
)


@pytest.mark.parametrize("width", [80, 100, 145, 200])
@pytest.mark.parametrize("proposed", [False, True])
def test_what_a_plan_has_a_device_do_is_said_whole(width: int, proposed: bool) -> None:
    s = sample_snapshot()
    assert s.plan is not None
    assert s.proposal is not None
    d = replace(s.devices[0], id="a", kind="RTX-PRO-6000", tokens_per_s=1234.0)
    plan = replace(s.plan, placements=(WIDE_PARTS,))
    then = replace(s.proposal, plan=replace(plan, placements=(replace(WIDE_PARTS, dp=32),))) if proposed else None
    text = _text(plan_lines(replace(s, devices=(d,), plan=plan, proposal=then), width, 40, CTX))
    row = next(x for x in text.splitlines() if x.strip().startswith("n0/gpu0"))
    assert "train (TP 8 PP 12 DP 16)  " in row
    assert ("→ train (TP 8 PP 12 DP 32)  " in row) == proposed
    assert "1,234 / 1,755" in row
    assert ("RTX-PRO-6000  " in row) == (
        not proposed or width in (100, 200)
    )  # at 145 the figures stand beside the table


def test_plan_changes_are_exactly_the_devices_that_move() -> None:
    s = sample_snapshot()
    assert [(c.device, c.now, c.proposed) for c in changes(s)] == [
        ("n0/gpu0", "train", "train (DP 2)"),
        ("n0/gpu2", "rollout", "train (DP 2)"),
        ("n1/gpu0", "rollout", "idle"),
    ]
    assert changes(quiet_snapshot()) == ()
    assert part_of(None, "x") == "idle"


def test_the_countdown_runs_on_between_snapshots() -> None:
    s = sample_snapshot()
    assert remaining_s(s, CTX) == 42.0
    assert remaining_s(s, Context(elapsed_s=40.0)) == 2.0
    assert remaining_s(s, Context(elapsed_s=99.0)) == 0.0


def test_plan_without_a_proposal_without_a_plan_and_infeasible() -> None:
    assert "no proposal open" in _text(plan_lines(quiet_snapshot(), 140, 40, CTX))
    assert "No plan yet" in _text(plan_lines(bare_snapshot(), 140, 40, CTX))
    none = replace(bare_snapshot(), infeasible="weights need 30 GB, the largest device has 24 GB")
    assert "weights need 30 GB" in _text(plan_lines(none, 140, 40, CTX))
    assert "weights need 30 GB" in _text(chrome.banner_lines(none, 0, Health(answering=True, silent_s=0)))


def test_blocked_moves_are_said_with_their_reason() -> None:
    s = replace(
        quiet_snapshot(),
        migration=MigrationView(running=(), waiting=(), blocked="no device can take t0: uncordon n2/gpu0"),
    )
    for page in (plan_lines(s, 100, 30, CTX), overview_lines(s, 140, 30, CTX), (why_line(s, 140, CTX),)):
        assert "no device can take t0" in _text(page)


def test_events_are_newest_first_and_filtered() -> None:
    rows = event_lines(sample_snapshot(), CTX)
    assert [r.seq for r in rows] == list(range(11, 0, -1))
    assert rows[0].message.startswith("r1 drains")
    assert [r.kind for r in event_lines(sample_snapshot(), CTX, "plan !r7")] == ["plan_adopted", "plan_adopted"]
    assert plain(event_spans(rows[4], 100)).split()[:4] == ["00:11:57", "44", "s", "✕"]


def test_why_leads_with_the_newest_trouble_of_the_last_minute() -> None:
    s = sample_snapshot()
    assert plain(why_line(s, 200, CTX)).startswith(
        " why ─ 00:11:57 ✕ n1/gpu1 lost (driver says: fallen off the bus) · r1 drains"
    )
    later = replace(s, at_s=NOW_S + 60)
    assert plain(why_line(later, 200, CTX)).startswith(" why ─ 00:12:32 r1 drains on n0/gpu2")
    assert "nothing has happened yet" in plain(why_line(bare_snapshot(), 100, CTX))


def test_banners() -> None:
    s = sample_snapshot()
    fine = Health(answering=True, silent_s=0.2)
    assert chrome.banner_lines(s, 0.2, fine) == ()
    gone = Health(answering=False, silent_s=12.0, reason="no daemon answers", retry_s=2.0)
    silent = _text(chrome.banner_lines(replace(s, run=replace(s.run, label="gpu")), 12.0, gone))
    assert "daemon not answering 12 s" in silent
    assert "run local-7f3a goes on" in silent
    assert s.run.label == "simulated"
    assert "run local-7f3a stands still without its daemon" in _text(chrome.banner_lines(s, 12.0, gone))
    assert "greyed" in silent
    assert "control loop is late" in _text(chrome.banner_lines(s, 12.0, fine))
    assert "has ended" in _text(chrome.banner_lines(replace(s, run=replace(s.run, state="finished")), 0, fine))
    assert "has failed" in _text(chrome.banner_lines(replace(s, run=replace(s.run, state="failed")), 0, fine))
    trouble = _text(chrome.banner_lines(replace(s, problems=("driver is 550, library 535: reboot", "b")), 0, fine))
    assert "driver is 550, library 535: reboot  (+1)" in trouble


def test_details_name_everything_and_survive_a_device_that_left() -> None:
    s = sample_snapshot()
    title, lines = device_details(s, s.devices[3].id, CTX, 66)
    text = _text(lines)
    assert title == "n1/gpu0"
    for word in (
        "▲ throttled",
        s.devices[3].id,
        "v212 9f3c41",
        "6 of 6 slots",
        "pid 4104, simulated",
        "18 GiB of 24 GiB",
        "145 W",
        "89 °C",
        "thermal limit",
        "123 tok/s",
    ):
        assert word in text
    assert "no longer" in _text(device_details(s, "gone", CTX, 66)[1])
    assert "driver says" in _text(event_details(s, 7, CTX, 66)[1])
    assert "left the window" in _text(event_details(s, 999, CTX, 66)[1])


@pytest.mark.parametrize("view", ["fleet", "flow", "plan", "events"])
@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_footer_fits_and_always_offers_help_and_leaving(view: str, width: int) -> None:
    spans = chrome.footer_line(footer_keys(view, proposal_open=True), width)
    assert width_of(spans) <= width
    assert "? help  q leave" in plain(spans)


def test_a_snapshot_without_devices_draws() -> None:
    s: Snapshot = replace(sample_snapshot(), devices=())
    for page in (flow_lines(s, 100, 30, CTX), plan_lines(s, 100, 30, CTX), overview_lines(s, 100, 30, CTX)):
        assert page


@pytest.mark.parametrize("width", [50, 78, 138])
def test_the_plan_view_shows_predicted_beside_measured(width: int) -> None:
    text = ["".join(s.text for s in x) for x in calibration_lines(sample_snapshot(), width)]
    assert "850" in text[3]
    assert "799" in text[3]
    assert "x 0.93" in text[3]
    assert all(len(x.rstrip()) <= width for x in text)
    assert calibration_lines(replace(sample_snapshot(), calibration=()), width) == ()


@pytest.mark.parametrize("width", [78, 90, 143])
def test_no_figure_of_the_calibration_is_cut(width: int) -> None:
    row = replace(sample_snapshot().calibration[0], kind="RTX-PRO-6000", modelled_tokens_per_s=999_999.0, factor=1234.5,
                  samples=12_345_678, modelled_step_s=1234.0, measured_step_s=12_345.0)  # fmt: skip
    text = [plain(x) for x in calibration_lines(replace(sample_snapshot(), calibration=(row,)), width)]
    assert "RTX-PRO-6000 " in text[2]
    assert "999,999 " in text[2]
    assert ("1,234 s / 12,345 s " in text[2]) == ("STEP" in text[1])
    assert ("12,345,678" in text[2]) == ("SAMPLES" in text[1])
    assert "…" not in text[2]
    assert "SAMPLES" in text[1] or width < 90


@pytest.mark.parametrize("size", [(80, 40), (100, 30), (200, 60)])
def test_large_figures_of_the_flow_keep_its_charts_and_tables_in_line(size: tuple[int, int]) -> None:
    s = sample_snapshot()
    assert s.flow is not None
    flow = replace(
        s.flow, samples_by_state={"PENDING": 3, "APPLIED": 12_345_678_901}, wasted_tokens={"stale": 12_345_678_901}
    )
    lines = flow_lines(replace(s, flow=flow, series={"tokens_per_s": (5.0, 12_345_678.0)}), *size, CTX)
    text = _text(lines)
    assert " 12.3M " in text
    tables = [plain(x) for x in lines if "applied" in plain(x) or "pending" in plain(x)]
    assert len({x.index("%") for x in tables}) == 1, tables
    assert "…" not in "".join(tables)
