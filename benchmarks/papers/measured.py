"""Table (b): AReaL-Hex's own measured rates and sync times put together anew, to predict its other figures.

What goes in: Table 1 (what a token costs on each kind, hence how fast one GPU is over another), Table 2 (seconds of sync), and
the rollout and training seconds of the homogeneous baseline (Figure 4, or Figure 2's own for Figure 2). What is not printed is
how many of the baseline's GPUs train: `n`, swept. A step is max(infer, train) + sync, work is divided by rate, the work of a
step is taken to be the same on every fleet. There is no cost model here and no plan: rates are added up.
"""

from collections.abc import Iterator, Sequence

from benchmarks.papers.figures import (
    CASE_H20,
    CASE_H800,
    CASE_MIXED,
    H20_LATENCY,
    H800,
    H800_LATENCY,
    HEX,
    HEX_LATENCY,
    MODELS,
    Figures,
    Latency,
)
from planner.record import record

MACHINE = 8  # GPUs


@record
class Rates:
    """Batches a second that one GPU does."""

    h800_rollout: float
    h800_train: float
    h20_rollout: float
    h20_train: float


@record
class Split:
    """GPUs that train; all others generate."""

    h800: int
    h20: int


def speed_ratios(figures: Figures, model: str) -> tuple[float, float]:
    """(rollout of an H20 over an H800's, training of an H800 over an H20's), from costs a token and prices."""
    price = figures.setup["H20 price"] / figures.setup["H800 price"]
    rollout = figures.ratios["H20 cheaper per token in rollout", model] * price
    train = figures.ratios["H800 cheaper per token in training", model] / price
    return rollout, train


def rates_of(figures: Figures, model: str, seen: Latency, gpus: int, training: int) -> Rates:
    """From a fleet of `gpus` H800 of which `training` train, and Table 1."""
    rollout, train = speed_ratios(figures, model)
    r, t = 1 / (seen.infer_s * (gpus - training)), 1 / (seen.train_s * training)
    return Rates(h800_rollout=r, h800_train=t, h20_rollout=r * rollout, h20_train=t / train)


def predict(rates: Rates, h800: int, h20: int, split: Split) -> Latency:
    """Seconds of both sides, without sync; infinite for a side without GPUs."""
    rolling = (h800 - split.h800) * rates.h800_rollout + (h20 - split.h20) * rates.h20_rollout
    training = split.h800 * rates.h800_train + split.h20 * rates.h20_train
    return Latency(
        infer_s=1 / rolling if rolling > 0 else float("inf"),
        train_s=1 / training if training > 0 else float("inf"),
        sync_s=None,
    )


def best(rates: Rates, h800: int, h20: int) -> tuple[Split, Latency]:
    """The split with the shortest step, by looking at all of them."""
    splits = (Split(h800=a, h20=b) for a in range(h800 + 1) for b in range(h20 + 1))
    return min(
        ((s, predict(rates, h800, h20, s)) for s in splits),
        key=lambda found: (found[1].step_s, found[0].h20, found[0].h800),
    )


def step_s(seen: Latency, sync_s: float) -> float:
    """max(infer, train) + sync."""
    return max(seen.infer_s, seen.train_s) + sync_s


@record
class Predicted:
    """A figure of the paper and what its own rates say, over the splits of the baseline."""

    section: str
    what: str
    paper: float
    values: tuple[tuple[int, float], ...]  # (n, value)
    at: int  # the n in whole machines, or nearest to what Figure 4 implies
    comment: str = ""
    digits: int = 2

    @property
    def value(self) -> float:
        """At `at`."""
        return dict(self.values)[self.at]


def implied_training_gpus(figures: Figures, model: str) -> float:
    """n that makes 8 H800 train as fast in the mix as Figure 4 says, were the work the same."""
    return figures.latency[model, HEX_LATENCY].train_s * MACHINE / figures.latency[model, H800_LATENCY].train_s


def predictions(figures: Figures) -> Iterator[Predicted]:
    """Everything, claim by claim."""
    by_model = [[*_figures_3_and_4(figures, m), *_figure_2(figures, m)] for m in MODELS]
    for same in zip(*by_model, strict=True):
        yield from same


def _swept(figures: Figures, model: str, seen: Latency, gpus: int) -> Sequence[tuple[int, Rates]]:
    """Rates by n: from a sixth to two thirds of the fleet trains."""
    return [(n, rates_of(figures, model, seen, gpus, n)) for n in range(gpus // 6, 2 * gpus // 3 + 1)]


def _figures_3_and_4(f: Figures, m: str) -> Iterator[Predicted]:
    alone, mixed, h20 = f.latency[m, H800_LATENCY], f.latency[m, HEX_LATENCY], f.latency[m, H20_LATENCY]
    sync, n20 = mixed.sync_s or 0.0, int(f.setup["budget"] / f.setup["H20 price"])
    rates = _swept(f, m, alone, 24)
    fixed, at = Split(h800=MACHINE, h20=0), MACHINE
    only = {n: predict(r, 8, 48, fixed) for n, r in rates}
    free = {n: best(r, 8, 48) for n, r in rates}
    cheap = {n: best(r, 8, 24)[1] for n, r in rates}
    twenty = {n: best(r, 0, n20)[1] for n, r in rates}
    over = f.ratios["hex over 24 H800 same budget", m]
    yield _row(
        "figure 3", f"8 H800 + 48 H20 over 24 H800, only H800 train, {m}", over, at,
        {n: alone.step_s / step_s(x, sync) for n, x in only.items()},
    )  # fmt: skip
    yield _row(
        "figure 3", f"8 H800 + 48 H20 over 24 H800 at the best split, {m}", over, at,
        {n: alone.step_s / step_s(x, sync) for n, (_, x) in free.items()},
        f"{free[at][0].h800} H800 and {free[at][0].h20} H20 train",
    )  # fmt: skip
    yield _row(
        "figure 3", f"8 H800 + 48 H20 over {n20} H20, both at the best split, {m}",
        f.ratios["hex over H20 same budget", m], at,
        {n: step_s(twenty[n], h20.sync_s or 0.0) / step_s(free[n][1], sync) for n in free},
    )  # fmt: skip
    yield _row(
        "table 4", f"8 H800 + 24 H20 over 24 H800 at the best split, {m}",
        f.tokens_per_s[m, HEX, 32] / f.tokens_per_s[m, H800, 24], at,
        {n: alone.step_s / step_s(x, sync) for n, x in cheap.items()},
    )  # fmt: skip
    yield _row(
        "figure 4", f"rollout seconds of 8 H800 + 48 H20, only H800 train, {m}", mixed.infer_s, at,
        {n: x.infer_s for n, x in only.items()}, digits=1,
    )  # fmt: skip
    yield _row(
        "figure 4", f"training seconds of 8 H800 + 48 H20, only H800 train, {m}", mixed.train_s, at,
        {n: x.train_s for n, x in only.items()}, digits=1,
    )  # fmt: skip
    yield _row(
        "figure 4", f"sync, % of a step of 8 H800 + 48 H20, only H800 train, {m}", 100 * sync / mixed.step_s, at,
        {n: 100 * sync / step_s(x, sync) for n, x in only.items()}, digits=1,
    )  # fmt: skip
    yield _row(
        "figure 4", f"step seconds of {n20} H20 at the best split, {m}", h20.step_s, at,
        {n: step_s(x, h20.sync_s or 0.0) for n, x in twenty.items()}, digits=1,
    )  # fmt: skip
    rollout = speed_ratios(f, m)[0]
    yield _row(
        "table 1", f"rollout of an H20 over an H800's that Figure 4 implies, {m}", rollout, at,
        {n: alone.infer_s * (24 - n) / (48 * mixed.infer_s) for n, _ in rates},
        "paper: from Table 1; were the work of a step the same and no H20 training",
    )  # fmt: skip


def _figure_2(f: Figures, m: str) -> Iterator[Predicted]:
    a, b, c = (f.latency[m, s] for s in (CASE_H800, CASE_H20, CASE_MIXED))
    rates = _swept(f, m, a, 32)
    at = 2 * MACHINE
    mixed = {n: best(r, 24, 24) for n, r in rates}
    twenty = {n: best(r, 0, 88)[1] for n, r in rates}
    yield _row(
        "figure 2", f"24 H800 + 24 H20 over 32 H800, {m}", a.step_s / c.step_s, at,
        {n: a.step_s / x.step_s for n, (_, x) in mixed.items()},
        f"{mixed[at][0].h800} H800 and {mixed[at][0].h20} H20 train",
    )  # fmt: skip
    yield _row(
        "figure 2", f"24 H800 + 24 H20 over 88 H20, {m}", b.step_s / c.step_s, at,
        {n: twenty[n].step_s / x.step_s for n, (_, x) in mixed.items()},
    )  # fmt: skip


def _row(  # noqa: PLR0917
    section: str, what: str, paper: float, at: int, values: dict[int, float], comment: str = "", *, digits: int = 2
) -> Predicted:
    return Predicted(
        section=section, what=what, paper=paper, values=tuple(values.items()), at=at, comment=comment, digits=digits
    )
