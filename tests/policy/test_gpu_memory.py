"""When a GPU may be used again after a kill."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.policy.gpu_memory import CardReading, memory_verdict

GB = 1e9


def reading(
    pids: tuple[int, ...] | None = (),
    used: float | None = 0.5 * GB,
    total: float | None = 80 * GB,
    made_s: float = 11.0,
) -> CardReading:
    return CardReading(made_s=made_s, pids=pids, used_bytes=used, total_bytes=total)


@pytest.mark.parametrize(
    ("seen", "state", "why"),
    [
        (reading(), "back", ""),
        (reading(pids=(7, 8)), "held", "processes 7, 8"),
        (reading(used=60 * GB), "held", "60.0 GB in use, by no process that the driver lists"),  # another PID namespace
        (reading(pids=None, used=60 * GB), "held", "60.0 GB in use, processes are not listed"),
        (reading(pids=None), "back", ""),
        (reading(used=3 * GB), "back", ""),  # 5 % of 80 GB is 4
        (reading(used=0.9 * GB, total=8 * GB), "back", ""),  # a small card: the driver's own is more than 5 %
        (reading(used=None, total=None), "back", ""),  # MIG without figures: the list is the only witness
        (reading(pids=None, used=None), "unknown", "the driver tells neither processes nor memory"),
        (reading(made_s=10.0), "unknown", "no reading since"),
        (None, "unknown", "no reading since"),
    ],
)
def test_what_a_reading_says(seen: CardReading | None, state: str, why: str) -> None:
    verdict = memory_verdict(seen, killed_s=10.0)
    assert (verdict.state, verdict.why) == (state, why)


@given(
    pids=st.one_of(st.none(), st.lists(st.integers(1, 9), max_size=2).map(tuple)),
    used=st.one_of(st.none(), st.floats(0, 90 * GB)),
    made_s=st.floats(0, 20),
)
def test_it_is_never_back_on_an_old_reading_or_with_an_engine_in_memory(
    pids: tuple[int, ...] | None, used: float | None, made_s: float
) -> None:
    verdict = memory_verdict(reading(pids=pids, used=used, made_s=made_s), killed_s=10.0)
    engine_there = bool(pids) or (used is not None and used > 4 * GB)
    if made_s <= 10.0 or engine_there:
        assert verdict.state != "back"
    assert (verdict.why == "") == (verdict.state == "back")


@pytest.mark.parametrize(
    ("seen", "state"),
    [
        (reading(pids=(7,), used=40 * GB), "back"),  # the other half of 80 GB, full
        (reading(pids=(7,), used=43.9 * GB), "back"),  # and the driver's own 5 %
        (reading(pids=(7,), used=44.1 * GB), "held"),
        (reading(pids=None, used=60 * GB), "held"),
        (reading(pids=(7,), used=None), "unknown"),
        (reading(pids=(), used=None), "back"),  # nobody is there
        (reading(pids=(7,), used=10 * GB, made_s=10.0), "unknown"),
    ],
)
def test_of_half_a_card_the_memory_decides(seen: CardReading, state: str) -> None:
    """Others compute on the card, so a process there is no sign of the killed one."""
    assert memory_verdict(seen, killed_s=10.0, share=0.5).state == state
