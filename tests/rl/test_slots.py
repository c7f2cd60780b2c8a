"""Slots stay filled while flow takes its time: the real loop and flow of `benchmarks.bench_slots` in virtual time, 32 slots."""

import pytest

from benchmarks.bench_slots import ETA, STEP_S, STEP_SAMPLE_S, UPDATE_S, Case, simulate

SLOTS = 32


@pytest.mark.parametrize("answer_s", [0.01, 0.15, 0.3])
def test_slow_answers_leave_neither_slots_nor_time_idle(answer_s: float) -> None:
    """32 slots end about 70 samples a second, so a step of 128 takes 1.8 s, of which an update takes 50 ms: 97 % of the time is
    left. Nothing trained is older than eta, however much was sent ahead."""
    found = simulate(Case(answer_s=answer_s, slots=SLOTS), warm_s=4.0, seconds=5.0)
    full = SLOTS / (STEP_S + STEP_SAMPLE_S * SLOTS)
    assert found["slots_busy_share"] >= 0.95
    assert found["decoding_share"] >= 1 - 2 * UPDATE_S / 1.8
    assert found["tokens_per_s"] >= 0.9 * full
    assert 0 < found["oldest_token_steps"] <= ETA
