"""The run as a Chrome trace (JSON object format), which Perfetto opens: a track a replica, trainer and link, and counters.

Times in the file are microseconds of virtual time.
"""

from collections.abc import Iterator
from typing import Any

MOST_EVENTS = 400_000


class Timeline:
    """Takes spans, marks and counters; merges a span that goes on with the one before."""

    def __init__(self, title: str = "hexctl, simulated", most: int = MOST_EVENTS) -> None:
        self._tracks: dict[tuple[str, str], tuple[int, int]] = {}
        self._groups: dict[str, int] = {}
        self._open: dict[tuple[str, str], tuple[str, float, float]] = {}
        self._events: list[dict[str, Any]] = []
        self._last: dict[str, float] = {}
        self._title, self._most = title, most
        self.left_out = 0

    def span(self, group: str, track: str, what: str, begin_s: float, end_s: float) -> None:
        """`what` happened on a track; "" says that nothing did."""
        key = (group, track)
        before = self._open.get(key)
        if before is not None and before[0] == what and abs(before[2] - begin_s) < 1e-6:
            self._open[key] = (what, before[1], end_s)
            return
        if before is not None:
            self._write(key, before)
        self._open[key] = (what, begin_s, end_s)

    def counter(self, name: str, at_s: float, value: float) -> None:
        """A figure from then on."""
        if self._last.get(name) != value:
            self._last[name] = value
            self._add({"ph": "C", "name": name, "pid": 0, "tid": 0, "ts": at_s * 1e6, "args": {"value": value}})

    def mark(self, what: str, at_s: float) -> None:
        """Something happened to the run."""
        self._add({"ph": "i", "s": "g", "name": what, "pid": 0, "tid": 0, "ts": at_s * 1e6})

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace events, names of tracks first. Open spans are closed."""
        for key, span in self._open.items():
            self._write(key, span)
        self._open = {}
        yield {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": self._title}}
        for group, pid in self._groups.items():
            yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{group} (simulated)"}}
        for (_, track), (pid, tid) in self._tracks.items():
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": track}}
        yield from self._events

    def document(self) -> dict[str, Any]:
        """The whole file."""
        return {
            "displayTimeUnit": "ms",
            "otherData": {"simulated": True, "events_left_out": self.left_out},
            "traceEvents": list(self.events()),
        }

    def _write(self, key: tuple[str, str], span: tuple[str, float, float]) -> None:
        what, begin, end = span
        if not what or end <= begin:
            return
        if key not in self._tracks:
            pid = self._groups.setdefault(key[0], len(self._groups) + 1)
            self._tracks[key] = (pid, len(self._tracks) + 1)
        pid, tid = self._tracks[key]
        self._add({"ph": "X", "name": what, "pid": pid, "tid": tid, "ts": begin * 1e6, "dur": (end - begin) * 1e6})

    def _add(self, event: dict[str, Any]) -> None:
        if len(self._events) >= self._most:
            self.left_out += 1
        else:
            self._events.append(event)
