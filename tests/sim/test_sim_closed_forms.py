"""The simulator against closed forms and against another simulation of the same queues, made earlier and independently.

The rows below are seeded simulations in plain Python, one event a sample: columns as in the test names. Tolerances are about
three standard errors of runs of this length.
"""

import itertools
import math

import numpy as np
import pytest
from queues import MEAN_TOKENS, Queue, flow_of, group_age, lognormal, masked_share, period_s, run, settled, unaccounted

from runtime.sim.lengths import LengthModel

# C, G, S, rho, sigma, mean age of groups; rollout is the slower side
FREE = [
    (128, 16, 8, 0.5, 0.4, 2.176),
    (128, 16, 8, 0.5, 0.8, 3.064),
    (256, 16, 8, 0.7, 0.8, 5.807),
    (256, 16, 8, 0.5, 0.4, 3.856),
    (512, 64, 8, 0.7, 0.8, 3.272),
    (120, 30, 8, 0.5, 0.8, 1.785),
]


@pytest.mark.parametrize(("slots", "groups", "members", "rho", "sigma", "mean"), FREE)
def test_mean_age_while_rollout_is_slower(
    *, slots: int, groups: int, members: int, rho: float, sigma: float, mean: float
) -> None:
    flow = run(Queue(slots=slots, groups=groups, members=members, rho=rho, lengths=lognormal(sigma)))
    assert group_age(flow) == pytest.approx(mean, rel=0.04)
    # C M_tail / B + rho, with M_tail = E[max of S lengths] / E[L] drawn anew
    draws = lognormal(sigma).draw(np.random.default_rng(1), 8 * 40_000).reshape(-1, 8)
    tail = draws.max(axis=1).mean() / MEAN_TOKENS
    assert group_age(flow) == pytest.approx(slots * tail / (groups * members) + rho, rel=0.04)
    assert period_s(flow) == pytest.approx(groups * members / slots, rel=0.02)
    assert unaccounted(flow) == 0


# C/B, eta, rho, sigma: period in B/C, share of masked tokens, share of samples with a masked token; G = 16, S = 8
MASKED = [
    (0.5, 1, 0.8, 0.4, 1.2515, 0.0212, 0.0245),
    (0.5, 1, 0.8, 0.8, 1.5495, 0.1248, 0.1067),
    (0.5, 2, 0.8, 0.8, 1.0155, 0.1368, 0.1798),
    (0.5, 2, 1.2, 0.4, 1.2, 0.001, 0.0011),
    (0.5, 4, 1.2, 1.2, 1.2, 0.0836, 0.056),
    (1.0, 1, 1.2, 1.2, 3.107, 0.269, 0.1883),
    (1.0, 8, 0.8, 0.8, 1.002, 0.01, 0.0119),
]


@pytest.mark.parametrize(("share", "eta", "rho", "sigma", "period", "masked", "samples"), MASKED)
def test_masking(
    *, share: float, eta: int, rho: float, sigma: float, period: float, masked: float, samples: float
) -> None:
    q = Queue(
        slots=int(share * 128), groups=16, members=8, rho=rho, eta=eta, lengths=lognormal(sigma), steps=250
    )  # fmt: skip
    flow = run(q)
    assert period_s(flow) * q.slots / q.batch == pytest.approx(period, rel=0.03)
    assert masked_share(flow) == pytest.approx(masked, rel=0.12, abs=0.004)
    touched = sum(s.samples_masked for s in settled(flow)) / (len(settled(flow)) * q.batch)
    assert touched == pytest.approx(samples, rel=0.12, abs=0.004)
    assert max(age for s in flow.books.steps for age in s.ages) <= eta
    assert unaccounted(flow) == 0


# C/B, eta, rho, sigma: period in B/C under the demand-bound gate
GATED = [(0.5, 1, 0.8, 0.4, 1.30075), (0.5, 1, 0.8, 0.8, 2.18745), (1.0, 2, 0.8, 0.8, 2.6369)]


@pytest.mark.parametrize(("share", "eta", "rho", "sigma", "period"), GATED)
def test_the_demand_bound_gate_never_exceeds_eta(
    share: float, eta: int, rho: float, sigma: float, period: float
) -> None:
    q = Queue(
        slots=int(share * 128), groups=16, members=8, rho=rho, eta=eta, lengths=lognormal(sigma), steps=250, stale="wait"
    )  # fmt: skip
    flow = run(q)
    assert max(s.group_age_max for s in flow.books.steps) <= eta
    assert flow.books.masked_tokens == 0
    assert period_s(flow) * q.slots / q.batch == pytest.approx(period, rel=0.06)
    assert unaccounted(flow) == 0


@pytest.mark.parametrize("eta", [1, 2, 4, 8])
@pytest.mark.parametrize("rho", [0.6, 1.5])
def test_the_period_is_never_below_its_bound(eta: int, rho: float) -> None:
    """max(B / v_R, T, (M_tail tau + T) / (eta + 1)) on means; with much staleness it is reached."""
    q = Queue(slots=128, groups=16, members=8, rho=rho, eta=eta, steps=200)
    flow = run(q)
    draws = q.lengths.draw(np.random.default_rng(1), 8 * 40_000).reshape(-1, 8)
    tail, train_s = draws.max(axis=1).mean() / MEAN_TOKENS, rho * q.batch / q.slots
    bound = max(q.batch / q.slots, train_s, (tail + train_s) / (eta + 1))
    assert period_s(flow) >= 0.98 * bound
    if eta == 8:
        assert period_s(flow) == pytest.approx(bound, rel=0.02)


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_littles_law(eta: int) -> None:
    """Samples decoded at once = samples ended a second times seconds each took."""
    flow = run(Queue(slots=96, groups=12, members=8, rho=0.9, eta=eta, steps=200))
    b = flow.books
    assert b.running_area / b.time_s == pytest.approx(b.finished / b.time_s * b.sample_seconds / b.finished, rel=0.02)


def test_constant_lengths_step_like_a_clock() -> None:
    """64 slots, 128 samples of 1 s: two waves of 1 s, T = 0.5 s; from the second step on one step every 2 s."""
    length = LengthModel(family="constant", mean_tokens=MEAN_TOKENS, max_tokens=MEAN_TOKENS)
    flow = run(Queue(slots=64, groups=16, members=8, rho=0.25, eta=8, lengths=length, steps=20))
    ends = [s.ended_s for s in flow.books.steps]
    # The warm-up of a new replica (a quarter of its slots, then twice as many) is over by then.
    assert [b - a for a, b in itertools.pairwise(ends[4:])] == pytest.approx([2.0] * 15, rel=1e-3)


def test_synchronous_steps_take_the_longest_response_and_the_trainer() -> None:
    """eta = 0 with a slot a sample: each step lasts the longest response of its batch, then T."""
    lengths = LengthModel(family="exponential", mean_tokens=MEAN_TOKENS, max_tokens=10**6)
    q = Queue(slots=64, groups=8, members=8, rho=1.0, eta=0, lengths=lengths, steps=300)
    flow = run(q)
    harmonic = sum(1 / k for k in range(1, 65))  # E[max of 64 exponentials] / mean
    assert period_s(flow) == pytest.approx(harmonic + 1.0, rel=0.05)
    assert {age for s in flow.books.steps for age in s.ages} == {0}


def test_exponential_lengths_keep_their_mean() -> None:
    lengths = LengthModel(family="exponential", mean_tokens=MEAN_TOKENS, max_tokens=10**6)
    flow = run(Queue(slots=128, groups=16, members=8, rho=0.5, lengths=lengths, steps=150))
    b = flow.books
    assert b.sample_seconds / b.finished == pytest.approx(1.0, rel=0.03)
    assert period_s(flow) == pytest.approx(1.0, rel=0.03)


def test_the_same_seed_is_the_same_run_and_another_is_not() -> None:
    q = Queue(slots=64, groups=8, members=8, rho=0.9, eta=3, steps=40)
    ends = [[s.ended_s for s in run(q).books.steps] for _ in range(2)]
    assert ends[0] == ends[1]
    other = flow_of(Queue(slots=64, groups=8, members=8, rho=0.9, eta=3, steps=40, seed=8))
    other.advance(math.inf)
    assert [s.ended_s for s in other.books.steps] != ends[0]
