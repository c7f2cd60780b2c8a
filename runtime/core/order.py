"""The order in which units leave their places: a dry run of the whole path before the first step.

Starting is never in the way of anything (wishes are disjoint), so only the order of leaving matters. A unit that leaves
frees its devices; every wish whose devices are free is started and then serves.
"""

from collections.abc import Sequence

from planner.record import record
from runtime.core.target import Wish

LOOK_LIMIT = 4000  # looked-at positions before the search gives up


@record
class Mover:
    """A living unit that has to leave. The trainer counts for nothing in the floor."""

    unit: str
    devices: tuple[str, ...]
    serves: bool  # a replica


def find_order(
    movers: Sequence[Mover], open_wishes: Sequence[Wish], serving: int, floor: int
) -> tuple[Mover, ...] | None:
    """An order of leaving in which, before every leave, more than `floor` replicas serve; None when none was found.

    `serving`: replicas that serve or soon will without anybody leaving, movers included. `open_wishes`: without a body.
    Movers are tried in the order given, so the first is preferred to leave first. Depth first, without recursion; a
    set of those who left that led nowhere is not looked at again.
    """
    walk = _Walk(movers, open_wishes, serving)
    dead_ends: set[int] = set()
    following = [0]  # at each depth the mover to try next
    for _ in range(LOOK_LIMIT + len(movers)):
        if len(walk.path) == len(movers):
            return tuple(movers[i] for i in walk.path)
        i = following[-1]
        while i < len(movers) and not (walk.may_leave(i, floor) and walk.left | 1 << i not in dead_ends):
            i += 1
        if i < len(movers):
            following[-1] = i + 1
            following.append(0)
            walk.leave(i)
            continue
        dead_ends.add(walk.left)
        following.pop()
        if not walk.path:
            return None
        walk.take_back()
    return None


class _Walk:
    """Who left so far, and how many serve."""

    def __init__(self, movers: Sequence[Mover], open_wishes: Sequence[Wish], serving: int) -> None:
        wish_of = {d: j for j, w in enumerate(open_wishes) for d in w.devices}
        self._movers = movers
        self._opens = [sorted({wish_of[d] for d in m.devices if d in wish_of}) for m in movers]
        self._counts = [w.role == "rollout" for w in open_wishes]
        self._blockers = [0] * len(open_wishes)
        for wishes_ in self._opens:
            for j in wishes_:
                self._blockers[j] += 1
        self._serving = serving + sum(c for c, b in zip(self._counts, self._blockers, strict=True) if b == 0)
        self.path: list[int] = []
        self.left = 0  # bit i: mover i left

    def may_leave(self, i: int, floor: int) -> bool:
        """Whether mover i is there and the floor holds without it."""
        return not self.left >> i & 1 and (not self._movers[i].serves or self._serving - 1 >= floor)

    def leave(self, i: int) -> None:
        """Mover i leaves; what it was in the way of starts."""
        self.path.append(i)
        self.left |= 1 << i
        self._serving -= self._movers[i].serves
        for j in self._opens[i]:
            self._blockers[j] -= 1
            self._serving += self._counts[j] and self._blockers[j] == 0

    def take_back(self) -> None:
        """Undo the last leave."""
        i = self.path.pop()
        self.left &= ~(1 << i)
        for j in self._opens[i]:
            self._serving -= self._counts[j] and self._blockers[j] == 0
            self._blockers[j] += 1
        self._serving += self._movers[i].serves
