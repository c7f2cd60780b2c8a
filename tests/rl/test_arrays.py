"""Tokens as bytes, and the values that carry them between processes."""

import math
import pickle
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.arrays import pack_logprobs, pack_runs, pack_tokens, unpack_logprobs, unpack_runs, unpack_tokens
from runtime.rl.types import Append, Lease, SampleId, TrainSample

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40).map(tuple)
LOGPROBS = st.lists(st.floats(allow_nan=False, max_value=0.0), max_size=40).map(tuple)
IDS = st.builds(SampleId, st.integers(-(2**40), 2**40), st.integers(0, 99))


@given(tokens=TOKENS, logprobs=LOGPROBS, versions=st.lists(st.integers(0, 3), max_size=40).map(tuple))
def test_what_is_packed_comes_back(tokens, logprobs, versions):
    assert unpack_tokens(pack_tokens(tokens)) == tokens
    assert unpack_logprobs(pack_logprobs(logprobs)) == logprobs
    runs = pack_runs(versions)
    assert unpack_runs(runs) == versions
    assert all(a[0] != b[0] for a, b in pairwise(runs)), "as few runs as there are changes"


def test_bytes_are_little_endian_whatever_the_machine():
    assert pack_tokens((1, 258)) == bytes((1, 0, 0, 0, 2, 1, 0, 0))
    assert pack_logprobs((-2.0,)) == bytes((0, 0, 0, 0, 0, 0, 0, 0xC0))
    assert unpack_logprobs(pack_logprobs((-math.inf,))) == (-math.inf,)


@given(sample=IDS, prompt=TOKENS, tokens=TOKENS, end=st.sampled_from([None, "eos", "length"]), data=st.data())
def test_values_with_tokens_cross_processes_as_they_were(sample, prompt, tokens, end, data):
    n = len(tokens)
    logprobs = tuple(data.draw(st.lists(st.floats(-9, 0), min_size=n, max_size=n)))
    versions = tuple(data.draw(st.lists(st.integers(0, 3), min_size=n, max_size=n)))
    weights = tuple(float(v > 1) for v in versions)
    for value in (
        Lease(sample=sample, epoch=3, prompt_tokens=prompt, tokens=tokens, max_new_tokens=7),
        Append(sample=sample, epoch=3, start=5, tokens=tokens, logprobs=logprobs, version=2, finished=end),
        TrainSample(
            sample=sample,
            prompt_tokens=prompt,
            tokens=tokens,
            logprobs=logprobs,
            versions=versions,
            weights=weights,
            reward=0.5,
            advantage=-0.1,
            finish="eos",
        ),
    ):
        back = pickle.loads(pickle.dumps(value, protocol=5))
        assert back == value
        assert type(back) is type(value)
        assert isinstance(back.sample, SampleId)


def test_a_long_sample_takes_twelve_bytes_a_token():
    n = 4096
    sample = TrainSample(
        sample=SampleId(1, 2),
        prompt_tokens=(),
        tokens=tuple(range(n)),
        logprobs=tuple(-i / 7 for i in range(n)),
        versions=(3,) * n,
        weights=(1.0,) * n,
        reward=1.0,
        advantage=1.0,
        finish="length",
    )
    assert len(pickle.dumps(sample, protocol=5)) < 12 * n + 500
