"""Reading GPUs: what is missing stays missing, what hangs holds up nobody, what is gone is told from what is silent."""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fake_nvml import BUSY, IDLE, CardFacts, FakeNvml
from hypothesis import given
from hypothesis import strategies as st

from planner.record import replace
from runtime.telemetry.gpus import GpuLevel, GpuWatch
from runtime.telemetry.nvml import Nvml, NvmlProblem
from runtime.telemetry.polling import Poller
from runtime.telemetry.reading import GpuReading
from runtime.telemetry.throttle import decode

NOT_SUPPORTED = -1000 - FakeNvml.NVML_ERROR_NOT_SUPPORTED
UNKNOWN = -1000 - FakeNvml.NVML_ERROR_UNKNOWN
NOT_FOUND = -1000 - FakeNvml.NVML_ERROR_NOT_FOUND
LIMIT_S = 60.0


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def read(card: CardFacts) -> GpuReading:
    """One reading of one card."""
    nvml = Nvml(FakeNvml(card))
    return nvml.read(nvml.enumerate()[0])


def watching(open_library: Callable[[], Any], clock: Clock | None = None) -> GpuWatch:
    """A watch whose poll has read everything when it returns, however seldom the readers get their turn: nothing hangs here."""
    return GpuWatch(open_library, clock or Clock(), settle_s=LIMIT_S)


def polled(watch: GpuWatch, wanted: Callable[[GpuLevel], bool]) -> GpuLevel:
    """Poll until the level is as wanted; readings come from threads, so the first poll may be too early."""
    end = time.monotonic() + LIMIT_S
    while not wanted(level := watch.poll()):
        assert time.monotonic() < end, f"never seen; last: {level}"
    return level


class Hang(threading.Event):
    """A driver's call that hangs until it is set; `reached` says that somebody is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.reached.set()
        return super().wait(timeout)


def test_a_real_card_idle_and_busy() -> None:
    """Figures of an H200 as its driver gave them."""
    idle, busy = read(IDLE), read(BUSY)
    assert (idle.util_share, busy.util_share) == (0.0, 0.98)
    assert (idle.power_w, busy.power_w) == pytest.approx((79.991, 539.31))
    assert busy.memory_used_bytes == 78617903104
    assert busy.temperature_c == 53
    assert (idle.throttled, idle.throttle_reasons) == (False, ("idle",))
    assert (idle.pids, busy.pids) == ((), (417,))
    assert busy.pci == "00000000:00:06.0"


FIELDS = {
    "gpu": "util_share",
    "used": "memory_used_bytes",
    "power_mw": "power_w",
    "temperature": "temperature_c",
    "mask": "throttled",
    "pids": "pids",
}


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("answer", [NOT_SUPPORTED, UNKNOWN, NOT_FOUND])
def test_one_missing_figure_leaves_the_others(field: str, answer: int) -> None:
    """Each field against each way of not being there: that one is None, never 0, and nothing else changes."""
    whole, got = read(BUSY), read(replace(BUSY, **{field: answer}))
    missing = FIELDS[field]
    assert getattr(got, missing) is None
    lost_with_it = {"mask": {"throttle_reasons"}, "used": {"memory_total_bytes"}}.get(field, set())
    for other in set(FIELDS.values()) - {missing} - lost_with_it:
        assert getattr(got, other) == getattr(whole, other)


@pytest.mark.parametrize("sentinel", [2**64 - 1, 2**32 - 1, -1])
@pytest.mark.parametrize("field", ["gpu", "used", "power_mw", "temperature"])
def test_sentinels_are_no_figures(field: str, sentinel: int) -> None:
    """All ones of any width mean "not available"; they are dropped and counted."""
    nvml = Nvml(FakeNvml(replace(BUSY, **{field: sentinel})))
    assert getattr(nvml.read(nvml.enumerate()[0]), FIELDS[field]) is None
    assert nvml.rejected == 1


@given(gpu=st.integers(), power=st.integers(), temperature=st.integers(), used=st.integers())
def test_whatever_comes_is_plausible_or_missing(gpu: int, power: int, temperature: int, used: int) -> None:
    got = read(replace(BUSY, gpu=abs(gpu), power_mw=abs(power), temperature=abs(temperature), used=abs(used)))
    assert got.util_share is None or 0 <= got.util_share <= 1
    assert got.power_w is None or 0 <= got.power_w <= 3000
    assert got.temperature_c is None or -20 <= got.temperature_c <= 150
    assert got.memory_used_bytes is None or 0 <= got.memory_used_bytes <= BUSY.total


def test_an_unsupported_call_is_not_made_every_time() -> None:
    """It is remembered, and tried again after a while."""
    fake = FakeNvml(replace(BUSY, power_mw=NOT_SUPPORTED))
    nvml = Nvml(fake)
    gpu = nvml.enumerate()[0]
    for _ in range(59):
        nvml.read(gpu)
    assert fake.calls["nvmlDeviceGetPowerUsage"] == 1
    fake.cards[0] = BUSY
    for _ in range(3):
        last = nvml.read(nvml.enumerate()[0])
    assert last.power_w == pytest.approx(539.31)


def test_older_drivers_have_other_symbols() -> None:
    """Clock reasons under their old name, and under the new one that the driver lacks."""
    fake = FakeNvml(replace(BUSY, mask=0x40))
    fake.errors["nvmlDeviceGetCurrentClocksEventReasons"] = FakeNvml.NVML_ERROR_FUNCTION_NOT_FOUND
    nvml = Nvml(fake)
    got = nvml.read(nvml.enumerate()[0])
    assert (got.throttled, got.throttle_reasons) == (True, ("hardware thermal slowdown",))


@pytest.mark.parametrize(
    ("mask", "alarm"),
    [
        (0, False),
        (1, False),
        (2, False),
        (4, False),
        (8, True),
        (16, False),
        (32, True),
        (64, True),
        (128, True),
        (256, False),
    ],
)
def test_only_heat_and_brakes_alarm(mask: int, alarm: bool) -> None:
    assert decode(mask)[0] is alarm
    assert decode(mask | 1)[0] is alarm  # idling beside it changes nothing
    assert len(decode(mask)[1]) == (mask != 0)


def test_an_unknown_bit_is_named() -> None:
    assert decode(0x1000) == (False, ("bits 0x1000",))


@pytest.mark.parametrize(
    ("code", "state", "words"),
    [
        (FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "version-mismatch", "kernel module 535.1"),
        (FakeNvml.NVML_ERROR_DRIVER_NOT_LOADED, "no-driver", "kernel module is not loaded"),
        (FakeNvml.NVML_ERROR_LIBRARY_NOT_FOUND, "no-library", "libnvidia-ml.so.1"),
        (FakeNvml.NVML_ERROR_NO_PERMISSION, "no-permission", "no permission"),
        (FakeNvml.NVML_ERROR_UNKNOWN, "error", "does not start"),
    ],
)
def test_each_way_of_not_starting_has_its_words(code: int, state: str, words: str) -> None:
    fake = FakeNvml(BUSY)
    fake.errors["nvmlInit"] = code
    with pytest.raises(NvmlProblem, match=words) as caught:
        Nvml(fake, driver_on_disk=lambda: "535.1").enumerate()
    assert caught.value.state == state


def test_a_mismatch_ends_without_a_restart() -> None:
    """Five polls with another library version, then it fits: degraded, then live, in the same process."""
    fake = FakeNvml(BUSY)
    fake.errors["nvmlInit"] = FakeNvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    watch = watching(lambda: fake)
    for _ in range(5):
        assert polled(watch, lambda v: v.library != "off").library == "version-mismatch"
    fake.errors.clear()
    level = polled(watch, lambda v: bool(v.gpus) and v.gpus[0].util_share is not None)
    assert (level.library, level.message) == ("ok", "")


def test_ten_thousand_reads_open_the_library_once() -> None:
    """One initialisation, no descriptor more than at the start."""
    fake = FakeNvml(BUSY)
    nvml = Nvml(fake)
    nvml.enumerate()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10_000):
        nvml.read(nvml.enumerate()[0])
    assert fake.inits == 1
    assert len(os.listdir("/proc/self/fd")) == before


def test_access_lost_is_initialised_again_without_a_leak() -> None:
    """A container that loses its GPUs: the last figures stay with an age, every retry gives back what it took."""
    fake, clock = FakeNvml(BUSY), Clock()
    watch = watching(lambda: fake, clock)
    polled(watch, lambda v: bool(v.gpus) and v.gpus[0].age_s is not None)
    fake.errors["nvmlDeviceGetCount"] = FakeNvml.NVML_ERROR_UNKNOWN
    clock.now += 7
    level = polled(watch, lambda v: v.library == "access-lost")
    assert "recreate it" in level.message
    assert level.gpus[0].present is None
    assert level.gpus[0].util_share == 0.98
    assert level.gpus[0].age_s == pytest.approx(7.0)
    fake.errors.clear()
    polled(watch, lambda v: v.library == "ok" and v.gpus[0].age_s == 0.0)
    assert fake.inits - fake.shutdowns == 1


def test_one_hung_card_holds_up_nobody() -> None:
    """Card 3's driver call never returns: the others go on, its row says for how long, its last figures stay."""
    hang = Hang()
    cards = [replace(BUSY, uuid=f"GPU-{i}", bus=f"0:{i}") for i in range(4)]
    fake, clock = FakeNvml(*cards), Clock()
    watch = GpuWatch(lambda: fake, clock, settle_s=0.2)
    polled(watch, lambda v: len(v.gpus) == 4 and all(g.age_s is not None for g in v.gpus))
    fake.cards[3] = replace(cards[3], gpu=hang)
    polled(watch, lambda _: hang.reached.is_set())
    clock.now += 12
    level = polled(watch, lambda v: all(g.age_s == 0.0 for g in v.gpus[:3]))
    assert level.gpus[3].note == "driver not answering 12 s"
    assert level.gpus[3].age_s == pytest.approx(12.0)
    assert level.gpus[3].util_share == 0.98
    assert [g.note for g in level.gpus[:3]] == ["", "", ""]
    hang.set()
    fake.cards[3] = cards[3]
    polled(watch, lambda v: v.gpus[3].note == "" and v.gpus[3].age_s == 0.0)


def test_a_hung_enumeration_is_silence_not_loss() -> None:
    """The call that lists the cards hangs: nobody is declared gone."""
    fake, clock = FakeNvml(BUSY), Clock()
    watch = GpuWatch(lambda: fake, clock, settle_s=0.1)
    polled(watch, lambda v: bool(v.gpus))
    hang = Hang()
    original = fake.nvmlDeviceGetCount

    def hanging() -> int:
        hang.wait()
        return original()

    fake.nvmlDeviceGetCount = hanging  # type: ignore[method-assign]
    polled(watch, lambda _: hang.reached.is_set())
    clock.now += 5
    level = watch.poll()
    assert level.library == "error"
    assert "not answering 5 s" in level.message
    assert level.gpus[0].present is None
    hang.set()


def test_who_has_waited_for_a_read_finds_none_under_way() -> None:
    """Also when it was asked for in the moment in which the one before ended."""
    switch_s, short = sys.getswitchinterval(), threading.Event()
    poller = Poller("x", lambda: short.wait(0.001))
    sys.setswitchinterval(1e-6)  # threads take turns wherever they can
    try:
        for _ in range(300):
            poller.ask()
            while poller.hung_s():
                pass
            poller.ask()
            assert poller.settle(LIMIT_S)
            assert poller.hung_s() == 0.0
    finally:
        sys.setswitchinterval(switch_s)
        poller.close()


def test_identity_is_the_uuid_not_the_index() -> None:
    """Card 1 leaves, so that card 2 gets its index: both rows keep their identity, one is gone."""
    cards = [replace(BUSY, uuid=f"GPU-{c}", temperature=40 + i) for i, c in enumerate("abc")]
    fake = FakeNvml(*cards)
    watch = watching(lambda: fake)
    polled(watch, lambda v: len(v.gpus) == 3 and all(g.age_s is not None for g in v.gpus))
    fake.cards = [cards[0], cards[2]]
    level = polled(watch, lambda v: any(g.present is False for g in v.gpus))
    by_id = {g.id: g for g in level.gpus}
    assert by_id["GPU-b"].present is False
    assert "no longer lists" in by_id["GPU-b"].note
    assert (by_id["GPU-c"].index, by_id["GPU-c"].temperature_c, by_id["GPU-c"].present) == (1, 42, True)


def test_a_card_that_fell_off_the_bus_says_so() -> None:
    lost: Any = -1000 - FakeNvml.NVML_ERROR_GPU_IS_LOST
    fake = FakeNvml(BUSY)
    watch = watching(lambda: fake)
    polled(watch, lambda v: bool(v.gpus) and v.gpus[0].age_s is not None)
    fake.cards[0] = replace(BUSY, gpu=lost)
    level = polled(watch, lambda v: v.gpus[0].present is False)
    assert "fell off the bus" in level.gpus[0].note


def test_no_card_is_said() -> None:
    level = polled(watching(FakeNvml), lambda v: v.library == "ok")
    assert level.message == "the driver shows no GPU"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ((0, 0, 0, 0), ""),
        ((4, 1, 0, 0), ""),  # replaced: done
        ((0, 4, 1, 0), "needs a reset"),
        ((0, 4, 1, 1), "replace the GPU"),
        (NOT_SUPPORTED, ""),
        (UNKNOWN, ""),
    ],
)
def test_rows_of_memory_that_wait_to_be_remapped_are_said(rows: Any, words: str) -> None:
    got = read(replace(BUSY, rows=rows))
    assert (words in got.note) if words else got.note == ""
    assert got.memory_used_bytes == BUSY.used


def test_remapped_rows_are_asked_for_now_and_then_and_seen_in_the_level() -> None:
    lib = FakeNvml(replace(BUSY, rows=(0, 1, 1, 0)))
    watch = watching(lambda: lib)
    level = polled(watch, lambda v: len(v.gpus) == 1 and v.gpus[0].age_s is not None)
    assert "needs a reset" in level.gpus[0].note
    nvml = Nvml(lib)
    (card,) = nvml.enumerate()
    lib.calls.clear()
    for _ in range(120):
        assert "needs a reset" in nvml.read(card).note
    assert lib.calls["nvmlDeviceGetRemappedRows"] == 2


# ---- MIG


def an_instance(number: int) -> CardFacts:
    """As a driver gives one: memory and processes of its own, no utilisation, no power."""
    return CardFacts(
        uuid=f"MIG-{number}", name="NVIDIA H200 MIG 1g.18gb", gpu=NOT_SUPPORTED, total=18 * 2**30, used=2**20 * number,
        power_mw=NOT_SUPPORTED, temperature=NOT_SUPPORTED, mask=NOT_SUPPORTED, pids=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "note"), [(NOT_SUPPORTED, False), (UNKNOWN, False), ([0, 0], False), ([0, 1], False), ([1, 0], True)]
)
def test_no_mig_mig_off_and_mig_on_are_three_things(mode: Any, note: bool) -> None:
    """Only of a card that is divided now nobody may compute on the whole; the others keep every figure."""
    got = read(replace(BUSY, mig=mode))
    assert ("MIG is on" in got.note) == note
    assert (got.util_share, got.power_w, got.pids) == (0.98, pytest.approx(539.31), (417,))


def test_instances_come_go_and_have_the_figures_they_have() -> None:
    """Cut anew between two polls: no error, the new ones are there, those that went are said to be gone."""
    divided = replace(BUSY, mig=[1, 1], gpu=NOT_SUPPORTED, instances=(an_instance(1), None, an_instance(2)))
    lib = FakeNvml(divided)
    watch = watching(lambda: lib)
    level = polled(watch, lambda v: len(v.gpus) == 3 and all(g.age_s is not None for g in v.gpus))
    assert [g.id for g in level.gpus] == [BUSY.uuid, "MIG-1", "MIG-2"]
    card, one, two = level.gpus
    assert "MIG is on" in card.note
    assert (card.util_share, card.power_w) == (None, pytest.approx(539.31))
    assert (one.note, one.util_share, one.power_w, one.pids) == ("", None, None, ())
    assert (one.memory_total_bytes, two.memory_used_bytes) == (18 * 2**30, 2 * 2**20)
    lib.cards = [replace(divided, instances=(an_instance(3),))]
    level = polled(watch, lambda v: any(g.id == "MIG-3" and g.age_s is not None for g in v.gpus))
    by_id = {g.id: g for g in level.gpus}
    assert (by_id["MIG-1"].present, by_id["MIG-2"].present, by_id["MIG-3"].present) == (False, False, True)
    assert "gone" in by_id["MIG-1"].note


@pytest.mark.parametrize("code", [FakeNvml.NVML_ERROR_RESET_REQUIRED, FakeNvml.NVML_ERROR_GPU_IS_LOST])
def test_a_card_that_fails_at_the_question_for_mig_harms_no_other(code: int) -> None:
    lib = FakeNvml(replace(BUSY, uuid="GPU-bad", mig=-1000 - code), replace(IDLE, uuid="GPU-good"))
    watch = watching(lambda: lib)
    for _ in range(3):
        level = polled(watch, lambda v: len(v.gpus) == 2 and all(g.age_s is not None for g in v.gpus))
        assert level.library == "ok"
    assert (lib.inits, lib.shutdowns) == (1, 0)
