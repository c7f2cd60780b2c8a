"""Bars, sparks and charts."""

from hypothesis import given
from hypothesis import strategies as st

from hexctl.tui.view.curves import bar, chart, resample, spark
from hexctl.tui.view.text import plain, width_of

VALUES = st.lists(st.floats(-1e6, 1e6), max_size=300)


@given(st.none() | st.floats(allow_nan=True), st.integers(1, 30))
def test_a_bar_fills_its_cells(share: float | None, cells: int) -> None:
    assert width_of(bar(share, cells)) == cells


def test_bars_in_eighths() -> None:
    assert plain(bar(1.0, 4)) == "████"
    assert plain(bar(0.5, 4)) == "██  "
    assert plain(bar(0.53125, 4)) == "██▏ "
    assert plain(bar(0.0, 4)) == "    "
    assert plain(bar(0.0001, 4)) == "▏   "  # something is more than nothing
    assert plain(bar(None, 4)) == "    "
    assert plain(bar(7.0, 2)) == "██"


@given(VALUES, st.integers(1, 60))
def test_a_spark_has_its_width_and_the_newest_at_the_right(values: list[float], cells: int) -> None:
    text = spark(values, cells)
    assert len(text) == cells
    shown = text.lstrip(" ")
    assert len(shown) == min(cells, len(values))


def test_spark_by_hand() -> None:
    assert spark([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert spark([5, 5], 4) == "  ▅▅"
    assert spark([0, 0], 2, low=0.0) == "▁▁"
    assert spark([], 3) == "   "


@given(VALUES, st.integers(1, 50))
def test_resampling_keeps_the_mean_of_whole_stretches(values: list[float], points: int) -> None:
    out = resample(values, points)
    assert len(out) == min(points, len(values))
    if values:
        assert min(values) - 1e-6 <= min(out) <= max(out) <= max(values) + 1e-6
    if values and len(values) % points == 0:
        assert abs(sum(out) / len(out) - sum(values) / len(values)) < 1e-6 * max(1, *(abs(v) for v in values))


@given(VALUES, st.integers(1, 40), st.integers(1, 9))
def test_a_chart_column_is_filled_from_the_ground(values: list[float], cells: int, rows: int) -> None:
    lines, bottom, top = chart(values, cells, rows, low=None, high=None, tones=("curve", "curve_low"))
    assert len(lines) == rows
    assert bottom <= top
    texts = [plain(x) for x in lines]
    assert all(len(t) == cells for t in texts)
    for column in zip(*texts, strict=True):
        started = False
        for ch in column:  # from the top down: nothing, then a part, then full cells
            if started:
                assert ch == "█"
            started = started or ch != " "


def test_chart_by_hand() -> None:
    lines, bottom, top = chart([0, 4, 8], 3, 2, low=0.0, high=8.0, tones=("curve",))
    assert [plain(x) for x in lines] == ["  █", "▁██"] or [plain(x) for x in lines] == [" ▁█", "▁██"]
    assert (bottom, top) == (0.0, 8.0)
