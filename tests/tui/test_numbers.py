"""Figures for people."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexctl.tui.view import numbers as n

ANY = (
    st.none()
    | st.sampled_from([math.nan, math.inf, -math.inf, -0.0])
    | st.floats(-1e18, 1e18)
    | st.integers(-(10**15), 10**15)
)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (n.tokens_per_s(1842.4), "1,842 tok/s"),
        (n.tokens_per_s(3.25), "3.2 tok/s"),
        (n.tokens_per_s(0.0), "0 tok/s"),
        (n.tokens_per_s(None), "—"),
        (n.rate(1.25e6), "1.25M"),
        (n.dollars_per(0.482, "Mtok"), "$0.48/Mtok"),
        (n.dollars_per(None, "Mtok"), "—"),
        (n.dollars(0.0042), "$0.0042"),
        (n.dollars(1234.5), "$1,234"),
        (n.dollars(0), "$0"),
        (n.percent(0.974), "97 %"),
        (n.percent(0.006), "0.6 %"),
        (n.percent(0.0, 0), "0 %"),
        (n.percent(None), "—"),
        (n.signed_percent(0.021), "+2 %"),
        (n.signed_percent(-0.22), "−22 %"),
        (n.signed_percent(0.001), "±0 %"),
        (n.gibibytes(61 * 2**30), "61"),
        (n.gibibytes(3.2 * 2**30), "3.2"),
        (n.byte_size(512 * 2**20), "512 MiB"),
        (n.byte_size(2.1 * 2**30), "2.1 GiB"),
        (n.age(0.41), "0.4 s"),
        (n.age(41), "41 s"),
        (n.age(190), "3 min"),
        (n.age(7300), "2 h"),
        (n.age(200_000), "2 d"),
        (n.clock(761), "12:41"),
        (n.clock(11561), "3:12:41"),
        (n.clock(200_000), "2 d 07:33"),
        (n.time_of_day(0, 3600), "01:00:00"),
        (n.time_of_day(86399, 0), "23:59:59"),
        (n.seconds(0.0123), "12 ms"),
        (n.seconds(4.21), "4.2 s"),
        (n.compact(950), "950"),
        (n.compact(999_960), "1.00M"),
        (n.compact(12_340), "12.3k"),
        (n.figure(1.2e-7), "1.2e-07"),
        (n.figure(-0.0031), "−0.0031"),
        (n.grouped(-1842.0), "−1,842"),
        (n.grouped(-0.001, 1), "0.0"),
    ],
)
def test_figures(said: str, expected: str) -> None:
    assert said == expected


SHOWN = [
    n.grouped,
    n.compact,
    n.rate,
    n.dollars,
    n.percent,
    n.signed_percent,
    n.gibibytes,
    n.byte_size,
    n.age,
    n.clock,
    n.seconds,
    n.figure,
]


@given(value=ANY)
def test_unknown_is_a_dash_and_nothing_else_is(value: float | None) -> None:
    unknown = value is None or not math.isfinite(value)
    for show in SHOWN:
        text = show(value)
        assert (text == n.NA) == unknown, (show.__name__, text)
        assert "nan" not in text
        assert "inf" not in text
        assert "-" not in text.replace("e-", "")  # a true minus, U+2212


@given(value=st.floats(0, 9.9e14))
def test_counts_fit_five_cells_and_keep_three_digits(value: float) -> None:
    text = n.compact(value)
    assert len(text) <= 5
    scale = {"k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.get(text[-1], 1.0)
    read = float(text.rstrip("kMGT")) * scale
    assert abs(read - value) <= max(0.5, 0.006 * value)


@given(seconds=st.floats(0, 1e8))
def test_ages_fit_their_column_up_to_a_year(seconds: float) -> None:
    assert len(n.age(min(seconds, 3e7))) <= 6
