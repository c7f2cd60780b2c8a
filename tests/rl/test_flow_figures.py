"""Windows, shares and percentiles against the plain definition; the files people read."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.flow.figures import Level, Rate, StepRate, staleness
from runtime.rl.flow.records import JsonLines


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50)), max_size=40))
def test_a_rate_counts_the_window(steps: list[tuple[float, int]]) -> None:
    rate, now, events = Rate(window_s=10.0), 5.0, []
    for wait, n in steps:
        now += wait
        rate.add(now, n)
        events.append((now, n))
    inside = sum(n for t, n in events if t > now - 10.0)
    # Events less than a hundredth of the window apart may be counted as one, at the time of the first.
    edge = sum(n for t, n in events if now - 10.0 < t <= now - 9.9)
    span = min(10.0, max(1.0, now - events[0][0])) if events else 1.0
    assert (inside - edge) / span <= rate.per_s(now) + 1e-9
    assert rate.per_s(now) <= inside / span + 1e-9
    assert rate.per_s(now + 100.0) == 0.0


@given(st.lists(st.tuples(st.integers(1, 20), st.sampled_from([0.0, 0.25, 1.0])), max_size=30), st.integers(0, 40))
def test_a_level_is_a_time_average(changes: list[tuple[int, float]], after: int) -> None:
    level, now, ticks = Level(0.0, window_s=30.0), 0, []
    for wait, value in changes:
        ticks += [level.level] * wait
        now += wait
        level.set(float(now), value)
    ticks += [level.level] * after
    now += after
    expected = ticks[-30:]
    if expected:
        assert level.mean(float(now)) == pytest.approx(sum(expected) / len(expected))


def test_a_rate_of_steps_does_not_depend_on_how_long_they_last() -> None:
    for period in (0.1, 1.0, 300.0):
        rate = StepRate()
        assert rate.per_s(0.0) == 0.0
        for step in range(9):
            rate.add(step * period, 60)
        now = 8 * period
        assert rate.per_s(now) == pytest.approx(60 / period)
        assert rate.per_s(now + 0.9 * period) == pytest.approx(60 / period)
        assert rate.per_s(now + 100 * period) < 6 / period


@given(st.dictionaries(st.integers(0, 12), st.integers(1, 40), max_size=6))
def test_staleness_by_the_definition(ages: dict[int, int]) -> None:
    found = staleness(ages)
    tokens = sorted(a for a, n in ages.items() for _ in range(n))
    if not tokens:
        assert (found.mean, found.p95, found.most) == (None, None, None)
        return
    assert found.mean == pytest.approx(sum(tokens) / len(tokens))
    assert found.most == tokens[-1]
    p95 = min(a for a in tokens if sum(t <= a for t in tokens) >= 0.95 * len(tokens))
    assert found.p95 == p95


def test_lines_are_appended_rotated_and_read_back(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "sub" / "m.jsonl", rotate_bytes=100)
    assert lines.last() is None
    for step in range(12):
        lines.append({"step": step, "text": "héllo", "nan": float("nan"), "inf": float("-inf")})
    now = [json.loads(x) for x in (tmp_path / "sub" / "m.jsonl").read_text().splitlines()]
    before = [json.loads(x) for x in (tmp_path / "sub" / "m.jsonl.1").read_text().splitlines()]
    assert [r["step"] for r in (*before, *now)][-1] == 11
    assert now[-1] == {"step": 11, "text": "héllo", "nan": None, "inf": None}
    with (tmp_path / "sub" / "m.jsonl").open("a") as f:
        f.write('{"step": 12, "te')
    last = lines.last()
    assert last is not None
    assert last["step"] == 11
    (tmp_path / "sub" / "m.jsonl").write_text("")
    last = lines.last()
    assert last is not None
    assert last["step"] == before[-1]["step"], "right after a rotation the older part is looked at"


def test_a_file_that_cannot_be_written_is_said_and_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file where a folder should be")
    lines = JsonLines(tmp_path / "blocked" / "m.jsonl")
    lines.append({"step": 1})
    assert lines.failed.startswith("m.jsonl: ")
    assert lines.last() is None
