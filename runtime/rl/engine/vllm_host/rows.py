"""Requests on their way to the engine's process and what it sampled on its way back: numbers packed as bytes. Pure.

A step of hundreds of samples comes a hundred times a second. As a JSON list a row it costs both sides more than everything
else they do with a token; most of that is writing and reading floats, which here stay bits (so they arrive exact).
"""

from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from runtime.rl.arrays import pack_logprobs, pack_tokens, unpack_logprobs, unpack_tokens
from runtime.rl.engine.vllm_host.wire import Message

N = TypeVar("N", int, float)
Row = tuple[int, list[int], list[float], bool]
"""(key, tokens, their logprobs, finished)"""

Taken = tuple[int, tuple[int, ...], tuple[float, ...], bool]
"""A row as it arrives."""

Request = tuple[int, list[int], int]
"""(key, tokens to continue, most new tokens)"""


def pack_requests(requests: Sequence[Request]) -> Message:
    """JSON values: by columns, the tokens of all requests in one (base64)."""
    tokens = list(chain.from_iterable(request[1] for request in requests))
    return {
        "keys": [request[0] for request in requests],
        "counts": [len(request[1]) for request in requests],
        "tokens": b64encode(pack_tokens(tokens)).decode(),
        "most": [request[2] for request in requests],
    }


def unpack_requests(packed: Message) -> Iterator[Request]:
    """The inverse of `pack_requests`."""
    tokens = unpack_tokens(b64decode(packed["tokens"]))
    return zip(packed["keys"], map(list, _pieces(tokens, packed["counts"])), packed["most"], strict=True)


def pack_rows(rows: Sequence[Row]) -> Message:
    """JSON values: keys, tokens and logprobs of all rows in one (base64), tokens of each row where not one, and which ended."""
    tokens = list(chain.from_iterable(row[1] for row in rows))
    logprobs = list(chain.from_iterable(row[2] for row in rows))
    counts = [len(row[1]) for row in rows]
    return {
        "keys": [row[0] for row in rows],
        "counts": None if counts.count(1) == len(counts) else counts,
        "tokens": b64encode(pack_tokens(tokens)).decode(),
        "logprobs": b64encode(pack_logprobs(logprobs)).decode(),
        "ended": [i for i, row in enumerate(rows) if row[3]],
    }


def unpack_rows(packed: Message) -> Iterable[Taken]:
    """The inverse of `pack_rows`."""
    keys, counts = packed["keys"], packed["counts"]
    tokens, logprobs = unpack_tokens(b64decode(packed["tokens"])), unpack_logprobs(b64decode(packed["logprobs"]))
    finished = [False] * len(keys)
    for i in packed["ended"]:
        finished[i] = True
    if counts is None:
        return zip(keys, zip(tokens, strict=True), zip(logprobs, strict=True), finished, strict=True)
    return zip(keys, _pieces(tokens, counts), _pieces(logprobs, counts), finished, strict=True)


def _pieces(values: tuple[N, ...], counts: Iterable[int]) -> Iterator[tuple[N, ...]]:
    start = 0
    for count in counts:
        yield values[start : start + count]
        start += count
