"""When each leased sample last got a token, in the order of those times: which ones stall is asked at every tick.

Times only grow, so a sample that got a token goes to the end of the order and those that stall are at its beginning: a
question costs as much as it has answers, however many leases there are.
"""

from collections import OrderedDict
from collections.abc import Iterable

from runtime.rl.types import SampleId


class Progress:
    """Seconds of flow's clock by sample. A pause of flow itself is given back to all by moving the zero of these times."""

    def __init__(self, samples: Iterable[SampleId], now_s: float) -> None:
        """`samples`: leased before this flow opened the ledger; they start anew."""
        self._pauses_s = 0.0
        self._marks_s = OrderedDict.fromkeys(samples, now_s)  # less the pauses until then; oldest first

    def __len__(self) -> int:
        return len(self._marks_s)

    def mark(self, sample: SampleId, now_s: float) -> None:
        """It was leased, or got a token, now. Never earlier than any mark before it."""
        self._marks_s[sample] = now_s - self._pauses_s
        self._marks_s.move_to_end(sample)

    def forget(self, sample: SampleId) -> None:
        """Its lease ended."""
        self._marks_s.pop(sample, None)

    def give_back(self, pause_s: float) -> None:
        """Nobody was heard for that long because nobody listened: it counts for no sample marked so far."""
        self._pauses_s += pause_s

    def stalled(self, now_s: float, limit_s: float) -> tuple[SampleId, ...]:
        """Samples without a token for longer than `limit_s`, the longest first."""
        found: list[SampleId] = []
        for sample, mark_s in self._marks_s.items():
            if now_s - (mark_s + self._pauses_s) <= limit_s:
                break
            found.append(sample)
        return tuple(found)
