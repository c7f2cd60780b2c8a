"""Tables over shapes, interpolated in log space, and corrections of them by single measured points."""

import bisect
import itertools
import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.errors import InvalidInput
from planner.record import record

Array = NDArray[np.float64]
_LEAST = 1e-300


@record
class Grid:
    """log2 of a positive quantity over a full grid of shapes.

    `axes` are log2 of the coordinates, ascending; `values` has one dimension an axis. Between points it is interpolated
    linearly in the logarithms, beyond the ends it keeps the value at the end.
    """

    axes: tuple[Array, ...]
    values: Array

    def __post_init__(self) -> None:
        if self.values.shape != tuple(len(a) for a in self.axes):
            raise InvalidInput(
                "a grid of another shape than its axes",
                got=self.values.shape,
                expected=str([len(a) for a in self.axes]),
            )
        if any((np.diff(a) <= 0).any() for a in self.axes):
            raise InvalidInput("an axis that does not ascend", got=[list(a) for a in self.axes])

    def at(self, *coordinates: ArrayLike) -> Array:
        """The quantity at shapes given by their coordinates (not logarithms), broadcast against each other."""
        given = [np.asarray(c, dtype=float) for c in coordinates]
        shape = np.broadcast_shapes(*(x.shape for x in given))
        if not shape:
            return np.asarray(self.at_one(*(x.item() for x in given)))
        values, dim = self.values, 0
        many: list[tuple[NDArray[np.int_], Array]] = []  # of each axis with more than one coordinate
        for axis, x in zip(self.axes, given, strict=True):
            if x.ndim:
                many.append(_between(axis, x))
                dim += 1
                continue
            # One coordinate for all shapes: the table without that axis is small.
            i, part = _between_one(axis, x.item())
            ends = values.take([i, i + 1] if part else [i], axis=dim)
            values = np.tensordot(ends, [1 - part, part] if part else [1.0], axes=([dim], [0]))
        total = np.zeros(shape)
        for corner in itertools.product((0, 1), repeat=len(many)):
            if any(c and n == 1 for c, n in zip(corner, values.shape, strict=True)):
                continue
            weight: Array = np.ones(())
            for c, (_, p) in zip(corner, many, strict=True):
                weight = weight * (p if c else 1 - p)
            total = total + weight * values[tuple(i + c for c, (i, _) in zip(corner, many, strict=True))]
        out: Array = np.exp2(total)
        return out

    def at_one(self, *coordinates: float) -> float:
        """`at` of a single shape, in plain numbers: arrays of one element cost fifty times as much."""
        corners = [(0, 1.0)]  # position in the flat table and weight
        strides = itertools.accumulate(reversed(self.values.shape), operator.mul, initial=1)
        for axis, x, stride in zip(reversed(self.axes), reversed(coordinates), strides, strict=False):
            i, part = _between_one(axis, x)
            if part:
                below, above = i * stride, (i + 1) * stride
                corners = [c for at, w in corners for c in ((at + below, w * (1 - part)), (at + above, w * part))]
            else:
                corners = [(at + i * stride, w) for at, w in corners]
        return float(2.0 ** sum(w * self.values.item(at) for at, w in corners))


def _between(axis: Array, given: Array) -> tuple[NDArray[np.int_], Array]:
    """The point of the axis at or below each coordinate, and the part of the way to the next (0 on an axis of one)."""
    x = np.clip(np.log2(np.maximum(given, _LEAST)), axis[0], axis[-1])  # nothing at all is the least shape
    i = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, max(0, len(axis) - 2))
    return i, (x - axis[i]) / (axis[i + 1] - axis[i]) if len(axis) > 1 else np.zeros_like(x)


def _between_one(axis: Array, given: float) -> tuple[int, float]:
    """`_between` of one coordinate."""
    last = len(axis) - 1
    if not last:
        return 0, 0.0
    x = min(max(math.log2(max(given, _LEAST)), axis.item(0)), axis.item(last))
    i = min(bisect.bisect_right(axis, x) - 1, last - 1)
    low = axis.item(i)
    return i, (x - low) / (axis.item(i + 1) - low)


def filled(values: Array) -> Array:
    """A table with holes (NaN) filled from the neighbour before along the last axis that has one, else after.

    Shapes that do not fit into memory are holes at the upper end: there the quantity no longer changes much.
    """
    out = values.copy()
    for axis in range(out.ndim - 1, -1, -1):
        view = np.moveaxis(out, axis, 0)
        for order in (range(1, len(view)), range(len(view) - 2, -1, -1)):
            for i in order:
                before = view[i - 1] if order.step > 0 else view[i + 1]
                view[i] = np.where(np.isnan(view[i]), before, view[i])
    return out


@record
class Correction:
    """Measured over predicted at single shapes, carried to others by inverse distance in log space.

    With no point it is 1 everywhere; at a measured shape it is that ratio exactly. Far from every point (`reach` doublings)
    it fades to the geometric mean of all ratios, which is the card's own overall speed.
    """

    points: Array  # log2 coordinates, one row a point
    log_ratio: Array
    reach: float = 1.0

    def at(self, *coordinates: ArrayLike) -> Array:
        """The factor at shapes, broadcast against each other."""
        at = np.broadcast_arrays(*(np.asarray(c, dtype=float) for c in coordinates))
        if not len(self.points):
            return np.ones(at[0].shape)
        x = np.stack([np.log2(a) for a in at], axis=-1)[..., None, :]
        distance2 = ((x - self.points) ** 2).sum(axis=-1) / self.reach**2
        weight = 1 / (distance2 + 1e-12) ** 2
        mean = float(self.log_ratio.mean())
        # The mean counts as one point at a distance of two reaches.
        out: Array = np.exp(((weight * self.log_ratio).sum(axis=-1) + mean / 16) / (weight.sum(axis=-1) + 1 / 16))
        return out


def correction(coordinates: Sequence[Sequence[float]], measured: ArrayLike, predicted: ArrayLike) -> Correction:
    """The correction that makes `predicted` seconds `measured` at those shapes."""
    ratio = np.log(np.asarray(measured, dtype=float) / np.asarray(predicted, dtype=float))
    return Correction(points=np.log2(np.asarray(coordinates, dtype=float)), log_ratio=ratio)
