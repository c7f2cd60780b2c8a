"""The end of a synchronous rollout: the closed form against single samples on single slots, and its curves."""

import heapq
import math

import numpy as np
import pytest
from fleets import cluster, kind, problem, workload
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.cost import CostModel
from planner.cost.decode import ReplicaShape, sync_grid
from planner.cost.waves import Curve, Wave, done_by, envelope, finished, makespan
from planner.workload import Lengths

MEAN = 500.0
WAVE = Wave(running=10, least=0, tau_s=1.0, fixed_s=0.4, tokens=MEAN)


def steps_of(lengths: np.ndarray, slots: int) -> tuple[float, float]:
    """(steps until the last of these samples ends, token-steps) where each slot takes the next sample when it is free."""
    free = [0.0] * min(slots, len(lengths))
    heapq.heapify(free)
    last = 0.0
    for n in lengths:
        end = heapq.heappop(free) + float(n)
        last = max(last, end)
        heapq.heappush(free, end)
    return last, float(lengths.sum())


def drawn(lengths: Lengths, rng: np.random.Generator, count: int) -> np.ndarray:
    if lengths.cv == 0:
        return np.full(count, lengths.mean_tokens)
    sigma2 = math.log1p(lengths.cv**2)
    raw = rng.lognormal(math.log(lengths.mean_tokens) - sigma2 / 2, math.sqrt(sigma2), count)
    return np.clip(raw, 1.0, lengths.max_tokens)


@settings(max_examples=25)
@example(cv=0.0, slots=32, share=1.0, fixed=0.5)
@example(cv=0.0, slots=100, share=3.0, fixed=0.95)
@given(
    st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    st.sampled_from([32, 100]),
    st.floats(0.2, 9.0),
    st.floats(0.05, 0.95),
)
def test_a_replica_is_done_when_single_samples_are(cv: float, slots: int, share: float, fixed: float) -> None:
    """One replica does the whole step: decode steps of a + c n seconds, samples one by one. (With cv 0.1 on 8 slots it
    is up to 15 % short just beyond a whole wave: there single draws decide.)"""
    samples = max(2, round(slots * share))
    lengths = Lengths(mean_tokens=MEAN, cv=cv, max_tokens=int(20 * MEAN))
    rng = np.random.default_rng(7)
    mean = float(np.mean(drawn(lengths, rng, 20_000)))
    # tau = 1 s of a full wave: a E[L] = fixed, c b E[L] = 1 - fixed.
    seconds = []
    for _ in range(200 if samples < 100 else 60):
        last, tokens = steps_of(drawn(lengths, rng, samples), slots)
        seconds.append(fixed * last / mean + (1 - fixed) * tokens / mean / slots)
    m = np.interp(samples / slots, *np.array(makespan(lengths, samples)).T)
    told = fixed * m + (1 - fixed) * samples / slots
    assert told == pytest.approx(float(np.mean(seconds)), rel=0.06)


def test_constant_lengths_go_in_whole_waves() -> None:
    """10 slots, a second a wave of which 0.4 s are fixed: 10 samples in 1.0 s, an 11th in 1 + 0.4 + 0.06 s."""
    curve = finished(WAVE, makespan(Lengths(mean_tokens=MEAN, max_tokens=600), 64))
    rate = 10 * MEAN
    assert done_by(curve, 0.39, rate) == 0
    assert done_by(curve, 0.7, rate) == pytest.approx(5 * MEAN)
    assert done_by(curve, 1.0, rate) == pytest.approx(10 * MEAN)
    assert done_by(curve, 1.4, rate) == pytest.approx(10 * MEAN)
    assert done_by(curve, 1.46, rate) == pytest.approx(11 * MEAN)
    assert done_by(curve, 2.0, rate) == pytest.approx(20 * MEAN)


@given(st.integers(1, 12), st.integers(1, 400))
def test_a_whole_number_of_waves_is_not_one_more(waves: int, slots: int) -> None:
    """Exactly full, `waves` times as many samples as slots of one length end with the wave that they fill; one more begins another."""
    nu, steps = np.array(makespan(Lengths(mean_tokens=MEAN, max_tokens=600), waves * slots)).T
    assert (np.diff(nu) > 0).all()
    assert np.interp(waves * slots / slots, nu, steps) == waves
    if waves < 12:
        assert np.interp((waves * slots + 1) / slots, nu, steps) == pytest.approx(waves + 1)


def curve_of(b: int, tau_s: float, part: float, cv: float) -> tuple[Curve, float]:
    wave = Wave(running=b, least=b // 2, tau_s=tau_s, fixed_s=part * tau_s, tokens=MEAN)
    return finished(wave, makespan(Lengths(mean_tokens=MEAN, cv=cv, max_tokens=5000), 64)), b * MEAN / tau_s


curves = st.builds(curve_of, st.integers(1, 40), st.floats(0.2, 20), st.floats(0, 1), st.sampled_from([0.0, 0.5]))


@settings(max_examples=50)
@given(st.lists(curves, min_size=1, max_size=5), st.lists(st.floats(0, 100), min_size=1, max_size=20))
def test_the_envelope_is_the_most_of_all_curves(some: list[tuple[Curve, float]], at: list[float]) -> None:
    seconds, tokens, rate = envelope([c for c, _ in some], [r for _, r in some])
    for x in at:
        told = float(np.interp(x, seconds, tokens, left=0.0)) + rate * max(0.0, x - seconds[-1])
        most, later = (max(done_by(c, y, r) for c, r in some) for y in (x, x * (1 + 1e-6)))
        assert told >= most * (1 - 1e-9)
        if x < seconds[-1]:
            assert told <= later * (1 + 1e-9) + 1e-5


@settings(max_examples=30)
@given(st.integers(1, 300), st.integers(1, 300), st.sampled_from([0.0, 0.7]), st.floats(0.1, 500))
def test_less_memory_never_does_more(a: int, b: int, cv: float, seconds: float) -> None:
    """A replica that may run fewer samples at once, as beside models of other tasks, is never ahead."""
    fleet = cluster(("k", "a"), kinds=(kind("k"),))
    response = Lengths(mean_tokens=MEAN, cv=cv, max_tokens=4000)
    cost = CostModel(problem(fleet, workload=workload(mode="sync", eta=0, response=response)))
    shape = ReplicaShape(kind="k", tp=1)

    def most(limit: int) -> float:
        return max(cost.rules.tokens_in(o, seconds) for o in cost.capped(shape, 0.0, limit))

    low, high = sorted((a, b))
    assert most(low) <= most(high) * (1 + 1e-12)
    assert sync_grid(high)[0] == high
