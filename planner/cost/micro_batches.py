"""Micro-batches of one task on many shapes (`planner.cost.batch`): which sizes fit beside models, and the fastest of them.

Axes of arrays are block, part and shape, as in `planner.cost.parts`.
"""

from collections.abc import Sequence

import numpy as np

from planner.cost.parts import Array, Bools, Ints
from planner.record import record


@record
class Way:
    """One micro-batch size on the first shapes: on those beyond it does not fit."""

    limit: Array  # bytes that models may hold, by part; no more than with a smaller micro-batch
    time_s: Array
    more: Bools  # whether a larger micro-batch makes a difference


@record
class Chain:
    """Sizes of micro-batches that are tried one after the other until one does not fit; on the first shapes, as `Way`.

    Limits never rise along it, so where its last size fits all do, and the fastest is known beforehand.
    """

    ways: tuple[Way, ...]
    alone: Bools  # whether the smallest fits where nothing else is
    limit: Array  # bytes by part beside which all fit that do where nothing else is
    time_s: Array  # the fastest of these
    chosen: Array  # the limit of that one

    def fastest(self, resident: Array, *, room: bool) -> tuple[Array, Array | None]:
        """Seconds of the fastest way beside models that hold `resident` bytes by part, infinite where none fits; and with `room`
        by block what it leaves."""
        held = resident[..., : len(self.time_s)]
        whole = _fits(held, self.limit)
        time_s = np.where(whole, self.time_s, np.inf)
        some, which = self._tried(held, self.alone & ~whole, time_s)
        if not room:
            return time_s, None
        left: Array = (self.chosen - held).min(axis=1)
        for i, way in enumerate(self.ways):
            mine = some[which == i]
            if len(mine):
                left[:, mine] = (way.limit.take(mine, axis=-1) - resident.take(mine, axis=-1)).min(axis=1)
        return time_s, left

    def _tried(self, held: Array, tried: Bools, time_s: Array) -> tuple[Ints, Ints]:
        """Puts the seconds of the fastest way into `time_s` of the shapes where it is tried; returns these and the numbers of
        the ways. As in the plain formulas, larger micro-batches are not tried beyond the first that does not fit."""
        if not tried.any():
            return np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        some = np.flatnonzero(tried & _fits(held, self.ways[0].limit))
        at, least, which = np.arange(len(some)), np.full(len(some), np.inf), np.full(len(some), -1)
        for i, way in enumerate(self.ways):
            if i:
                at = at[: np.searchsorted(some[at], len(way.time_s))]
                at = at[_fits(held[..., : len(way.time_s)], way.limit)[some[at]]] if len(at) else at
            if not len(at):
                break
            here = some[at]
            better = way.time_s[here] < least[at]
            least[at[better]], which[at[better]] = way.time_s[here[better]], i
            at = at if way.more.all() else at[way.more[here]]
        time_s[some] = least
        return some, which


def chain_of(ways: Sequence[tuple[Way, Bools]]) -> Chain:
    """The chain of some ways, each with the shapes where it fits if nothing else is there."""
    first, alone = ways[0]
    time_s, which = np.where(alone, first.time_s, np.inf), np.zeros(len(alone), dtype=int)
    limit = np.minimum(first.limit, np.array([-np.inf, np.inf]).take(alone))
    for i, (way, fits) in enumerate(ways[1:], start=1):
        size = len(fits)
        np.minimum(limit[..., :size], way.limit + np.array([np.inf, 0.0]).take(fits), out=limit[..., :size])
        better = np.flatnonzero(fits & (way.time_s < time_s[:size]))
        time_s[better], which[better] = way.time_s[better], i
    chosen = first.limit.copy()
    for i, (way, _) in enumerate(ways[1:], start=1):
        mine = np.flatnonzero(which == i)
        chosen[..., mine] = way.limit.take(mine, axis=-1)
    return Chain(ways=tuple(w for w, _ in ways), alone=alone, limit=limit, time_s=time_s, chosen=chosen)


def _fits(held: Array, limit: Array) -> Bools:
    """By shape, whether no part holds more than its limit."""
    found: Bools = np.logical_and.reduce(held <= limit, axis=(0, 1))
    return found
