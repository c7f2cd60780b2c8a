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
    """An order of leaving in which, before every leave, more than `floor` replicas serve; None when there is none.

    `serving`: replicas that serve or soon will without anybody leaving, movers included. `open_wishes`: without a body.
    Movers are tried in the order given, so the first is preferred to leave first.
    """
    dead_ends: set[frozenset[str]] = set()
    looked = 0

    def serving_after(left: frozenset[str]) -> int:
        held = {d for m in movers if m.unit not in left for d in m.devices}
        started = sum(1 for w in open_wishes if w.role == "rollout" and not held.intersection(w.devices))
        return serving + started - sum(1 for m in movers if m.serves and m.unit in left)

    path: list[Mover] = []

    def walk(left: frozenset[str]) -> bool:
        nonlocal looked
        if len(left) == len(movers):
            return True
        looked += 1
        if left in dead_ends or looked > LOOK_LIMIT:
            return False
        now = serving_after(left)
        for m in movers:
            if m.unit in left or (m.serves and now - 1 < floor):
                continue
            path.append(m)
            if walk(left | {m.unit}):
                return True
            path.pop()
        dead_ends.add(left)
        return False

    return tuple(path) if walk(frozenset()) else None
