"""What a last-level cache saves a repeated kernel, by hand, and that no fitted curve holds it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.caches import (
    CACHE_BYTES,
    GEMM_COPIES,
    Cache,
    best_share,
    cache_of,
    streamed_decode,
    streamed_gemm,
    unmeasured_cache,
)
from planner.calibration.curves import Sheet

# 1 GB/s of memory of which 80 % are reached; a cache of 100 MB at 4 GB/s.
SHEET = Sheet(peak_flops=1e15, hbm_bytes_per_s=1e9)
CACHE = Cache(size_bytes=100e6, bytes_per_s=4e9, hbm_share=0.8)


def test_what_a_cache_saves_by_hand() -> None:
    # 80 MB: 100 ms from memory, 20 ms from the cache. No FLOPs to hide behind.
    assert float(CACHE.saved_s(0.0, 80e6, 0.0, SHEET)) == pytest.approx(0.080)
    # 40 MB more that stream either way change nothing.
    assert float(CACHE.saved_s(0.0, 80e6, 40e6, SHEET)) == pytest.approx(0.080)
    # Two copies do not fit, nor do 101 MB.
    assert float(CACHE.saved_s(0.0, 80e6, 0.0, SHEET, copies=2)) == 0.0
    assert float(CACHE.saved_s(0.0, 101e6, 0.0, SHEET)) == 0.0
    # Beside 100 ms of FLOPs: (0.1^1.5 + 0.1^1.5)^(2/3) less (0.1^1.5 + 0.02^1.5)^(2/3).
    hidden = 0.1 * 2 ** (2 / 3) - (0.1**1.5 + 0.02**1.5) ** (2 / 3)
    assert float(CACHE.saved_s(1e14, 80e6, 0.0, SHEET)) == pytest.approx(hidden)
    # A cache slower than memory, or one that never showed, saves nothing.
    for rate in (0.5e9, None):
        slow = Cache(size_bytes=100e6, bytes_per_s=rate, hbm_share=0.8)
        assert CACHE.saved_s([0.0, 0.0], [8e6, 80e6], 0.0, SHEET).all()
        assert not slow.saved_s([0.0, 0.0], [8e6, 80e6], 0.0, SHEET).any()


@given(st.floats(0, 1e15), st.floats(1, 2e8), st.floats(0, 1e9), st.integers(1, 6))
def test_a_cache_saves_no_more_than_reading_takes(flops: float, held: float, rest: float, copies: int) -> None:
    saved = float(CACHE.saved_s(flops, held, rest, SHEET, copies))
    assert 0.0 <= saved <= held * (1 / 0.8e9 - 1 / 4e9) * (1 + 1e-9) + 1e-15
    if copies * held > CACHE.size_bytes:
        assert saved == 0.0


def _reads(rate_of: dict[int, float]) -> dict[tuple[int, ...], float]:
    """Attention of one sample and one head of each: 512 bytes a token, a floor of 1 ms, by context the rate."""
    return {(1, context, 1, 1): 1e-3 + 512 * context / rate for context, rate in rate_of.items()}


def test_a_cache_is_read_off_the_table_where_reads_beat_memory() -> None:
    mib = 2**20
    sheet = Sheet(peak_flops=1e18, hbm_bytes_per_s=1e9)
    # L40S holds 96 MiB: of 512 bytes a token, 196,608 tokens. Larger reads stream at 0.9 GB/s.
    points = _reads({2: 1e9, 96 * mib // 1024: 5e9, 96 * mib // 512: 5e9, 2**20: 0.9e9, 2**21: 0.9e9})
    found = cache_of("L40S", points, sheet)
    assert found.size_bytes == CACHE_BYTES["L40S"] == 96 * mib
    assert found.bytes_per_s == pytest.approx(5e9, rel=1e-3)
    assert found.hbm_share == pytest.approx(0.9, rel=0.01)
    assert found.hbm_share == best_share(points, sheet)
    streamed = streamed_decode(points, found, sheet)
    held = (1, 96 * mib // 512, 1, 1)
    by_hand = points[held] + 96 * mib * (1 / (found.hbm_share * 1e9) - 1 / found.bytes_per_s)
    assert streamed[held] == pytest.approx(by_hand, rel=1e-6)
    assert streamed[1, 2**20, 1, 1] == points[1, 2**20, 1, 1]
    # The same reads below the speed of memory show no cache: as measured.
    plain = _reads({2: 1e9, 96 * mib // 1024: 0.9e9, 96 * mib // 512: 0.9e9, 2**20: 0.9e9, 2**21: 0.9e9})
    unseen = cache_of("L40S", plain, sheet)
    assert unseen.bytes_per_s is None
    assert streamed_decode(plain, unseen, sheet) == plain


def test_products_that_no_cache_explains_stay_as_measured() -> None:
    # Weights of 8 MB: six copies fit into 100 MB. 10 ms from memory at 0.8 GB/s, 2 ms from the cache.
    m, n, k = 1, 2000, 2000
    weights, rest = 2 * n * k, 2 * (m * k + m * n)
    assert GEMM_COPIES * weights <= CACHE.size_bytes
    floor = (1, 10, 10)
    cached, slow = {floor: 1e-4, (m, n, k): 3e-3}, {floor: 1e-4, (m, n, k): 11e-3}
    got = streamed_gemm(cached, 2, CACHE, SHEET)[m, n, k]
    assert got == pytest.approx(3e-3 + weights * (1 / 0.8e9 - 1 / 4e9), rel=1e-3)
    assert got >= (weights + rest) / 1e9
    assert streamed_gemm(slow, 2, CACHE, SHEET)[m, n, k] == 11e-3
    # Weights of 32 MB: one copy would fit, six do not.
    large = {floor: 1e-4, (1, 4000, 4000): 3e-3}
    assert streamed_gemm(large, 2, CACHE, SHEET)[1, 4000, 4000] == 3e-3


def test_a_held_out_kind_takes_its_bytes_from_the_sheet_and_the_rate_of_others() -> None:
    seen = {
        "A100-80": Cache(size_bytes=1.0, bytes_per_s=None, hbm_share=0.8),
        "L40S": Cache(size_bytes=1.0, bytes_per_s=2e12, hbm_share=0.9),
        "RTX-PRO-6000": Cache(size_bytes=1.0, bytes_per_s=8e12, hbm_share=0.7),
    }
    found = unmeasured_cache("RTX-PRO-6000", seen, "A100-80")
    assert (found.size_bytes, found.hbm_share) == (128 * 2**20, 0.8)
    assert found.bytes_per_s == pytest.approx(2e12), "never its own"
    both = unmeasured_cache("H200", seen, "A100-80").bytes_per_s
    assert both == pytest.approx(math.sqrt(2e12 * 8e12))
    assert unmeasured_cache("L40S", {"A100-80": seen["A100-80"]}, "A100-80").bytes_per_s is None
    assert np.shape(CACHE.gemm_saved_s([[1.0, 2.0], [10, 10], [10, 10]], 2, SHEET)) == (2,)
