"""Live groups and the samples that wait to be leased, as arrays.

A group has a row while it is live (admitted, neither trained nor given up). Its sampled tokens are counted by the version
that produced them in a ring of `RING` versions; older ones count as the oldest.
"""

import dataclasses
from collections import deque

import numpy as np
from numpy.typing import NDArray

from runtime.sim.homes import Homes

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

RING = 128
_NEVER = -1


@dataclasses.dataclass(slots=True)
class Suspended:
    """A sample that lost or gave back its lease; it goes on from what it has."""

    row: int
    left: int  # tokens still to sample
    context: int  # prompt and tokens so far: to be prefilled again
    first: int  # version of its first token


class GroupTable:
    """Rows of groups. Everything indexed by row; `free` rows are reused."""

    def __init__(self, members: int, rows: int) -> None:
        self.members = members
        self._free: list[int] = []
        self.ordinal = self.slot = self.left = self.started = np.zeros(0, dtype=np.int64)
        self.complete_s = self.prompt = self.sequence2 = np.zeros(0)
        self.tokens = self.starts = np.zeros((0, RING), dtype=np.int64)  # by row and version
        self.live = np.zeros(0, dtype=bool)
        self._grow(max(rows, 1))
        self.fresh: deque[tuple[Ints, Ints]] = deque()  # rows and lengths of samples that wait, in order
        self.fresh_count = 0  # those of `homes` included
        self.homes = Homes()
        self.suspended: deque[Suspended] = deque()
        self.admitted = self.given_up = 0

    def _grow(self, rows: int) -> None:
        old = len(self.live)
        for name in ("ordinal", "slot", "left", "started", "complete_s", "prompt", "sequence2", "live"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(rows, dtype=array.dtype)]))
        for name in ("tokens", "starts"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros((rows, RING), dtype=array.dtype)]))
        self._free.extend(range(old + rows - 1, old - 1, -1))

    @property
    def next_slot(self) -> int:
        """The slot that the next group takes."""
        return self.admitted - self.given_up

    @property
    def waiting(self) -> int:
        """Samples admitted and leased to nobody."""
        return self.fresh_count + len(self.suspended)

    def admit(self, lengths: Ints, prompts: Ints) -> None:
        """Admit len(prompts) groups; `lengths` has a row of members' response lengths for each."""
        count = len(prompts)
        while len(self._free) < count:
            self._grow(len(self.live))
        rows = np.array(self._free[-count:][::-1], dtype=np.int64)
        del self._free[-count:]
        self.ordinal[rows] = self.admitted + np.arange(count)
        self.slot[rows] = self.next_slot + np.arange(count)
        self.left[rows], self.started[rows] = self.members, _NEVER
        self.complete_s[rows], self.prompt[rows], self.sequence2[rows] = 0.0, prompts, 0.0
        self.tokens[rows], self.starts[rows], self.live[rows] = 0, 0, True
        self.admitted += count
        self.fresh.append((np.repeat(rows, self.members), lengths.reshape(-1)))
        self.fresh_count += lengths.size

    def unleased_groups(self) -> int:
        """Groups that have a sample which waits to be leased."""
        rows = [mine for mine, _ in self.fresh]
        rows += [np.array([*self.homes, *(s.row for s in self.suspended)], dtype=np.int64)]
        return len(np.unique(np.concatenate(rows)))

    @property
    def next_group(self) -> int | None:
        """Row of the next group of which no sample was leased yet."""
        return int(self.fresh[0][0][0]) if self.fresh else None

    def open_next(self) -> None:
        """The next group begins: its samples are now at `homes`, and whole groups alone are left of those fresh."""
        mine, long = self.fresh.popleft()
        self.homes.open(int(mine[0]), long[: self.members].tolist())
        if len(mine) > self.members:
            self.fresh.appendleft((mine[self.members :], long[self.members :]))

    def take_fresh(self, count: int) -> tuple[Ints, Ints]:
        """(rows, response lengths) of the next `count` fresh samples, in order; fewer where there are fewer."""
        rows: list[Ints] = []
        lengths: list[Ints] = []
        while count > 0 and self.fresh:
            mine, long = self.fresh.popleft()
            rows.append(mine[:count])
            lengths.append(long[:count])
            if count < len(mine):
                self.fresh.appendleft((mine[count:], long[count:]))
            self.fresh_count -= len(rows[-1])
            count -= len(rows[-1])
        if not rows:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return np.concatenate(rows), np.concatenate(lengths)

    def next_rows(self, count: int) -> Ints:
        """Rows of the next fresh samples, at most `count`."""
        rows, n = [], 0
        for mine, _ in self.fresh:
            rows.append(mine)
            n += len(mine)
            if n >= count:
                break
        return np.concatenate(rows)[:count]

    def least_left(self, count: int) -> int | None:
        """Fewest tokens to sample of the next `count` fresh samples and of those suspended; None: nothing waits."""
        known, n = self.homes.least_left, 0
        out = [x.left for x in self.suspended] + ([] if known is None else [known])
        for _, lengths in self.fresh:
            if n >= count:
                break
            out.append(int(lengths[: count - n].min()))
            n += len(lengths)
        return min(out, default=None)

    def count(self, rows: Ints, versions: Ints, tokens: Ints) -> None:
        """So many tokens were sampled for these rows by these versions."""
        np.add.at(self.tokens.reshape(-1), rows * RING + versions % RING, tokens)  # faster than by two indices

    def begin(self, rows: Ints, versions: Ints) -> None:
        """Samples of these rows are leased at these versions for the first time."""
        np.add.at(self.starts.reshape(-1), rows * RING + versions % RING, 1)
        held = self.started[rows]
        first = np.where(held == _NEVER, versions, np.minimum(held, versions))
        # Several samples of one group may begin together: the lowest version counts.
        big = np.iinfo(np.int64).max
        self.started[rows] = np.where(held == _NEVER, big, held)
        np.minimum.at(self.started, rows, first)

    def finish(self, rows: Ints, at_s: Floats, sequences: Floats) -> list[int]:
        """Samples of these rows are done at these times; answers with the rows that became complete. `sequences`: prompt
        and response of each (tokens)."""
        np.subtract.at(self.left, rows, 1)
        np.maximum.at(self.complete_s, rows, at_s)
        np.add.at(self.sequence2, rows, sequences * sequences)
        return sorted(set(rows[self.left[rows] == 0].tolist()))  # a group may have several that end

    def release(self, rows: Ints) -> None:
        """The groups are trained or given up: their rows are free."""
        self.live[rows] = False
        self._free.extend(rows.tolist())

    def forget_waiting(self, rows: set[int]) -> None:
        """Samples of groups given up that wait for a lease wait no longer."""
        gone = np.array(sorted(rows), dtype=np.int64)
        left = [(mine[stay], long[stay]) for mine, long in self.fresh for stay in (~np.isin(mine, gone),)]
        self.fresh = deque(f for f in left if len(f[0]))
        for row in rows:
            self.homes.forget(row)
        self.fresh_count = sum(len(mine) for mine, _ in self.fresh) + self.homes.waiting
        self.suspended = deque(s for s in self.suspended if s.row not in rows)
