"""Replicas that get nothing new: every end at once is every end one after the other."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.sim.decoding import Decoding, Lane
from runtime.sim.runout import RunOut
from runtime.sim.speed import ReplicaSpeed

Sample = tuple[int, int]  # tokens of its prompt, tokens to sample
SAMPLES = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 400)), max_size=9)


def speed_of(slots: int, kv_s: float, kv_tokens: float = math.inf) -> ReplicaSpeed:
    base = np.concatenate([[0.0], 0.002 + 0.0005 * np.arange(1, slots + 1) ** 0.7])
    return ReplicaSpeed(slots=slots, base_s=base, kv_s=np.full(slots + 1, kv_s), kv_tokens=kv_tokens)


def decoding_of(replicas: list[list[Sample]], speeds: list[ReplicaSpeed]) -> Decoding:
    """Replicas whose samples are in the order given in their first slots."""
    d = Decoding()
    for i, speed in enumerate(speeds):
        d.add(Lane(name=f"r{i}", speed=speed), 0, speed.slots)
    for i, samples in enumerate(replicas):
        at = d.begin[i] + np.arange(len(samples))
        prompts = np.array([float(p) for p, _ in samples])
        lengths = np.array([n for _, n in samples], dtype=np.int64)
        d.lease(at, starts=d.v[d.rep[at]], rows=at, lengths=lengths, before=prompts, first=0 * at, now_s=0.0 * prompts)
    d.recount()
    return d


def one_after_the_other(samples: list[Sample], speed: ReplicaSpeed, slow: float, stall: float) -> list[float]:
    """When each sample ends: between two ends the context grows by one a sample and token."""
    ends, left = [math.inf] * len(samples), {i: float(n) for i, (_, n) in enumerate(samples)}
    context, now = float(sum(p for p, _ in samples)), stall
    while left:
        n, x = len(left), min(left.values())
        now += slow * ((speed.base_s[n] + speed.kv_s[n] * context) * x + speed.kv_s[n] * n * x * x / 2)
        context += n * x
        for i in [i for i, rest in left.items() if rest <= x]:
            ends[i] = now
            context -= sum(samples[i])
            del left[i]
        left = {i: rest - x for i, rest in left.items()}
    return ends


@settings(max_examples=150)
@given(
    st.lists(
        st.tuples(SAMPLES, st.sampled_from((1.0, 2.5)), st.sampled_from((0.0, 0.75)), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from((0.0, 3e-7, 1e-5)),
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4),
)
def test_all_ends_at_once_are_the_ends_one_after_the_other(
    replicas: list[tuple[list[Sample], float, float, bool]], kv_s: float, cuts: list[float]
) -> None:
    """And those that are left are where they were, however the time is cut into windows. A replica: its samples, how many times
    as slow it is, for how long it prefills first, and whether it is paused."""
    d = decoding_of([samples for samples, *_ in replicas], [speed_of(9, kv_s) for _ in replicas])
    expected = np.full(len(d.ends), math.inf)
    for i, (samples, slow, stall, paused) in enumerate(replicas):
        d.slow[i], d.stall[i] = slow, stall
        if paused:
            d.pause(i)
        else:
            ends = one_after_the_other(samples, speed_of(9, kv_s), slow, stall)
            expected[d.begin[i] : d.begin[i] + len(samples)] = ends
    runout = RunOut(d)
    assert runout.into == pytest.approx(expected)
    last_s = max(expected[expected < math.inf], default=-math.inf)
    assert runout.last_s == pytest.approx(last_s)
    if last_s < 0:
        return

    now, ended = 0.0, np.full(len(d.ends), math.inf)
    for until in [*sorted(c * last_s for c in cuts), last_s * (1 + 1e-9)]:
        if until <= now:
            continue
        running = d.running
        d.open_runout(RunOut(d), until - now)
        at, into = d.ended(), d.seconds_into(d.ended())
        ended[at] = now + into
        d.note_ends(at, into)
        d.clear(at)
        d.close_window()
        now = until
        assert d.running == running - len(at)
    assert ended == pytest.approx(expected)
    for i, (samples, _, _, paused) in enumerate(replicas):
        assert d.decoded[i] == pytest.approx(0 if paused else sum(n for _, n in samples))
        if samples and not paused:
            assert d.spent[i, 0] + d.spent[i, 1] == pytest.approx(max(ended[d.rep == i][: len(samples)]))
            assert d.spent[i].sum() == pytest.approx(now)


def test_where_kv_would_run_full_it_does_not_fit() -> None:
    """Two samples of 10 tokens' prompt, one to end after 5 tokens, the other after 20: most is held as the first ends, 30, or
    as the second does, 30; together with a third, of 20 tokens, which ends after one, it is 43."""
    for samples, most in (([(10, 5), (10, 20)], 30), ([(10, 5), (10, 20), (20, 1)], 43)):
        assert RunOut(decoding_of([samples], [speed_of(3, 1e-6, most)])).fits
        assert not RunOut(decoding_of([samples], [speed_of(3, 1e-6, most - 1)])).fits
