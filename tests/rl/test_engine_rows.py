"""Rows of the engine's process on their way to the replica."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.rl.engine.held import Held
from runtime.rl.engine.vllm_host.rows import Request, Row, pack_requests, pack_rows, unpack_requests, unpack_rows
from runtime.rl.types import Append, Lease, SampleId

PAIRS = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False, max_value=0.0)), max_size=3)
ROWS = st.lists(st.tuples(st.integers(1, 2**53), PAIRS, st.booleans()), max_size=20)


@given(given_rows=ROWS, single=st.booleans())
def test_rows_arrive_as_they_were(given_rows: list[tuple[int, list[tuple[int, float]], bool]], single: bool) -> None:
    rows: list[Row] = [
        (key, [t for t, _ in pairs], [x for _, x in pairs], ended)
        for key, pairs, ended in given_rows
        if len(pairs) == 1 or not single
    ]
    packed = pack_rows(rows)
    back = list(unpack_rows(json.loads(json.dumps(packed))))
    assert back == [(key, tuple(tokens), tuple(logprobs), ended) for key, tokens, logprobs, ended in rows]


@given(
    st.lists(
        st.tuples(st.integers(1, 2**53), st.lists(st.integers(0, 2**31 - 1), max_size=5), st.integers(1, 9999)),
        max_size=9,
    )
)
def test_requests_arrive_as_they_were(requests: list[Request]) -> None:
    assert list(unpack_requests(json.loads(json.dumps(pack_requests(requests))))) == requests


def test_a_step_of_one_token_a_sample_by_hand() -> None:
    """Tokens are int32 and logprobs float64, little-endian; nothing is said of how many there are when it is one each."""
    packed = pack_rows([(7, [1], [-2.0], False), (9, [258], [-0.5], True)])
    assert packed["keys"] == [7, 9]
    assert packed["counts"] is None
    assert packed["tokens"] == "AQAAAAIBAAA="  # 01 00 00 00 02 01 00 00
    assert packed["logprobs"] == "AAAAAAAAAMAAAAAAAADgvw=="  # C0 and BF E0 stand last
    assert packed["ended"] == [1]
    assert pack_rows([(7, [], [], True), (7, [1, 2], [-1.0, -1.0], False)])["counts"] == [0, 2]


def test_columns_that_do_not_belong_together_are_not_taken() -> None:
    packed = pack_rows([(7, [1], [-2.0], False), (9, [2], [-0.5], False)])
    with pytest.raises(ValueError, match="zip"):
        list(unpack_rows({**packed, "keys": [7]}))


@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=12),
    limit=st.integers(1, 12),
    start=st.integers(0, 3),
    cuts=st.sets(st.integers(1, 11)),
)
def test_taking_tokens_says_what_finish_says(tokens: list[int], limit: int, start: int, cuts: set[int]) -> None:
    """Token by token or some at once, `take_all` ends a sample where `finish` finds it ended."""
    eos = frozenset({0})
    lease = Lease(
        sample=SampleId(1, 2), epoch=3, prompt_tokens=(9, 9), tokens=(4,) * start, max_new_tokens=start + limit
    )
    held = Held.of(lease, max_length=64)
    at = 0
    for cut in (*sorted(c for c in cuts if c < len(tokens)), len(tokens)):
        piece = tuple(tokens[at:cut])
        append = held.take_all(piece, (-0.5,) * len(piece), version=4, eos_ids=eos)
        assert append == Append(
            sample=SampleId(1, 2), epoch=3, start=start + at, tokens=piece, logprobs=(-0.5,) * len(piece), version=4,
            finished=held.finish(eos),
        )  # fmt: skip
        at = cut
    none = held.take_all((), (), version=5, eos_ids=eos)
    assert (none.start, none.tokens, none.finished) == (start + len(tokens), (), held.finish(eos))
