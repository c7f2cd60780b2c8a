"""Pacing files, and the deadline clock in virtual time."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.errors import ConfigError
from runtime.rl.pacing import LOOK_S, DevicePace, KindPacing, Pacer, load_pacing

SHIPPED = Path(__file__).parents[2] / "configs" / "paced" / "local.toml"


class VirtualClock:
    """Time that moves when told to, or when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.waits: list[float] = []

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.now += seconds
        return False


def make(**options: float) -> tuple[VirtualClock, Pacer]:
    clock = VirtualClock()
    return clock, Pacer(clock.wait, clock=clock, **options)


# ---- files


def test_the_shipped_speeds_give_the_promised_regime() -> None:
    """A step of 256 samples in 0.6-0.8 s on the fast kind; a sample of 4-10 tokens lasts about one to two of them."""
    spec = load_pacing(SHIPPED)
    step_s = spec.kind("fast").training_s(256 * (10 + 7))
    assert 0.6 <= step_s <= 0.8
    for name in ("wide", "old"):
        token_s = spec.kind(name).generation_s(samples=100, prefill_tokens=0)
        assert 0.09 <= token_s <= 0.13
        assert 4 * token_s > 0.5 * step_s
        assert 10 * token_s < 2 * step_s


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[kinds.a]\ndecode_step_s = \n", r"line 2"),
        ("", "kinds"),
        ("[kinds]\n", "kinds"),
        (
            "[kinds.a]\ndecode_step_s = -1\nprefill_tokens_per_s = 1\ntrain_tokens_per_s = 0\n",
            "decode_step_s.*train_tokens",
        ),
        ("[kinds.a]\ndecode_step_s = 1\nprefill_tokens_per_s = 1\n", r"kinds\.a\.train_tokens_per_s"),
        ("[kinds.a]\ndecode_step_s = 1\nprefill_tokens_per_s = 1\ntrain_tokens_per_s = inf\n", "finite"),
        ("[kinds.a]\ndecode_step_s=1\nprefill_tokens_per_s=1\ntrain_tokens_per_s=1\nspeed=1\n", r"kinds\.a\.speed"),
    ],
)
def test_a_faulty_file_is_named_with_the_place(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "speeds.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        load_pacing(file)
    assert str(file) in str(raised.value)


def test_absent_files_and_kinds(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_pacing(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"'slow'.*fast, old, wide"):
        load_pacing(SHIPPED).kind("slow")


def test_durations() -> None:
    kind = KindPacing(decode_step_s=0.1, decode_sample_s=0.001, prefill_tokens_per_s=1000, train_tokens_per_s=500)
    assert kind.generation_s(samples=50, prefill_tokens=200) == pytest.approx(0.1 + 0.05 + 0.2)
    assert kind.generation_s(samples=0, prefill_tokens=0) == 0.0
    assert kind.training_s(250) == 0.5


# ---- the clock


def test_a_fast_host_is_held_to_the_declared_speed() -> None:
    clock, pacer = make()
    pacer.begin()
    for _ in range(100):
        clock.now += 0.02
        pacer.charge(0.1)
    assert clock.now == pytest.approx(110.0)
    assert pacer.lag_share == pytest.approx(0.0, abs=1e-9)
    assert not pacer.host_bound


def test_one_late_step_is_caught_up() -> None:
    clock, pacer = make()
    pacer.begin()
    clock.now += 0.25  # 0.15 late
    pacer.charge(0.1)
    for _ in range(9):
        clock.now += 0.02
        pacer.charge(0.1)
    assert clock.now == pytest.approx(101.0)
    assert clock.waits[0] == pytest.approx(0.01)  # in step three, at 100.29 of 100.30


def test_debt_beyond_the_bound_is_lost() -> None:
    clock, pacer = make(max_debt_s=0.5)
    pacer.begin()
    clock.now += 3.1  # 3.0 late: 0.5 may be caught up
    pacer.charge(0.1)
    for _ in range(100):
        pacer.charge(0.1)
    assert clock.now == pytest.approx(100 + 3.1 - 0.5 + 10.0)


def test_a_slow_host_is_host_bound_and_recovers() -> None:
    clock, pacer = make(window_s=10.0, settle_s=2.0)
    pacer.begin()
    for _ in range(10):
        clock.now += 0.125
        pacer.charge(0.1)
    assert pacer.lag_share is None  # not enough seen yet
    for _ in range(90):
        clock.now += 0.125
        pacer.charge(0.1)
    assert pacer.lag_share == pytest.approx(0.2, abs=0.01)
    assert pacer.host_bound
    for _ in range(200):
        clock.now += 0.02
        pacer.charge(0.1)
    assert pacer.lag_share == pytest.approx(0.0, abs=1e-9)
    assert not pacer.host_bound


def test_idle_time_is_nobodys() -> None:
    clock, pacer = make()
    for _ in range(30):
        pacer.begin()
        clock.now += 0.05
        pacer.charge(0.1)
        pacer.idle()
        clock.now += 5.0
    assert clock.now == pytest.approx(100 + 30 * 5.1)
    assert pacer.lag_share == pytest.approx(0.0, abs=1e-9)


def test_an_interrupted_wait_returns_and_does_not_count_as_lag() -> None:
    clock = VirtualClock()
    pacer = Pacer(lambda _: True, clock=clock, settle_s=0.0)
    pacer.begin()
    clock.now += 0.01
    pacer.charge(60.0)
    assert clock.now == pytest.approx(100.01)
    assert pacer.lag_share == 0.0


@given(st.lists(st.tuples(st.floats(0, 0.4), st.floats(0.001, 0.4)), min_size=1, max_size=60))
def test_never_ahead_of_the_clock_and_behind_only_by_what_the_host_took(steps: list[tuple[float, float]]) -> None:
    """At every charge: elapsed >= charged; the deadline with unlimited debt is max over prefixes of host and declared time."""
    clock, pacer = make(max_debt_s=1e9)
    pacer.begin()
    charged = 0.0
    at = 100.0
    for host_s, declared_s in steps:
        clock.now += host_s
        pacer.charge(declared_s)
        charged += declared_s
        at = max(at + host_s, 100.0 + charged)
        assert clock.now >= 100.0 + charged - 1e-9
        assert clock.now == pytest.approx(at)


# ---- a pace that is cut while it runs

KIND = "[kinds.k]\ndecode_step_s = 0.1\nprefill_tokens_per_s = 1000\ntrain_tokens_per_s = 500\n"


def test_a_device_reads_its_pace_again_when_the_file_changes(tmp_path: Path) -> None:
    file, clock = tmp_path / "pacing.toml", VirtualClock()
    file.write_text(KIND)
    one, other = (DevicePace(file, "k", d, clock=clock) for d in ("d1", "d2"))
    assert (one.generation_s(samples=4, prefill_tokens=100), one.training_s(1000)) == (pytest.approx(0.2), 2.0)
    file.write_text(KIND + '[devices."d1"]\nspeed = 0.25\n')
    assert one.training_s(1000) == 2.0  # it looks once a second
    clock.now += LOOK_S
    assert (one.generation_s(samples=4, prefill_tokens=100), one.training_s(1000)) == (pytest.approx(0.8), 8.0)
    assert other.training_s(1000) == 2.0
    file.write_text("[kinds")  # half written
    clock.now += LOOK_S
    assert one.training_s(1000) == 8.0
    file.unlink()
    clock.now += LOOK_S
    assert one.training_s(1000) == 8.0
    file.write_text(KIND + "# its own speed again\n")
    clock.now += LOOK_S
    assert one.training_s(1000) == 2.0


def test_a_device_without_a_declared_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pacing.toml"
    file.write_text(KIND)
    with pytest.raises(ConfigError, match="no declared speed"):
        DevicePace(file, "other", "d1")
