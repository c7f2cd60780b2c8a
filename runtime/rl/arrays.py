"""Tokens and logprobs as bytes, in the ledger and between processes: four and eight bytes each, packed and unpacked in C.

Pickled one by one they take twice the time and the garbage collector walks through them on both sides.
"""

import sys
from array import array
from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

TOKEN_BYTES = 4
N = TypeVar("N", int, float)
Runs = tuple[tuple[N, int], ...]  # (value, how often in a row)


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return _swapped(array("i", tokens)).tobytes()


def unpack_tokens(blob: bytes) -> tuple[int, ...]:
    """The inverse of `pack_tokens`."""
    values = array("i")
    values.frombytes(blob)
    return tuple(_swapped(values))


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    """Logprobs as little-endian float64: exact, so a float64 run can be compared bit by bit."""
    return _swapped(array("d", logprobs)).tobytes()


def unpack_logprobs(blob: bytes) -> tuple[float, ...]:
    """The inverse of `pack_logprobs`."""
    values = array("d")
    values.frombytes(blob)
    return tuple(_swapped(values))


def _swapped(values: "array[N]") -> "array[N]":
    """From this machine's byte order to little-endian, or back."""
    if sys.byteorder == "big":
        values.byteswap()
    return values


def pack_runs(values: Sequence[N]) -> Runs[N]:
    """Values that hardly change along a sample (versions, weights), as runs."""
    if not values:
        return ()
    first = values[0]
    if values.count(first) == len(values):
        return ((first, len(values)),)
    return tuple((value, sum(1 for _ in run)) for value, run in groupby(values))


def unpack_runs(runs: Runs[N]) -> tuple[N, ...]:
    """The inverse of `pack_runs`."""
    found: list[N] = []
    for value, count in runs:
        found += [value] * count
    return tuple(found)
