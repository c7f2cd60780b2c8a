"""Predicted beside measured: blocks worked by hand, what counts and what does not, and what the factors converge to."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from values import NOW_S, device, fleet, flow, observed, replica, solved, started, stored, trainer

from planner.record import replace
from runtime.core.calibrating import (
    BLOCK_S,
    LEAST,
    LEAST_SAMPLES,
    MATERIAL,
    MOST,
    Calibrating,
    Model,
    Modelled,
    calibrate,
    drift_of,
    factor_for,
    kind_estimates,
)
from runtime.core.event import DaemonStarted
from runtime.core.fleet_event import CalibrationChanged, DeviceJoined
from runtime.core.fold import fold
from runtime.core.observation import Observation, Work
from runtime.core.words import words

PLAN = solved("a", "b", "c")
UP = (*started("t0", "a"), *started("r0", "b"), *started("r1", "c"))


class Ideal:
    """A model by hand: a decode step takes 10 ms and 1 ms a sample, prefill 1000 tokens/s, training 500 tokens/s."""

    def decode(self, kind: str, devices: int, work: Work) -> Modelled | None:
        running = work.tokens / work.steps
        seconds = work.steps * (0.010 + 0.001 * running) + work.prefill_tokens / 1000
        return Modelled(seconds=seconds, tokens_per_s=work.tokens / seconds)

    def train(self, devices: tuple[str, ...], work: Work) -> Modelled | None:
        return Modelled(seconds=work.tokens / 500, tokens_per_s=400.0)


class Run:
    """A fleet whose works grow as told; every `look` is one observation."""

    def __init__(self, model: Model | None = None) -> None:
        self.state, self.memory, self.now_s = fleet("a", "b", "c", plan=PLAN, more=UP), Calibrating(), NOW_S
        self.work = {u: Work(busy_s=10.0, steps=100, tokens=1000) for u in ("r0", "r1", "t0")}
        self.model = model or Ideal()
        self.events: list[CalibrationChanged] = []
        self.look()  # the marks

    def add(self, unit: str, *, busy_s: float, steps: int, tokens: int, prefill_tokens: int = 0) -> None:
        w = self.work[unit]
        self.work[unit] = Work(
            busy_s=w.busy_s + busy_s,
            steps=w.steps + steps,
            tokens=w.tokens + tokens,
            prefill_tokens=w.prefill_tokens + prefill_tokens,
        )

    def look(self, seconds: float = 1.0, **sample: object) -> tuple[CalibrationChanged, ...]:
        self.now_s += seconds
        events, self.memory = calibrate(self.seen(**sample), self.state, self.memory, lambda: self.model, self.now_s)
        self.state = fold(self.state, stored(*events))
        self.events += events
        return events

    def seen(self, **sample: object) -> Observation:
        return observed(
            device("a"),
            device("b", **sample),
            device("c"),
            trainer("a", work=self.work["t0"]),
            replica("r0", "b", work=self.work["r0"]),
            replica("r1", "c", work=self.work["r1"]),
            of_flow=flow(),
        )

    def decode(self, unit: str, speed: float, *, running: int = 10) -> None:
        """A block of exactly `speed` times the modelled speed."""
        steps = 1000
        self.add(unit, busy_s=steps * (0.010 + 0.001 * running) / speed, steps=steps, tokens=steps * running)


def test_a_block_worked_by_hand() -> None:
    # 400 steps of 30 samples: modelled 400 x 40 ms = 16 s, and 4000 prefilled tokens = 4 s: 20 s. It took 25 s.
    run = Run()
    run.add("r0", busy_s=25.0, steps=400, tokens=12_000, prefill_tokens=4_000)
    run.look()
    found = run.memory.estimates["b", "rollout"]
    assert math.exp(found.log_ratio) == pytest.approx(0.8)
    assert (found.running, found.samples) == (30.0, 1)
    assert found.modelled_step_s == pytest.approx(0.05)
    assert found.measured_step_s == pytest.approx(0.0625)
    assert found.modelled_tokens_per_s == pytest.approx(600.0)
    assert found.measured_tokens_per_s == pytest.approx(480.0)
    assert run.events == []  # one sample is not enough


def test_a_trainer_worked_by_hand() -> None:
    # 3 steps of 2000 tokens: modelled 12 s at 500 tokens/s; they took 10 s.
    run = Run()
    run.add("t0", busy_s=10.0, steps=3, tokens=6_000)
    run.look()
    found = run.memory.estimates["a", "train"]
    assert math.exp(found.log_ratio) == pytest.approx(1.2)
    assert found.measured_step_s == pytest.approx(10 / 3)
    assert found.measured_tokens_per_s == pytest.approx(480.0)
    assert found.running is None


def test_the_factor_is_an_event_after_enough_samples_and_not_again_before_it_changes() -> None:
    run = Run()
    for i in range(LEAST_SAMPLES):
        assert run.events == [], f"before sample {i}"
        run.decode("r0", 0.8)
        run.look()
    [said] = run.events
    assert (said.kind, said.role, said.before, said.samples, said.device_count) == ("k", "rollout", 1.0, 3, 1)
    assert said.factor == pytest.approx(0.8)
    assert run.state.calibration["k", "rollout"] == pytest.approx(0.8)
    assert "0.80 of the modelled speed" in words(said, str).message
    for _ in range(20):
        run.decode("r0", 0.8 * (1 + MATERIAL / 2))
        assert run.look() == ()
    for _ in range(60):
        run.decode("r0", 0.5)
        run.look()
    # Said again and again on the way, a material step at a time, and right in the end.
    assert run.state.calibration["k", "rollout"] == pytest.approx(0.5, rel=MATERIAL)
    assert all(abs(math.log(e.factor / e.before)) >= math.log1p(MATERIAL) for e in run.events)


def test_the_kinds_median_is_the_calibration_and_the_rest_is_drift() -> None:
    run = Run()
    run.state = fold(run.state, stored(DeviceJoined(device="d", kind="k", node="n0", index=3)))
    for _ in range(5):
        run.decode("r0", 0.8)
        run.decode("r1", 0.4)
        run.look()
    kinds = {d.id: d.kind for d in run.state.present}
    peers = kind_estimates(run.memory.estimates, kinds)["k", "rollout"]
    middle = math.sqrt(0.8 * 0.4)
    assert run.state.calibration["k", "rollout"] == pytest.approx(middle)
    for name, speed in (("b", 0.8), ("c", 0.4)):
        drift = drift_of(name, peers)
        assert drift is not None
        assert drift * middle == pytest.approx(speed)  # measured / modelled = calibration x drift
    assert drift_of("d", peers) is None
    assert drift_of("b", {"b": peers["b"]}) is None  # without a peer nobody can tell the two apart


@pytest.mark.parametrize("odd", [{"throttled": True}, {"host_bound": True}])
def test_a_device_that_is_held_back_says_nothing_of_the_model(odd: dict[str, object]) -> None:
    run = Run()
    for _ in range(10):
        run.decode("r0", 0.3)
        run.look(**odd)
    assert run.memory.estimates == {}
    run.decode("r0", 0.3)  # the block that began while it was held back is not counted either
    run.look()
    assert run.memory.estimates == {}
    run.decode("r0", 1.0)
    run.look()
    assert run.memory.estimates["b", "rollout"].log_ratio == pytest.approx(0.0)


def test_a_new_process_is_not_measured_against_the_old_ones_counters() -> None:
    run = Run()
    run.work["r0"] = Work()
    run.look()
    run.add("r0", busy_s=1.0, steps=50, tokens=100)  # warming up
    run.look()
    assert ("r0", 1) not in run.memory.marks
    run.add("r0", busy_s=2.0, steps=50, tokens=100)
    run.look()
    run.decode("r0", 0.7)
    run.look()
    assert math.exp(run.memory.estimates["b", "rollout"].log_ratio) == pytest.approx(0.7)


@given(st.lists(st.floats(0.0, 1000.0), min_size=1, max_size=6), st.floats(0.3, 3.0))
def test_idle_time_changes_nothing(pauses_s: list[float], speed: float) -> None:
    busy, idle = Run(), Run()
    for pause_s in pauses_s:
        for run in (busy, idle):
            run.decode("r0", speed)
        busy.look()
        for _ in range(3):  # looks at a replica that does nothing
            idle.look(seconds=pause_s)
    assert busy.state.calibration == idle.state.calibration
    a, b = busy.memory.estimates["b", "rollout"], idle.memory.estimates["b", "rollout"]
    assert replace(a, at_s=0.0) == replace(b, at_s=0.0)


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 1e4), st.integers(1, 10_000), st.integers(1, 10**6), st.integers(0, 10**6)),
        min_size=1,
        max_size=12,
    )
)
def test_factors_stay_inside_their_bounds_whatever_is_measured(blocks: list[tuple[float, int, int, int]]) -> None:
    run = Run()
    for busy_s, steps, tokens, prefill in blocks:
        run.add("r0", busy_s=busy_s, steps=steps, tokens=tokens, prefill_tokens=prefill)
        run.add("t0", busy_s=busy_s, steps=steps, tokens=tokens)
        run.look()
    assert all(LEAST <= f <= MOST for f in run.state.calibration.values())
    assert all(LEAST <= e.factor <= MOST for e in run.events)


@given(st.floats(0.35, 2.8), st.floats(0.0, 0.4), st.integers(0, 2**32))
def test_the_factor_converges_to_the_true_ratio_under_noise(true: float, noise: float, seed: int) -> None:
    """Noise is log-normal with the given deviation. With a tenth of weight on each new block the smoothed figure has a
    deviation of noise x sqrt(0.1 / 1.9) = 0.23 noise; five of those, and the dead band, must hold it."""
    rng = random.Random(seed)
    run = Run()
    for _ in range(80):
        run.decode("r0", true * math.exp(rng.gauss(0.0, noise)))
        run.look()
    factor = run.state.calibration.get(("k", "rollout"), 1.0)
    assert abs(math.log(factor / true)) <= 5 * 0.23 * noise + math.log1p(MATERIAL) + 1e-9


def test_short_blocks_are_put_together() -> None:
    run = Run()
    for _ in range(10):  # 10 x 0.6 s at half the modelled speed: one block of 5.4 s, and 0.6 s of the next
        run.add("r0", busy_s=0.6, steps=10, tokens=200)
        run.look()
    found = run.memory.estimates["b", "rollout"]
    assert found.samples == 1
    assert found.measured_step_s == pytest.approx(0.06)
    assert run.work["r0"].busy_s - run.memory.marks["r0", 1].work.busy_s < BLOCK_S


def test_a_kind_that_was_not_measured_takes_the_median_of_the_role() -> None:
    factors = {("a", "rollout"): 0.5, ("b", "rollout"): 0.8, ("a", "train"): 2.0}
    assert factor_for(factors, "a", "rollout") == 0.5
    assert factor_for(factors, "c", "rollout") == pytest.approx(math.sqrt(0.4))
    assert factor_for(factors, "c", "train") == pytest.approx(2.0)
    assert factor_for({}, "c", "train") == 1.0


def test_a_fresh_start_forgets_the_factors_and_an_adopted_run_keeps_them() -> None:
    run = Run()
    for _ in range(3):
        run.decode("r0", 0.8)
        run.look()
    adopted = fold(run.state, stored(DaemonStarted(epoch=2, pid=2, adopted=True)))
    assert adopted.calibration == run.state.calibration != {}
    fresh = fold(run.state, stored(DaemonStarted(epoch=2, pid=2, adopted=False)))
    assert fresh.calibration == {}
