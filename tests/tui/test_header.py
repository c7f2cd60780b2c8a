"""The lines on top: what must never leave, what shortens first, what is not known."""

import pytest

from hexctl.tui.view.context import Context
from hexctl.tui.view.header import Group, fit, header_lines, summary_line
from hexctl.tui.view.text import Line, Span, line, plain, width_of
from planner.record import replace
from runtime.api.wire import Snapshot
from tests.tui.samples import bare_snapshot, hostile_snapshot, paced_snapshot, sample_snapshot

CTX = Context()


def _texts(s: Snapshot, width: int, ctx: Context = CTX) -> list[str]:
    return [plain(x) for x in header_lines(s, width, ctx)]


def test_wide_header_says_everything() -> None:
    first, second, third = _texts(sample_snapshot(), 140)
    for word in (
        "hexctl",
        "local-7f3a",
        "● running 12:41",
        "simulated at 60x",
        "plan r6 · ask · gap 12 %",
        "r7 proposed",
        "6 devices",
        "? help",
    ):
        assert word in first
    for word in (
        "trainer 3 % for data",
        "rollout 0 % for admission",
        "mean 1.4  p95 3  max 4 of η 4",
        "QUEUE 2.1 batches",
    ):
        assert word in second
    for word in (
        "generated 1,842 tok/s",
        "trained 1,790 tok/s",
        "$3.12/h $0.48/Mtok",
        "REWARD 0.83",
        "WASTE 0.4 %",
        "v212 9f3c",
    ):
        assert word in third


def test_narrow_header_keeps_waits_stale_cost() -> None:
    first, second, third = _texts(sample_snapshot(), 80)
    assert first.split()[0] == "local-7f3a"
    assert "WAITS train 3 % roll 0 %" in second
    assert "STALE 1.4/3/4 of η 4" in second
    assert "COST $3.12/h $0.48/Mtok" in second
    assert "gen 1,842 train 1,790 tok/s" in third


@pytest.mark.parametrize("width", [80, 110, 140, 200])
def test_the_rates_of_a_simulation_are_never_taken_for_those_of_the_clock(width: int) -> None:
    first = _texts(sample_snapshot(), width)[0]
    assert ("simulated at 60x real time" if width == 200 else "simulated at 60x ") in first
    s = sample_snapshot()
    real = _texts(replace(s, run=replace(s.run, label="gpu", simulation_speed=None)), width)[0]
    assert "real time" not in real
    assert "gpu" in real


@pytest.mark.parametrize("width", [*range(80, 150, 7), 200, 400])
@pytest.mark.parametrize(
    "snapshot",
    [sample_snapshot(), paced_snapshot(), bare_snapshot(), hostile_snapshot()],
    ids=["sample", "paced", "bare", "hostile"],
)
def test_lines_fit_and_identity_never_leaves(snapshot: Snapshot, width: int) -> None:
    lines = header_lines(snapshot, width, CTX)
    assert all(width_of(x) <= width for x in lines)
    first = plain(lines[0])
    assert snapshot.run.state in first
    if snapshot.run.id == "local-7f3a":
        assert "local-7f3a" in first
        assert snapshot.run.label in first
        assert "12:41" in first or snapshot.run.state == "starting"


def test_no_price_is_a_dash_never_a_zero() -> None:
    text = " ".join(_texts(paced_snapshot(), 140))
    assert "COST — no price" in text
    assert "$" not in text
    assert "paced" in text


def test_unknown_figures_are_dashes() -> None:
    s = sample_snapshot()
    assert s.flow is not None
    flow = replace(
        s.flow,
        staleness_mean=None,
        staleness_p95=None,
        staleness_max=None,
        reward_mean=None,
        generated_tokens=0,
        wasted_tokens={},
    )
    text = " ".join(_texts(replace(s, flow=flow, series={}), 140))
    assert "mean —  p95 —  max — of η 4" in text
    assert "REWARD —" in text
    assert "WASTE —" in text


def test_flow_that_has_not_answered_says_so() -> None:
    assert "has not answered yet" in " ".join(_texts(bare_snapshot(), 140))
    late = replace(sample_snapshot(), flow=None, flow_age_s=12.0)
    assert "last answered 12 s ago" in " ".join(_texts(late, 140))


def test_old_flow_figures_carry_their_age() -> None:
    s = replace(sample_snapshot(), flow_age_s=3.0)
    assert "old" not in " ".join(_texts(s, 140))
    assert "flow 11 s old" in " ".join(_texts(s, 140, Context(elapsed_s=8.0)))


def _tone(spans: Line, text: str) -> str:
    return next(s.tone for s in spans if s.text == text)


def test_staleness_over_the_bound_is_a_fault() -> None:
    s = sample_snapshot()
    assert s.flow is not None
    over = replace(s, flow=replace(s.flow, staleness_max=5))
    assert _tone(header_lines(s, 140, CTX)[1], "4") == "text"
    assert _tone(header_lines(over, 140, CTX)[1], "5") == "fault"


def test_the_longer_wait_stands_out() -> None:
    spans = header_lines(sample_snapshot(), 140, CTX)[1]
    assert _tone(spans, "3 %") == "strong"
    assert _tone(spans, "0 %") == "text"


def test_no_plan_is_told_apart_from_no_plan_yet() -> None:
    assert "no plan yet" in _texts(bare_snapshot(), 140)[0]
    assert "infeasible" in _texts(replace(bare_snapshot(), infeasible="model larger than the fleet"), 140)[0]


def test_ascii_spells_eta() -> None:
    assert "of eta 4" in " ".join(_texts(sample_snapshot(), 140, Context(ascii=True)))


@pytest.mark.parametrize("width", range(12, 80, 5))
def test_summary_fits_any_width(width: int) -> None:
    spans = summary_line(sample_snapshot(), width, CTX)
    assert width_of(spans) <= width
    if width >= 40:
        assert plain(spans).startswith("local-7f3a")
        assert "running 12:41" in plain(spans)


def test_groups_shorten_from_the_lowest_keep() -> None:
    groups = [
        Group(keep=2, ways=(line(Span("aaaa")), line(Span("aa")), ())),
        Group(keep=1, ways=(line(Span("bbbb")), ())),
        Group(keep=3, ways=(line(Span("cccc")),)),
    ]
    assert [plain(fit(groups, w, gap=1)) for w in (14, 13, 9, 8, 6, 3)] == [
        "aaaa bbbb cccc",
        "aaaa cccc",
        "aaaa cccc",
        "aa cccc",
        "cccc",
        "cc…",
    ]
