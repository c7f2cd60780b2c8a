"""Where the groups of waiting samples are at home: the replicas that decode, or have decoded, other samples of the same prompt."""

from collections.abc import Set

from runtime.policy.dispatch import Home
from runtime.rl.ledger.book import Book

ReplicaKey = tuple[str, int]  # name and incarnation


class Homes:
    """Homes as one replica sees them, for the time of one grant. `others`: replicas that will ask for work again."""

    def __init__(self, book: Book, replica: ReplicaKey, others: Set[ReplicaKey]) -> None:
        self._book, self._replica, self._others = book, replica, others
        self._found: dict[int, Home] = {}

    def of(self, group: int) -> Home:
        """The home of a live group. One that a replica has finished samples of counts: its engine still has the prompt."""
        home = self._found.get(group)
        if home is None:
            home = self._found[group] = self._look(group)
        return home

    def _look(self, group: int) -> Home:
        rows = (self._book.samples[m] for m in self._book.members[group])
        at = {(r.replica, r.replica_epoch) for r in rows if r.state in ("LEASED", "DONE")}
        if self._replica in at:
            return Home.HERE
        return Home.ELSEWHERE if at & self._others else Home.NOWHERE
