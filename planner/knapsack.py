"""Replicas on interchangeable devices: the most tokens that counts of devices give, for many cases at once.

Sizes 1, 2, 4, 8 divide each other, so the best filling takes the best way to use 8 devices as often as it fits, then the
best way to use 4, and so on: exact without a table. Pipelines have sizes that do not; those need a table, and beyond
`TABLE` devices the best density stands in for it, which is never less.
"""

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

TABLE = 192

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def is_chain(sizes: Sequence[int]) -> bool:
    """Whether each of these ascending sizes divides the next."""
    return all(b % a == 0 for a, b in itertools.pairwise(sizes))


def most_value(sizes: Sequence[int], values: Floats, devices: Ints) -> Floats:
    """The largest sum of values[c, i] whose sizes[i] add up to at most devices[c], for every case c.

    `sizes` ascending; values not negative. An upper limit of that sum where sizes are no chain and devices exceed `TABLE`.
    """
    if is_chain(sizes):
        return chain_value(sizes, values, chain_counts(sizes, devices))
    density: Floats = devices * (values / np.array(sizes, dtype=float)).max(axis=1)
    small = devices <= TABLE
    if small.any():
        density[small] = _table(sizes, values[small], devices[small])
    return density


def chain_counts(sizes: Sequence[int], devices: Ints) -> Ints:
    """[i, c] how many of each size a filling takes whatever they are worth: of sizes that are a chain, the largest first."""
    counts = np.zeros((len(sizes), len(devices)), dtype=np.int64)
    for i in reversed(range(len(sizes))):
        counts[i] = devices // sizes[i]
        devices = devices - counts[i] * sizes[i]
    return counts


def chain_value(sizes: Sequence[int], values: Floats, counts: Ints) -> Floats:
    """`most_value` of sizes that are a chain, by `chain_counts`: each taken as the best way to use so many devices."""
    best = [values[:, 0]]
    for i in range(1, len(sizes)):
        best.append(np.maximum(values[:, i], best[-1] * (sizes[i] // sizes[i - 1])))
    total = np.zeros(counts.shape[1])
    for count, value in zip(reversed(counts), reversed(best), strict=True):
        total += count * value
    return total


def _table(sizes: Sequence[int], values: Floats, devices: Ints) -> Floats:
    most = int(devices.max(initial=0))
    table = np.zeros((most + 1, len(devices)))
    for n in range(1, most + 1):
        table[n] = table[n - 1]
        for i, size in enumerate(sizes):
            if size <= n:
                np.maximum(table[n], table[n - size] + values[:, i], out=table[n])
    found: Floats = table[devices, np.arange(len(devices))]
    return found


def fill(items: Sequence[tuple[int, int, float]], devices: Sequence[int], at_least: int = 0) -> list[int] | None:
    """How many of each item (level, size, value) to take for the largest sum of values, covering `at_least` devices.

    `devices[l]`: how many devices items of level l and below may cover together, ascending (devices of a higher level are
    open to fewer items). None where no filling covers so many. Among equals the one that covers fewer devices.
    """
    if at_least > devices[-1]:
        return None
    worst = float("-inf")
    # By devices covered exactly: (value, item taken last); an item of level l is taken after all of lower levels.
    tables: list[list[tuple[float, int]]] = []
    table: list[tuple[float, int]] = [(0.0, -1)] + [(worst, -1)] * devices[-1]
    for level, most in enumerate(devices):
        table = list(table)
        mine = [(i, size, value) for i, (at, size, value) in enumerate(items) if at == level]
        for n in range(1, most + 1):
            options = [(table[n - s][0] + v, i) for i, s, v in mine if s <= n and table[n - s][0] > worst]
            table[n] = max([table[n], *options], key=lambda o: (o[0], o[1]))
        tables.append(table)
    n = max(range(at_least, devices[-1] + 1), key=lambda j: (table[j][0], -j))
    if table[n][0] == worst:
        return None
    out = [0] * len(items)
    level = len(devices) - 1
    while n > 0:
        value, item = tables[level][n]
        if level and tables[level - 1][n] == (value, item):
            level -= 1
            continue
        out[item] += 1
        n -= items[item][1]
    return out
