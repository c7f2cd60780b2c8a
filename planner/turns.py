"""Where generation takes turns with groups of tasks on the same devices: a bound of the period that knows what lies there.

The pairing gives replicas all memory of every device. In truth a replica has what the models of the groups leave, and its own
weights slow a group that has no room for them; the first stage of a pipeline, which keeps most micro-batches under way, has least.
So every plan of a way takes at least, for one group of it and the most that replicas hold on a device of its first stage (none,
or what some shape holds),
- the side with that held there, and
- the generation of a batch, where devices of that stage are in replicas of shapes that hold no more, and every device has what
  models leave it. A replica on several devices has the memory of the fullest, so device by device its tokens are bounded.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence

from planner.cluster import Link
from planner.cost.memory import replica_resident_bytes
from planner.cost.model import CostModel, side_s
from planner.cost.step import Offer, by_pace
from planner.cost.training import TrainerCost
from planner.plan import Task
from planner.record import record
from planner.sides import Sides, Way
from planner.space import BlockShape, DeviceClass, is_mixed, replica_shapes

_MOST_WAYS = 64  # of one cell that are looked at
_SPANS = (0.03, 0.01, 0.003)  # how far above the bound ways are looked for, less where they are too many
_HALVINGS = 6


@record
class _Level:
    """One choice of what replicas hold on the first stage of a group."""

    side_s: float
    stages: tuple[
        tuple[str, int, float, float], ...
    ]  # kind, devices, bytes of models there, most bytes of a replica there; those alike once


class Turns:
    """Bounds of one problem."""

    def __init__(self, cost: CostModel, sides: Sides, classes: Sequence[DeviceClass]) -> None:
        self.cost, self.sides, self.relaxed = cost, sides, sides.relaxed
        self.count = {k: sum(c.size for c in classes if c.place.kind == k) for k in sides.kinds}
        self.shapes = {
            k: tuple((replica_resident_bytes(cost.context, s.tp, s.pp), s) for s in replica_shapes(cost, classes, k))
            for k in sides.kinds
        }
        self._offers: dict[tuple[str, float, float, Link], list[tuple[float, int, Offer]]] = {}
        self._levels: dict[tuple[tuple[BlockShape, ...], tuple[Task, ...], float], TrainerCost | None] = {}

    def closer_s(
        self, used: tuple[int, ...], actor: tuple[bool, ...], window_s: float, low_s: float, links: dict[str, Link]
    ) -> float:
        """A better lower bound of the period of a cell than `low_s`. `window_s`: seconds that generation takes at least; `links`:
        by kind, that over which new weights come at best."""
        for span in _SPANS:
            high_s = low_s * (1 + span)
            ways = list(itertools.islice(self.sides.ways(used, actor, high_s - window_s), _MOST_WAYS))
            if len(ways) < _MOST_WAYS:
                return self._between(low_s, high_s, [(w.side_s + window_s, w) for w in ways], links)
        return low_s

    def _between(
        self,
        low_s: float,
        high_s: float,
        ways: Sequence[tuple[float, Way]],
        links: dict[str, Link],
    ) -> float:
        """The longest period, to some halvings, that none of some ways is done in; each comes with a bound."""
        levels, unheld = functools.cache(self._way_levels), functools.cache(self._unheld)

        def way_done(way: Way, period_s: float) -> bool:
            groups = range(len(way.blocks))
            if not self._alone(way) or not self._done(unheld(way), period_s, links):  # whatever replicas hold
                return False
            return all(any(self._done(x, period_s, links) for x in levels(way, g)) for g in groups)

        def done(period_s: float) -> bool:
            return any(least_s < period_s and way_done(way, period_s) for least_s, way in ways)

        if not done(high_s):
            return high_s
        for _ in range(_HALVINGS):
            middle_s = (low_s + high_s) / 2
            low_s, high_s = (low_s, middle_s) if done(middle_s) else (middle_s, high_s)
        return low_s

    def _way_levels(self, way: Way, g: int) -> list[_Level]:
        """Every choice for the first stage of one group of a way; none where the way does not fit at all."""
        costs = self._alone(way)
        if not costs:
            return []
        stages = self._stages(way, g)
        out: list[_Level] = []
        first = way.blocks[g]
        for most in (0.0, *sorted({held for held, _ in self.shapes[first[0].kind]})):
            slowed = costs[g] if is_mixed(first) else self._cost(first, way.tasks[g], most)
            if slowed is not None:
                seconds = max(way.side_s, side_s([*costs[:g], slowed, *costs[g + 1 :]]))
                if out and out[-1].side_s >= seconds:
                    out.pop()  # it may as well hold more
                where = tuple((k, n, held, most if limit == 0 else limit) for k, n, held, limit in stages)
                out.append(_Level(side_s=seconds, stages=where))
        return out

    def _unheld(self, way: Way) -> _Level:
        """Better than any choice: replicas of every shape fit and slow nothing."""
        return _Level(side_s=way.side_s, stages=self._stages(way, -1))

    def _alone(self, way: Way) -> list[TrainerCost]:
        """The costs of the groups of a way; none where it does not fit at all."""
        alone = [self._cost(b, t, 0.0) for b, t in zip(way.blocks, way.tasks, strict=True)]
        costs = [c for c in alone if c is not None]
        return costs if len(costs) == len(alone) else []

    def _stages(self, way: Way, g: int) -> tuple[tuple[str, int, float, float], ...]:
        """All devices as `_Level` has them, replicas that hold nothing on the first stage of group `g` and anything elsewhere."""
        taken = dict.fromkeys(self.count, 0)
        found: Counter[tuple[str, float, float]] = Counter()
        for x, (blocks, cost) in enumerate(zip(way.blocks, self._alone(way), strict=True)):
            # Of ranks of two kinds it is not said what lies where: they have all their memory.
            known = not is_mixed(blocks)
            held = cost.resident_bytes if known else (0.0,) * len(blocks)
            each = [b for b in blocks for _ in range(b.pp)]
            for i, (b, n) in enumerate(zip(each, held, strict=True)):
                taken[b.kind] += b.tp * b.dp
                found[b.kind, n, 0.0 if (x, i) == (g, 0) and known else math.inf] += b.tp * b.dp
        for kind, n in taken.items():
            found[kind, 0.0, math.inf] += self.count[kind] - n
        return tuple((kind, n, held, limit) for (kind, held, limit), n in found.items() if n)

    def _cost(self, blocks: tuple[BlockShape, ...], tasks: tuple[Task, ...], held: float) -> TrainerCost | None:
        """What a group takes where replicas hold so much on each device of its first stage."""
        key = (blocks, tasks, held)
        if key not in self._levels:
            self._levels[key] = self.relaxed.group(blocks, tasks, first_bytes=held)
        return self._levels[key]

    def _done(self, level: _Level, period_s: float, links: dict[str, Link]) -> bool:
        """Whether a batch may be generated in a period so."""
        left = self.cost.rules.work_tokens
        if not period_s > level.side_s:
            return False
        for kind, devices, held, most in level.stages:
            left -= devices * self._tokens(kind, held, most, period_s - level.side_s, links[kind])
        return left <= 0

    def _tokens(self, kind: str, held: float, most: float, window_s: float, link: Link) -> float:
        """The most tokens of one device that holds `held` bytes of models, in a replica that holds `most` there."""
        best = 0.0
        for pace, devices, offer in self._paced(kind, held, most, link) if window_s > 0 else ():
            if pace * window_s <= best:
                break  # nor do those that follow do more
            best = max(best, self.cost.rules.given_tokens(offer, window_s, 0.0) / devices)
        return best

    def _paced(self, kind: str, held: float, most: float, link: Link) -> list[tuple[float, int, Offer]]:
        """(tokens a second of one device at most, devices, offer) of every replica that may lie there, most first."""
        key = (kind, held, most, link)
        if key not in self._offers:
            shapes = [s for resident, s in self.shapes[kind] if resident <= most]
            found = [
                (pace / s.devices, s.devices, o) for s in shapes for pace, o in by_pace(self.cost.offers(s, link, held))
            ]
            self._offers[key] = sorted(found, key=lambda x: -x[0])
        return self._offers[key]
