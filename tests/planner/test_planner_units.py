"""Units at the edge: decimal against binary, bits against bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.errors import InvalidInput
from planner.units import parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("80 GB", 80e9),
        ("96 GiB", 96 * 2**30),
        ("8 Gbit", 1e9),
        ("1 b", 0.125),
        ("512", None),
        ("5 MB", 5e6),
        ("1 KiB", 1024),
    ],
)
def test_amounts(text: str, bytes_: float | None) -> None:
    if bytes_ is None:
        with pytest.raises(InvalidInput, match="memory"):
            parse_bytes(text)
    else:
        assert parse_bytes(text) == bytes_


@pytest.mark.parametrize(
    ("text", "rate"), [("400 Gbit/s", 5e10), ("1.5 GB/s", 1.5e9), ("10 Gbps", 1.25e9), ("3.35 TB/s", 3.35e12)]
)
def test_bandwidths(text: str, rate: float) -> None:
    assert parse_bytes_per_s(text) == pytest.approx(rate)


def test_compute_is_decimal() -> None:
    assert parse_flops("989 TFLOP/s") == 989e12
    assert parse_flops("1 PFLOPS") == 1e15


@pytest.mark.parametrize("parse", [parse_bytes, parse_bytes_per_s, parse_flops, parse_seconds])
@pytest.mark.parametrize("text", ["", "fast", "1 GX", "1,5 GB", "GB", True])
def test_nonsense_says_where(parse: object, text: object) -> None:
    with pytest.raises(InvalidInput, match=r"fleet\.kinds"):
        parse(text, where="fleet.kinds")  # type: ignore[operator]


@given(st.floats(0.001, 1e6))
def test_a_bit_is_an_eighth_of_a_byte(n: float) -> None:
    assert parse_bytes_per_s(f"{n:.6f} Gbit/s") * 8 == pytest.approx(parse_bytes_per_s(f"{n:.6f} GB/s"))


@given(st.floats(0, 1e9))
def test_a_bare_number_is_in_base_units(n: float) -> None:
    assert parse_bytes(n) == parse_flops(n) == parse_seconds(n) == parse_bytes_per_s(n) == n
