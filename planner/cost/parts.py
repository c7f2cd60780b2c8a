"""Shapes of groups of tasks as arrays: blocks, how their layers are divided, and the parts of equal stages they fall into.

A shape is one block or two in pipeline: `pp` stages of one kind each, of `dp` groups of `tp` devices. The stages of a shape
differ in their layers, in what lies next to them and in what the first and the last hold, and so fall into at most eight
*parts* of equal stages: of the first block its first stage, those in the middle with one layer more, those with one less, its
last; and so of the second block, whose last part is the last stage of the shape. Axes of arrays are block, part of it and shape;
of what all parts of a block have in common the second is 1. Figures of parts that a shape does not have (`count` 0) are such
that they add nothing: choosing by a mask costs an array ten times what a sum or a maximum does.
"""

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from planner.cluster import Link
from planner.record import record

Array = NDArray[np.float64]
Ints = NDArray[np.int_]
Bools = NDArray[np.bool_]
PARTS = (2, 4)  # blocks, parts of each
LAST = (-1, -1)  # block and part of the last stage
T = TypeVar("T")


@record
class Block:
    """One block of many shapes."""

    kind: str
    tp: Ints
    dp: Ints
    pp: Ints
    weight: Array  # FLOP/s of one stage, for dividing the layers
    skew: Array  # tokens of the fullest DP rank over the mean
    nodes: Ints  # machines a stage spans
    local: Link
    remote: Link | None  # the slowest link of a stage that spans machines
    inner: Link  # between stages of the block

    def take(self, at: NDArray[np.int_] | Bools) -> "Block":
        """Some of the shapes."""
        arrays = {n: getattr(self, n)[at] for n in ("tp", "dp", "pp", "weight", "skew", "nodes")}
        return dataclasses.replace(self, **arrays)


@record
class Hop:
    """The best link by which each shape leaves a machine, or a region, that does not hold it; infinitely fast where one does."""

    latency_s: Array
    bytes_per_s: Array

    @property
    def leaves(self) -> Bools:
        """Which shapes do."""
        return np.isfinite(self.bytes_per_s)


@record
class Parts:
    """The parts of every shape."""

    count: Array  # stages in the part; 0 where there is none
    behind: Array  # stages behind the front of the first of them, itself included
    layers: Array  # 0 where there is no such part
    between: Array  # borders between the blocks that it touches
    inside: Array  # borders inside its block
    first: Bools
    last: Bools
    absent: Array  # infinite where there is no such part, else 0


def divided(first: Block | None, second: Block, layers: int, head_layers: float) -> tuple[Ints, ...]:
    """`split_layers` for every shape: (layers of a stage of the first block, how many of its stages have one more, the same
    for the second block without its last stage, layers of the last stage, 0 where there are more stages than layers)."""
    na = np.zeros_like(second.pp) if first is None else first.pp
    nb = second.pp
    wa = np.zeros_like(second.weight) if first is None else first.weight
    total = na * wa + nb * second.weight
    xa, xb = (layers + head_layers) * wa / total, (layers + head_layers) * second.weight / total
    xl = xb - head_layers
    ideal = np.stack([xa, xb, xl])
    out = np.maximum(1, np.floor(ideal + 1e-9)).astype(int)
    size = np.stack([na, nb - 1, np.ones_like(nb)])
    rest = layers - (out * size).sum(axis=0)
    order = np.argsort(-np.round(ideal - out, 9), axis=0, kind="stable")
    more = np.zeros_like(out)
    columns = np.arange(len(nb))
    for place in range(3):
        row = order[place]
        given = np.clip(rest, 0, size[row, columns])
        more[row, columns] = given
        rest = rest - given
    last = out[2] + more[2]
    taken = np.flatnonzero((na + nb <= layers) & (rest < 0))  # of stages whose share is less than a layer
    if len(taken):
        out[:, taken], more[:, taken] = _taken_back(ideal[:, taken], out[:, taken], size[:, taken], -rest[taken])
        last[taken] = out[2, taken]
    last = np.where(na + nb <= layers, last, 0)
    return out[0], more[0], out[1], more[1], last


def _taken_back(ideal: Array, out: Ints, size: Ints, count: Ints) -> tuple[Ints, Ints]:
    """Layers of the three runs of equal stages after `count` are taken back, one by one from the stage most above its ideal (of
    equals the larger, then the hindmost): (of a stage, how many stages of the run have one more)."""
    out, less = out.copy(), np.zeros_like(out)  # stages of the run with a layer less, the hindmost
    columns = np.arange(out.shape[1])
    while (open_ := count > 0).any():
        above = np.where((out > 1) & (size > 0), np.round(out - ideal, 9), -np.inf)
        worst = np.zeros(len(columns), dtype=int)
        for run in (1, 2):
            mine, most = (above[run], out[run]), (above[worst, columns], out[worst, columns])
            worst[(mine[0] > most[0]) | (mine[0] == most[0]) & (mine[1] >= most[1])] = run
        at = worst[open_], columns[open_]
        less[at] += 1
        count = count - open_
        whole = less == size
        out, less = out - whole * (less > 0), less * ~whole
    return out - (less > 0), np.where(less > 0, size - less, 0)


def parts_of(first: Block | None, second: Block, split: Sequence[Ints]) -> Parts:
    """The parts of shapes whose layers are divided so."""
    la, ma, lb, mb, ll = split
    na = np.zeros_like(second.pp) if first is None else first.pp
    nb, zero = second.pp, np.zeros_like(second.pp)
    n = na + nb
    between_a, between_b = np.clip(na - 2, 0, None), np.clip(nb - 2, 0, None)
    mid_a, mid_b = np.clip(ma - 1, 0, between_a), np.clip(mb - 1, 0, between_b)

    def by_part(rows: Sequence[Ints | Bools]) -> Ints:
        return np.array(rows, dtype=int).reshape(*PARTS, -1)

    count = by_part(
        [(na >= 1) * 1, mid_a, between_a - mid_a, (na >= 2) * 1, (nb >= 2) * 1, mid_b, between_b - mid_b, zero + 1]
    )
    index = by_part([zero, zero + 1, np.maximum(1, ma), na - 1, na, na + 1, na + np.maximum(1, mb), n - 1])
    layers = by_part([la + (ma >= 1), la + 1, la, la + (ma >= na), lb + (mb >= 1), lb + 1, lb, ll])
    inside = by_part([na >= 2, zero + 2, zero + 2, zero + 1, zero + 1, zero + 2, zero + 2, nb >= 2])
    between = by_part([(na == 1) & (nb >= 1), zero, zero, zero + 1, na >= 1, zero, zero, (nb == 1) & (na >= 1)])
    there = count > 0
    return Parts(
        count=count.astype(float),
        behind=(n - index).astype(float),
        layers=(layers * there).astype(float),
        between=(between * there).astype(float),
        inside=(inside * there).astype(float),
        first=index == 0,
        last=index == n - 1,
        absent=np.array([np.inf, 0.0]).take(there),
    )


def front(value: T, size: int) -> T:
    """Figures of the first `size` shapes alone: of an array, or of all arrays in a record or a sequence."""
    found: object = value
    if isinstance(value, np.ndarray):
        found = value[..., :size]
    elif isinstance(value, list | tuple):
        found = type(value)(front(x, size) for x in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        found = dataclasses.replace(
            value, **{n: front(x, size) for n, x in fields.items() if isinstance(x, np.ndarray)}
        )
    return found  # type: ignore[return-value]


def extent(flags: Bools) -> int:
    """One more than the last position that is set; 0 where none is."""
    return len(flags) - int(flags[::-1].argmax()) if flags.any() else 0
