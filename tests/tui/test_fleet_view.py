"""The fleet's rows and columns."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexctl.tui.view import numbers as n
from hexctl.tui.view.context import Context
from hexctl.tui.view.fleet import (
    ROLES,
    STATUSES,
    FleetRow,
    arrange,
    badge_of,
    columns_for,
    descends,
    fleet_rows,
    head_line,
    matches,
    row_line,
    sortable,
)
from hexctl.tui.view.glyphs import to_ascii
from hexctl.tui.view.history import EMPTY, KEPT
from hexctl.tui.view.text import plain, width_of
from planner.catalogue import CATALOGUE
from planner.record import replace
from runtime.api.wire import DeviceRow, Snapshot
from tests.tui.samples import NOW_S, device, hostile_snapshot, paced_snapshot, sample_snapshot, wide_snapshot

CTX = Context()


def _rows(s: Snapshot, ctx: Context = CTX) -> tuple[FleetRow, ...]:
    return fleet_rows(s, ctx, EMPTY)


def _draw(s: Snapshot, width: int, ctx: Context = CTX) -> list[str]:
    rows = _rows(s, ctx)
    columns = columns_for(rows, width)
    return [plain(row_line(r, columns, width, cursor=False, marked=False)) for r in rows]


def test_eighty_columns_keep_what_matters() -> None:
    rows = _rows(sample_snapshot())
    ids = [c.id for c in columns_for(rows, 80)]
    assert {"device", "role", "util", "rate", "against"} <= set(ids)
    head = plain(head_line(columns_for(rows, 80), 80, None, False))
    for word in ("DEVICE", "ROLE", "UTIL", "TOK/S", "vs MODEL", "AGE"):
        assert word in head


def test_a_wide_terminal_shows_every_column() -> None:
    ids = {c.id for c in columns_for(_rows(sample_snapshot()), 200)}
    assert ids == {
        "device",
        "kind",
        "role",
        "replica",
        "util",
        "slots",
        "memory",
        "power",
        "temp",
        "rate",
        "cost",
        "against",
        "drift",
        "version",
        "age",
        "note",
    }


def test_columns_nobody_reports_make_room_first() -> None:
    ids = [c.id for c in columns_for(_rows(paced_snapshot()), 100)]
    assert "slots" in ids
    assert "util" in ids  # stays, as a narrow column of dashes
    assert not {"memory", "power"} & set(ids)


@pytest.mark.parametrize("width", [80, 81, 99, 110, 140, 200, 400])
@pytest.mark.parametrize(
    "snapshot",
    [sample_snapshot(), paced_snapshot(), hostile_snapshot(), wide_snapshot(64)],
    ids=["sample", "paced", "hostile", "wide"],
)
def test_rows_fit(snapshot: Snapshot, width: int) -> None:
    rows = _rows(snapshot)
    columns = columns_for(rows, width)
    head = head_line(columns, width, "rate", True)
    assert width_of(head) <= width
    for r in rows:
        assert width_of(row_line(r, columns, width, cursor=True, marked=True)) == width_of(head)


def test_a_row_says_what_is_known() -> None:
    text = _draw(sample_snapshot(), 140)
    said = "n0/gpu0 fast ● train pin t0 █████████▊ 97 % █████▍ 61/80 640 W 71 1,790 0.31 +2 % 212 0.4 s"
    assert text[0].split() == said.split()
    assert "−22 %" in text[3]
    assert "✕ LOST" in text[4]
    assert "41 s" in text[4]


def test_a_device_is_held_against_the_model_of_its_work_and_else_against_the_plan() -> None:
    device = replace(
        sample_snapshot().devices[1], tokens_per_s=900.0, modelled_tokens_per_s=1000.0, predicted_tokens_per_s=1200.0
    )
    assert device.against_model == pytest.approx(-0.1)
    assert replace(device, modelled_tokens_per_s=None).against_model == pytest.approx(-0.25)
    assert replace(device, modelled_tokens_per_s=None, predicted_tokens_per_s=None).against_model is None
    assert replace(device, tokens_per_s=None).against_model is None
    assert replace(device, tokens_per_s=0.0).against_model == -1


NULLABLE = [f.name for f in dataclasses.fields(DeviceRow) if "None" in str(f.type)]


@pytest.mark.parametrize("field", NULLABLE)
def test_each_missing_figure_is_a_dash_and_nothing_breaks(field: str) -> None:
    s = sample_snapshot()
    full = replace(s.devices[1], note="x")
    missing = replace(full, **{field: None})
    before, after = (_draw(replace(s, devices=(d, full)), 400)[0] for d in (full, missing))
    shown_beside = ("pid", "digest", "usd_per_h", "pinned", "slots", "memory_total_bytes")
    if field in (*shown_beside, "modelled_tokens_per_s", "predicted_tokens_per_s"):
        assert len(after) == len(before)  # not a column of its own
    else:
        assert after.count("—") > before.count("—"), after
    # never a zero that was not there before
    assert after.split().count("0") <= before.split().count("0")


def test_nothing_known_at_all() -> None:
    text = _draw(replace(sample_snapshot(), devices=(device(0, age_s=None),)), 200)[0]
    assert "0 %" not in text
    assert text.count("—") >= 10


def test_states_differ_in_glyph_word_and_ascii() -> None:
    badges = [*STATUSES.values(), ROLES["idle"], ROLES["rollout"]]
    assert len({b.glyph for b in badges}) == len(badges)
    assert len({b.word for b in badges}) == len(badges)
    assert len({to_ascii(b.glyph) for b in badges}) == len(badges)
    for name in ("LOST", "HUNG", "STALE", "HOST-BOUND", "cordoned", "draining", "throttled", "starting"):
        assert STATUSES[name].word == name
    assert {s for s, b in STATUSES.items() if b.tone == "fault"} == {"LOST", "HUNG", "quarantined"}


def test_a_state_comes_before_the_role_and_an_unknown_one_is_shown() -> None:
    assert badge_of(device(0, role="train")).word == "train"
    assert badge_of(device(0, role="train", status="HUNG")).word == "HUNG"
    assert badge_of(device(0, role="rollout", cordoned=True)).word == "cordoned"
    assert badge_of(device(0, status="melting")) == ("?", "melting", "warn")


def test_old_data_is_drawn_outdated_with_its_age() -> None:
    s = replace(sample_snapshot(), devices=(device(0, role="rollout", tokens_per_s=5.0, age_s=3.0),))
    fresh, old = _rows(s)[0], _rows(s, Context(elapsed_s=9.0))[0]
    assert not fresh.outdated
    assert old.outdated
    columns = columns_for((old,), 140)
    tones = {span.tone for span in row_line(old, columns, 140, cursor=False, marked=False) if "5.0" in span.text}
    assert tones == {"outdated"}
    assert "12 s" in plain(row_line(old, columns, 140, cursor=False, marked=False))


def test_filter_words() -> None:
    rows = _rows(sample_snapshot())
    shown = lambda words: [r.display for r in arrange(rows, words, None, False)]  # noqa: E731
    assert shown("") == [r.display for r in rows]
    assert shown("old") == ["n1/gpu0", "n1/gpu1", "n2/gpu0"]
    assert shown("OLD !lost") == ["n1/gpu0", "n2/gpu0"]
    assert shown("wide drain") == ["n0/gpu2"]
    assert shown("fan") == ["n2/gpu0"]
    assert shown("nothing-like-it") == []


@given(st.lists(st.text("abc!", min_size=1, max_size=3), max_size=4), st.text("abc ", max_size=10))
def test_matching_is_every_word(words: list[str], text: str) -> None:
    expected = all((w[1:] not in text) if len(w) > 1 and w[0] == "!" else w in text for w in words)
    assert matches(" ".join(words), text) == expected


def test_every_column_sorts_with_unknown_last() -> None:
    rows = _rows(sample_snapshot())
    columns = columns_for(rows, 200)
    for stop in sortable(columns):
        ordered = arrange(rows, "", stop, descends(stop))
        assert sorted(r.id for r in ordered) == sorted(r.id for r in rows)
        if stop is None:
            assert ordered == rows
            continue
        values = [next(c for c in columns if c.id == stop).value(r) for r in ordered]
        known = [v for v in values if v is not None]
        assert values[: len(known)] == known
        assert known == sorted(known, reverse=descends(stop))  # type: ignore[type-var]


def test_history_keeps_a_short_past_and_forgets_lost_devices() -> None:
    s = sample_snapshot()
    history = EMPTY
    for i in range(40):
        history = history.grown(replace(s, at_s=NOW_S + i))
    rates = history.of(s.devices[0].id)
    assert rates == (1790.0,) * KEPT
    assert history.grown(replace(s, at_s=NOW_S + 39.5)) is history  # too close
    assert history.grown(replace(s, at_s=NOW_S + 60, devices=s.devices[1:])).of(s.devices[0].id) == ()


def test_a_clock_that_went_back_does_not_stop_history() -> None:
    s = sample_snapshot()
    later = EMPTY.grown(replace(s, at_s=NOW_S + 1000))
    assert len(later.grown(replace(s, at_s=NOW_S)).of(s.devices[0].id)) == 2


LARGE = {
    "running": (1024, "1,024/2,048"),
    "memory_used_bytes": (1000.0 * 2**30, "1,000/1,536"),
    "power_w": (1200.0, "1,200 W"),
    "temperature_c": (1000.0, "1,000"),
    "tokens_per_s": (999_999.0, "999,999"),
    "usd_per_mtok": (12345.678, "12,346"),
    "modelled_tokens_per_s": (10.0, "+9,999,890 %"),
    "drift_factor": (124.45, "+12,345 %"),
    "version": (1_234_567, "1234567"),
}


@pytest.mark.parametrize("field", LARGE)
@pytest.mark.parametrize("width", [100, 145, 200, 400])
def test_no_figure_is_cut_however_large(field: str, width: int) -> None:
    """Where its column is on the screen the figure stands in it whole, in the row that has it and beside smaller ones."""
    value, told = LARGE[field]
    small = sample_snapshot().devices[1]
    large = replace(small, id="large", slots=2048, memory_total_bytes=1536.0 * 2**30, tokens_per_s=999_999.0)
    rows = _rows(replace(sample_snapshot(), devices=(small, replace(large, **{field: value}))))
    columns = columns_for(rows, width)
    names = {"running": "slots", "memory_used_bytes": "memory", "power_w": "power", "temperature_c": "temp",
             "tokens_per_s": "rate", "usd_per_mtok": "cost", "modelled_tokens_per_s": "against", "drift_factor": "drift"}  # fmt: skip
    cells = [[plain(c.cell(r, c.width)).strip() for r in rows] for c in columns if c.id == names.get(field, field)]
    assert width < 200 or cells
    for _, cell in cells:
        assert cell.endswith(told) or cell.startswith(told)
    for r in rows:
        assert "…" not in plain(row_line(r, columns, width, cursor=False, marked=False))


@given(st.floats(1e-9, 1e12))
def test_a_price_fits_under_its_head(usd_per_mtok: float) -> None:
    assert len(n.price(usd_per_mtok)) <= 7


def test_kinds_of_the_catalogue_are_said_whole() -> None:
    for kind in CATALOGUE:
        rows = _rows(replace(sample_snapshot(), devices=(device(0, kind=kind),)))
        assert f" {kind} " in plain(row_line(rows[0], columns_for(rows, 200), 200, cursor=False, marked=False))


@pytest.mark.parametrize("snapshot", [sample_snapshot(), paced_snapshot()], ids=["sample", "paced"])
@pytest.mark.parametrize("width", [80, 110, 200])
def test_the_sorted_column_has_its_whole_title_and_the_arrow(snapshot: Snapshot, width: int) -> None:
    columns = columns_for(_rows(snapshot), width)
    plain_head = plain(head_line(columns, width, None, False))
    for c in columns:
        for descending, arrow in ((True, "↓"), (False, "↑")):
            head = plain(head_line(columns, width, c.id, descending))
            assert f"{c.title}{arrow}" in head
            assert head.replace(arrow, " ") == plain_head
