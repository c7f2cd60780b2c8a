"""The best mix of machines under a goal: best first over boxes of mixes, with a proof.

More devices never make the optimum worse, so the ceiling of a mix (`planner.bound`) bounds every part of it, and where a
whole box may be had at once, as the affordable corner of a budget, only that corner is planned. A box is bounded by
`planner.fluid` and by the ceilings of larger mixes, split in the middle of its dearest span, and dropped when it cannot win;
a mix is given its ceiling when its turn comes and is planned only when that can still win.
"""

import heapq
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from planner.bound import upper_bound
from planner.cost.model import CostModel
from planner.market import Counts
from planner.problem import Problem
from planner.record import record
from planner.solution import Feasible, Solution

_TIE = 1e-8  # ceilings carry a margin of 1e-9


@record
class Box:
    """All mixes between two corners."""

    low: Counts
    high: Counts


@record
class Machines:
    """What there is to choose from. `build` makes the problem of a mix."""

    prices: tuple[float, ...]  # USD/h of one machine of each type
    holds: tuple[Mapping[str, int], ...]  # its devices by kind
    most: Counts
    build: Callable[[Counts], Problem]
    always: Mapping[str, int]  # devices by kind that every mix has
    always_usd_per_h: float = 0.0
    always_largest: Mapping[str, int]  # most devices of a kind in one machine that every mix has

    def usd_per_h(self, counts: Counts) -> float:
        """The price of a mix."""
        return self.always_usd_per_h + math.fsum(n * p for n, p in zip(counts, self.prices, strict=True))


class Goal(Protocol):
    """What a mix is worth. Scores are larger for better mixes."""

    def clip(self, box: Box) -> Box | None:
        """The box without mixes that are not admissible; None when nothing is left."""

    def optimistic(self, box: Box, tokens_per_s: float) -> float | None:
        """No mix of the box scores more, given that none does more tokens/s than that; None: none is admissible."""

    def corner(self, box: Box) -> Counts | None:
        """The mix that is as good as any of the box, where that is known."""

    def score(self, counts: Counts, found: Feasible) -> float | None:
        """What a planned mix is worth; None where it does not do."""


class Evaluated:
    """Ceilings and plans of mixes, each made once."""

    def __init__(self, machines: Machines, throughput: Callable[[Problem], Solution]) -> None:
        self._machines, self._throughput = machines, throughput
        self._ceilings: dict[Counts, float] = {}  # tokens/s; 0 where not even the relaxed problem has a plan
        self._alike: dict[tuple[tuple[str, int], ...], list[Counts]] = {}  # those, by the rules that apply
        self.plans: dict[Counts, Solution] = {}

    @property
    def costed(self) -> int:
        """Mixes that were given a ceiling."""
        return len(self._ceilings)

    def inherited(self, counts: Counts) -> float:
        """The least ceiling of larger mixes to which the same rules apply."""
        alike = self._alike.get(largest(self._machines, counts), ())
        larger = (self._ceilings[c] for c in alike if all(a <= b for a, b in zip(counts, c, strict=True)))
        return min(larger, default=math.inf)

    def ceiling(self, counts: Counts) -> float:
        """Most tokens/s of any plan on that mix."""
        if counts not in self._ceilings:
            problem = self._machines.build(counts)
            bound = upper_bound(CostModel(problem)) if len(problem.cluster.devices) > 1 else None
            self._ceilings[counts] = 0.0 if bound is None else bound.tokens_per_s
            self._alike.setdefault(largest(self._machines, counts), []).append(counts)
        return self._ceilings[counts]

    def plan(self, counts: Counts) -> Solution:
        """The scheduler's plan on that mix; one that was stopped early is not kept."""
        if counts in self.plans:
            return self.plans[counts]
        found = self._throughput(self._machines.build(counts))
        if not isinstance(found, Feasible) or found.finished:
            self.plans[counts] = found
        return found


@record
class Best:
    """The best mix found."""

    counts: Counts
    found: Feasible
    score: float


@record
class Outcome:
    """What a search came to. No mix scores more than `bound`."""

    best: Best | None
    bound: float
    finished: bool


def largest(machines: Machines, counts: Counts) -> tuple[tuple[str, int], ...]:
    """Most devices of each kind in one machine of a mix: pipelined replicas are planned only where no single machine
    holds one, so that mixes are alike in their rules when this is the same."""
    most = dict(machines.always_largest)
    for n, holds in zip(counts, machines.holds, strict=True):
        if n:
            for kind, size in holds.items():
                most[kind] = max(size, most.get(kind, 0))
    return tuple(sorted(most.items()))


def roots(machines: Machines) -> list[Box]:
    """Boxes that hold all mixes, each of mixes with the same `largest` where a kind comes in machines of several sizes."""
    n = len(machines.prices)
    boxes = [Box(low=(0,) * n, high=machines.most)]
    for kind in sorted({k for h in machines.holds for k in h}):
        types = [i for i in range(n) if machines.holds[i].get(kind) and machines.most[i]]
        given = machines.always_largest.get(kind, 0)
        if len({machines.holds[i][kind] for i in types} | ({given} if given else set())) < 2:
            continue
        types = sorted((i for i in types if machines.holds[i][kind] > given), key=lambda i: -machines.holds[i][kind])
        boxes = [b for box in boxes for b in _by_first(box, types)]
    return boxes


def _by_first(box: Box, types: Sequence[int]) -> list[Box]:
    """The box cut by which of some types is the first it has."""
    out, high = [], list(box.high)
    for i in types:
        if box.low[i] or high[i]:
            low = tuple(max(v, 1) if j == i else v for j, v in enumerate(box.low))
            if all(a <= b for a, b in zip(low, high, strict=True)):
                out.append(Box(low=low, high=tuple(high)))
        if box.low[i]:
            return out
        high[i] = 0
    return [*out, Box(low=box.low, high=tuple(high))]


class MixSearch:
    """One search. Scores are compared to a relative precision of 1e-8."""

    def __init__(
        self,
        machines: Machines,
        evaluated: Evaluated,
        goal: Goal,
        *,
        should_stop: Callable[[], bool],
        on_improved: Callable[[Best, float], None] = lambda _best, _bound: None,
        incumbent: Best | None = None,
    ) -> None:
        self._machines, self._evaluated, self._goal = machines, evaluated, goal
        self._should_stop, self._on_improved = should_stop, on_improved
        self._best = incumbent
        self._queue: list[tuple[float, int, Box]] = []
        self._ticket = itertools.count()
        self._open = -math.inf  # what planned mixes may still be worth: their plans are not proven best

    def run(self, *, until_first: bool = False) -> Outcome:
        """Search to the end, to a stop, or to the first mix that does."""
        for root in roots(self._machines):
            self._push(root)
        while self._queue:
            bound = max(-self._queue[0][0], self._open, self._score())
            if self._should_stop() or (until_first and self._best is not None):
                return Outcome(best=self._best, bound=bound, finished=False)
            key, _, box = heapq.heappop(self._queue)
            if not self._can_win(-key):
                break
            self._refine(box)
        return Outcome(best=self._best, bound=max(self._open, self._score()), finished=not self._should_stop())

    def _refine(self, box: Box) -> None:
        """Look closer at a box: at its mix where one stands for it, else at its halves. Until there is a first plan the
        better half is followed at once."""
        while True:
            counts = self._goal.corner(box)
            if counts is not None:
                if any(counts) or self._machines.always:
                    self._look(counts, Box(low=box.low, high=counts))
                return
            children = [c for half in self._halves(box) if (c := self._entry(half)) is not None]
            children.sort(key=lambda c: c[0])
            follow = self._best is None and bool(children) and not self._should_stop()
            for key, child in children[1 if follow else 0 :]:
                heapq.heappush(self._queue, (key, next(self._ticket), child))
            if not follow:
                return
            box = children[0][1]

    def _look(self, counts: Counts, box: Box) -> None:
        """Plan a mix whose ceiling can win. At once, although another ceiling may be higher: ceilings that beat all before
        are few, and each plan prunes."""
        for ceiling in (self._evaluated.inherited, self._evaluated.ceiling):
            score = self._goal.optimistic(box, ceiling(counts))
            if score is None or not self._can_win(score):
                return
        self._plan(counts, box)

    def _plan(self, counts: Counts, box: Box) -> None:
        found = self._evaluated.plan(counts)
        most = self._evaluated.ceiling(counts)
        score = None
        if isinstance(found, Feasible):
            most, score = min(most, found.bound_tokens_per_s), self._goal.score(counts, found)
            if score is not None and self._can_win(score):
                self._best = Best(counts=counts, found=found, score=score)
        left = self._goal.optimistic(box, most)
        if left is not None and (score is None or left > score + _TIE * abs(score)):
            self._open = max(self._open, left)
        if score is not None and self._best is not None and self._best.counts == counts:
            ahead = -self._queue[0][0] if self._queue else -math.inf
            self._on_improved(self._best, max(ahead, self._open, self._best.score))

    def _push(self, box: Box) -> None:
        entry = self._entry(box)
        if entry is not None:
            heapq.heappush(self._queue, (entry[0], next(self._ticket), entry[1]))

    def _entry(self, box: Box) -> tuple[float, Box] | None:
        clipped = self._goal.clip(box)
        if clipped is None:
            return None
        score = self._goal.optimistic(clipped, self._evaluated.inherited(clipped.high))
        return None if score is None or not self._can_win(score) else (-score, clipped)

    def _halves(self, box: Box) -> tuple[Box, Box]:
        spans = [(b - a) * max(p, 1e-9) for a, b, p in zip(box.low, box.high, self._machines.prices, strict=True)]
        i = max(range(len(spans)), key=lambda j: (spans[j], -j))
        middle = (box.low[i] + box.high[i]) // 2
        return (
            Box(low=box.low, high=_with(box.high, i, middle)),
            Box(low=_with(box.low, i, middle + 1), high=box.high),
        )

    def _score(self) -> float:
        return -math.inf if self._best is None else self._best.score

    def _can_win(self, score: float) -> bool:
        return self._best is None or score > self._best.score + _TIE * abs(self._best.score)


def _with(counts: Counts, at: int, value: int) -> Counts:
    return tuple(value if i == at else v for i, v in enumerate(counts))
