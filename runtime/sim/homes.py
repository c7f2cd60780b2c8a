"""Groups of which samples wait, and the replicas that have their prompt: who decodes a sample of a group takes its others too."""

from collections.abc import Iterator


class Homes:
    """Groups begun whose last samples wait, oldest first. Groups are told by their rows in the group table."""

    def __init__(self) -> None:
        self._lengths: dict[int, list[int]] = {}  # response lengths of those that wait, the next one last
        self._names: dict[int, set[str]] = {}  # replicas that have had a sample of it
        self._rows: dict[str, list[int]] = {}  # the same by replica, oldest first
        self._alone: list[int] = []  # groups whose replicas left

    def __iter__(self) -> Iterator[int]:
        return iter(self._lengths)

    @property
    def waiting(self) -> int:
        """Samples that wait."""
        return sum(map(len, self._lengths.values()))

    @property
    def least_left(self) -> int | None:
        """Fewest tokens of any of them; None where none waits."""
        return min((n for lengths in self._lengths.values() for n in lengths), default=None)

    def open(self, row: int, lengths: list[int]) -> None:
        """A group begins: all its samples wait, for nobody yet."""
        self._lengths[row], self._names[row] = lengths[::-1], set()

    def here(self, name: str) -> int | None:
        """The oldest group that waits and has its prompt on a replica."""
        return next(iter(self._rows.get(name, ())), None)

    def nowhere(self) -> int | None:
        """The oldest group whose replicas are all gone."""
        self._alone = [row for row in self._alone if row in self._names and not self._names[row]]
        return next(iter(self._alone), None)

    def take(self, row: int, name: str) -> tuple[int, bool]:
        """The next sample of a group, for a replica: (tokens of its response, whether the prompt is there)."""
        length, known = self._lengths[row].pop(), name in self._names[row]
        if not known:
            self._names[row].add(name)
            self._rows.setdefault(name, []).append(row)
        if not self._lengths[row]:
            self.forget(row)
        return length, known

    def forget(self, row: int) -> int:
        """Nothing of that group waits any more; answers with how many samples did."""
        for name in self._names.pop(row, ()):
            self._rows[name].remove(row)
        return len(self._lengths.pop(row, ()))

    def leave(self, name: str) -> None:
        """A replica is gone, and the prompts with it."""
        for row in self._rows.pop(name, ()):
            self._names[row].discard(name)
            if not self._names[row]:
                self._alone.append(row)
