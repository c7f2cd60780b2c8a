"""When a device counts as slow, and whether a move pays: by hand and by property."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidInput
from runtime.policy.drift import DeviceDrift, DriftRule, pays, watched

RULE = DriftRule()  # slow at 0.85 for 30 s, fast again at 0.95 for 120 s


def seen(looks: list[tuple[float, float]], rule: DriftRule = RULE) -> list[tuple[float, bool]]:
    """(time, whether slow) after each look (time, share of its peers' speed) at one device."""
    drifts: dict[str, DeviceDrift] = {}
    out = []
    for at_s, share in looks:
        drifts = watched(drifts, {"d": share}, rule, at_s)
        out.append((at_s, drifts["d"].slow))
    return out


def test_a_device_is_slow_once_it_was_slow_for_the_dwell() -> None:
    assert seen([(0, 1.0), (10, 0.5), (39, 0.5), (40, 0.5)]) == [(0, False), (10, False), (39, False), (40, True)]


def test_a_break_begins_the_dwell_anew() -> None:
    assert seen([(0, 0.5), (29, 0.86), (30, 0.5), (59, 0.5), (60, 0.5)])[-3:] == [(30, False), (59, False), (60, True)]


def test_it_is_fast_again_only_well_above_the_limit_and_later() -> None:
    slow = [(0.0, 0.5), (30.0, 0.5)]
    assert seen([*slow, (31, 0.9), (500, 0.9)])[-1] == (500, True)
    assert seen([*slow, (31, 0.95), (150, 1.0), (151, 1.0)])[-2:] == [(150, True), (151, False)]


def test_each_recovery_doubles_the_next_dwell() -> None:
    """Slow at 30 s, fast at 151 s: the next verdict takes 60 s."""
    looks = [(0, 0.5), (30, 0.5), (31, 1.0), (151, 1.0), (152, 0.5), (211, 0.5), (212, 0.5)]
    assert [slow for _, slow in seen(looks)] == [False, True, True, False, False, False, True]


def test_a_device_without_a_figure_keeps_its_verdict() -> None:
    drifts = watched({}, {"d": 0.5}, RULE, 0.0)
    drifts = watched(drifts, {"d": 0.5}, RULE, 30.0)
    assert watched(drifts, {}, RULE, 10_000.0) == drifts


@given(st.lists(st.floats(0.851, 1.2), max_size=40), st.floats(0.1, 100.0))
def test_noise_above_the_limit_is_never_slow(shares: list[float], gap_s: float) -> None:
    assert not any(slow for _, slow in seen([(i * gap_s, s) for i, s in enumerate(shares)]))


@given(st.lists(st.tuples(st.floats(0.1, 60.0), st.floats(0.3, 1.2)), max_size=60))
def test_no_two_verdicts_are_closer_than_the_dwell(looks: list[tuple[float, float]]) -> None:
    at_s, timed = 0.0, []
    for gap_s, share in looks:
        at_s += gap_s
        timed.append((at_s, share))
    found = seen(timed)
    turns = [t for (t, now), (_, before) in zip(found, [(0.0, False), *found], strict=False) if now != before]
    assert all(b - a >= RULE.enter_s - 1e-9 for a, b in itertools.pairwise(turns))


def test_a_move_pays_when_it_earns_half_again_its_cost_in_half_an_hour() -> None:
    """60 s at a gain of 5 %: 1800 x 0.05 = 90 s, 1.5 times 60."""
    assert not pays(100.0, 104.9, 60.0, RULE)
    assert pays(100.0, 105.1, 60.0, RULE)
    assert not pays(100.0, 90.0, 0.0, RULE)
    assert pays(0.0, 1.0, 60.0, RULE)


def test_limits_in_the_wrong_order_are_refused() -> None:
    with pytest.raises(InvalidInput, match="slower to be slow"):
        DriftRule(enter_share=0.95, leave_share=0.9)
