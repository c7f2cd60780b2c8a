"""Small least-squares fits of measured times: relative errors, coefficients within bounds. Pure."""

import itertools
import math
from collections.abc import Sequence

import numpy as np


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x with the least squared relative errors, neither negative."""
    if len(points) == 1:
        return points[0][1], 0.0
    weights = [1 / y**2 for _, y in points]
    sw = sum(weights)
    mx = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / sw
    my = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / sw
    sxx = sum(w * (x - mx) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    sxy = sum(w * (x - mx) * (y - my) for w, (x, y) in zip(weights, points, strict=True))
    b = max(0.0, sxy / sxx) if sxx > 0 else 0.0
    a = my - b * mx
    if a >= 0:
        return a, b
    swxx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return 0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / swxx


def bounded_line(points: Sequence[tuple[float, float]], least: float, most: float) -> tuple[float, float]:
    """`line` with a slope b in [least, most]. The squares are convex: where their least is beyond a bound, b is that bound."""
    a, b = line(points)
    if least <= b <= most:
        return a, b
    b = min(most, max(least, b))
    weights = [1 / y**2 for _, y in points]
    return max(0.0, sum(w * (y - b * x) for w, (x, y) in zip(weights, points, strict=True)) / sum(weights)), b


def bounded_squares(
    rows: Sequence[Sequence[float]], times: Sequence[float], bounds: Sequence[tuple[float, float]]
) -> tuple[float, ...]:
    """Coefficients c within `bounds` with the least squared relative errors of times = rows @ c.

    Every subset of coefficients is tried at its bounds while the others are solved for plainly; the squares are convex, so
    the best answer within all bounds is theirs. Where the rows do not tell coefficients apart, the answer with the fewest free
    ones among the best wins, and of those the one whose earlier coefficients are at their lower bounds.
    """
    scaled = np.array(rows, dtype=float) / np.array(times, dtype=float)[:, None]
    best, least = tuple(b for b, _ in bounds), math.inf
    ways = itertools.product(*((0, 1, None) if math.isfinite(high) else (0, None) for _, high in bounds))
    for way in sorted(ways, key=lambda w: sum(x is None for x in w)):
        free = [i for i, x in enumerate(way) if x is None]
        found = [0.0 if x is None else bounds[i][x] for i, x in enumerate(way)]
        if free:
            left = 1.0 - scaled @ np.array(found)
            norm = np.linalg.norm(scaled[:, free], axis=0)
            if not np.all(norm > 0):
                continue
            solved, _, rank, _ = np.linalg.lstsq(scaled[:, free] / norm, left, rcond=1e-9)
            if rank < len(free):
                continue
            for i, value in zip(free, solved / norm, strict=True):
                found[i] = float(value)
            if any(not bounds[i][0] <= found[i] <= bounds[i][1] for i in free):
                continue
        error = float(np.sum((scaled @ np.array(found) - 1.0) ** 2))
        if error < least - 1e-12:
            best, least = tuple(found), error
    return best
