"""Micro-batches of one task on many shapes (`planner.cost.batch`): which sizes fit beside models, and the fastest of them.

Arrays have one row a part and one column a shape, as in `planner.cost.parts`.
"""

from collections.abc import Sequence

import numpy as np

from planner.cost.parts import BLOCKS, Array, Bools, Ints
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

    def fastest(self, held: Array, *, room: bool) -> tuple[Array, Array | None]:
        """Seconds of the fastest way beside models that hold so many bytes by part, infinite where none fits; and with `room`
        by block what it leaves."""
        whole = (held <= self.limit).all(axis=0)
        time_s = np.where(whole, self.time_s, np.inf)
        some, which = self._tried(held, self.alone & ~whole, time_s)
        if not room:
            return time_s, None
        left = _by_block(self.chosen - held)
        for i, way in enumerate(self.ways):
            mine = some[which == i]
            if len(mine):
                left[:, mine] = _by_block(way.limit[:, mine] - held[:, mine])
        return time_s, left

    def _tried(self, held: Array, tried: Bools, time_s: Array) -> tuple[Ints, Ints]:
        """Puts the seconds of the fastest way into `time_s` of the shapes where it is tried; returns these and the numbers of
        the ways. As in the plain formulas, larger micro-batches are not tried beyond the first that does not fit."""
        if not tried.any():
            return np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        some = np.flatnonzero(tried & (held <= self.ways[0].limit).all(axis=0))
        at, least, which = np.arange(len(some)), np.full(len(some), np.inf), np.full(len(some), -1)
        for i, way in enumerate(self.ways):
            if i:
                at = at[: np.searchsorted(some[at], len(way.time_s))]
                at = at[(held[:, some[at]] <= way.limit[:, some[at]]).all(axis=0)]
            if not len(at):
                break
            better = at[way.time_s[some[at]] < least[at]]
            least[better], which[better] = way.time_s[some[better]], i
            at = at[way.more[some[at]]]
        time_s[some] = least
        return some, which


def chain_of(ways: Sequence[tuple[Way, Bools]]) -> Chain:
    """The chain of some ways, each with the shapes where it fits if nothing else is there."""
    first, alone = ways[0]
    limit, chosen = np.where(alone, first.limit, -np.inf), first.limit.copy()
    time_s = np.where(alone, first.time_s, np.inf)
    for way, fits in ways[1:]:
        size = len(fits)
        np.copyto(limit[:, :size], way.limit, where=fits)
        better = fits & (way.time_s < time_s[:size])
        np.copyto(time_s[:size], way.time_s, where=better)
        np.copyto(chosen[:, :size], way.limit, where=better)
    return Chain(ways=tuple(w for w, _ in ways), alone=alone, limit=limit, time_s=time_s, chosen=chosen)


def _by_block(figures: Array) -> Array:
    """The least over the parts of either block."""
    return np.stack([figures[at].min(axis=0) for at in BLOCKS])
