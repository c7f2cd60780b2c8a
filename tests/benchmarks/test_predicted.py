"""The measured step of a run: over whole periods of checkpoints, by hand and for any phase."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.predicted import Row, over_periods


def run_of(steps: int, every: int, *, step_s: float = 0.5, checkpoint_s: float = 2.0, first: int = 0) -> list[Row]:
    """Rows of `metrics.jsonl`, each written after its step's checkpoint."""
    rows: list[Row] = []
    now = 1e9
    for step in range(first, first + steps):
        now += step_s + (checkpoint_s if (step + 1) % every == 0 else 0.0)
        rows.append({"step": step, "time_unix_s": now})
    return rows


def mean_s(rows: list[Row]) -> float:
    return (rows[-1]["time_unix_s"] - rows[0]["time_unix_s"]) / (len(rows) - 1)


def test_a_part_of_a_period_is_left_out() -> None:
    """Steps 7 to 45 with a checkpoint every 16: 38 intervals, of which the last 32 have two checkpoints. Steps of 0.5 s and
    checkpoints of 2 s make 0.625 s a step; all 38 happen to have two as well, and so 0.605 s."""
    rows = run_of(39, 16, first=7)
    kept, periods = over_periods(rows, 16)
    assert (periods, [kept[0]["step"], kept[-1]["step"]]) == (2, [13, 45])
    assert mean_s(list(kept)) == pytest.approx(0.5 + 2.0 / 16)
    assert mean_s(rows) == pytest.approx(0.5 + 4.0 / 38)


@given(every=st.integers(1, 40), first=st.integers(0, 100), steps=st.integers(2, 200))
def test_the_share_of_a_checkpoint_is_exact_whatever_the_phase(every: int, first: int, steps: int) -> None:
    rows = run_of(steps, every, first=first)
    kept, periods = over_periods(rows, every)
    assert kept[-1] == rows[-1]
    if periods:
        assert len(kept) == periods * every + 1
        assert len(rows) - len(kept) < every, "no whole period is left out"
        assert mean_s(list(kept)) == pytest.approx(0.5 + 2.0 / every)
    else:
        assert steps <= every
        assert list(kept) == rows
