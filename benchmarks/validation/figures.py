"""Error figures: one a data set and part, from predictions and measurements."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from planner.record import record


@record
class Figure:
    """How far predictions are from measurements. Errors are |predicted / measured - 1|."""

    name: str  # the data set
    part: str  # kind, or another cut of it
    fitted: str  # what the prediction was fitted on
    rows: int
    median: float
    p90: float
    mean: float
    bias: float  # median of predicted / measured - 1: negative is too fast
    rank: float  # Spearman's correlation
    bar: str = ""  # what it must keep, such as "median <= 0.10"
    kept: bool | None = None  # whether it does; None without a bar


def figure(
    name: str, part: str, predicted: ArrayLike, measured: ArrayLike, *, fitted: str, median: float | None = None,
    mean: float | None = None, rank: float | None = None,
) -> Figure:  # fmt: skip
    """The figure of one part; `median`, `mean` and `rank` are bars."""
    p, m = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    errors = np.abs(p / m - 1)
    found = {
        "median": float(np.median(errors)),
        "mean": float(errors.mean()),
        "rank": spearman(p, m),
    }
    bars = {"median": median, "mean": mean, "rank": rank}
    said = [f"{n} {'>=' if n == 'rank' else '<='} {b:.2f}" for n, b in bars.items() if b is not None]
    kept = [found[n] >= b if n == "rank" else found[n] <= b for n, b in bars.items() if b is not None]
    return Figure(
        name=name,
        part=part,
        fitted=fitted,
        rows=len(p),
        median=found["median"],
        p90=float(np.percentile(errors, 90)),
        mean=found["mean"],
        bias=float(np.median(p / m - 1)),
        rank=found["rank"],
        bar=", ".join(said),
        kept=all(kept) if kept else None,
    )


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Rank correlation, ties sharing their mean rank; 1 for fewer than two different values."""
    x, y = _ranks(np.asarray(a, dtype=float)), _ranks(np.asarray(b, dtype=float))
    if len(set(x)) < 2 or len(set(y)) < 2:
        return 1.0
    return float(np.corrcoef(x, y)[0, 1])


def _ranks(values: Any) -> list[float]:
    ordered = sorted(values)
    places: dict[float, list[int]] = {}
    for i, v in enumerate(ordered):
        places.setdefault(float(v), []).append(i)
    return [statistics.fmean(places[float(v)]) for v in values]


def positive_fit(columns: Sequence[ArrayLike], measured: ArrayLike) -> list[float]:
    """Coefficients >= 0 of `columns` that make their sum `measured` with the least relative squares.

    Columns whose coefficient comes out negative are dropped, the most negative first.
    """
    y = np.asarray(measured, dtype=float)
    x = np.stack([np.asarray(c, dtype=float) for c in columns], axis=1) / y[:, None]
    used = [True] * x.shape[1]
    while True:
        out = np.zeros(x.shape[1])
        out[used] = np.linalg.lstsq(x[:, used], np.ones(len(y)), rcond=None)[0]
        if (out >= 0).all():
            return [float(v) for v in out]
        used[int(np.argmin(out))] = False


def groups(keys: Iterable[str]) -> Mapping[str, list[int]]:
    """Positions by key, in order of first appearance."""
    out: dict[str, list[int]] = {}
    for i, key in enumerate(keys):
        out.setdefault(key, []).append(i)
    return out
