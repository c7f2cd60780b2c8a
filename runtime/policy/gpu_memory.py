"""Whether a GPU whose user was killed may be used again. Pure: readings in, a verdict out.

Ray frees a placement group when its actor is dead; the driver frees memory when the last process with a context is. Between
the two lie a hung kernel, an engine's worker that nobody killed, a core dump being written. So a device is used again only
after a reading that was made later than the kill says so, and is in quarantine until one does. On a card in parts others go on
computing: their processes say nothing of the killed one, so there the memory alone decides.
"""

from typing import Literal

from planner.record import record

IDLE_SHARE = 0.05  # of a card that nobody computes on: the driver's own
IDLE_BYTES = 2**30


@record
class CardReading:
    """One reading of one card, as NVML gives it. None: the driver does not say."""

    made_s: float  # when, on the clock that `Kill.at_s` is of
    pids: tuple[int, ...] | None
    used_bytes: float | None
    total_bytes: float | None


@record
class MemoryVerdict:
    """`why` is for people, "" when the memory is back."""

    state: Literal["back", "held", "unknown"]
    why: str = ""


def memory_verdict(reading: CardReading | None, *, killed_s: float, share: float = 1.0) -> MemoryVerdict:
    """What a reading says of a card whose processes, which had `share` of it, were killed at `killed_s`.

    No process and no memory beyond the driver's own: back. A container may show no process at all while their memory is
    taken, so an empty list alone proves nothing where memory is readable. An old reading, or one without either figure, is
    no word for it: unknown, which blocks like held. Of a part of a card: back when no more is in use than the others' parts.
    """
    if reading is None or reading.made_s <= killed_s:
        return MemoryVerdict(state="unknown", why="no reading since")
    if share < 1:
        return _part_verdict(reading, share)
    if reading.pids:
        return MemoryVerdict(state="held", why=f"processes {', '.join(map(str, reading.pids))}")
    used, total = reading.used_bytes, reading.total_bytes
    if used is None or total is None:
        if reading.pids is None:
            return MemoryVerdict(state="unknown", why="the driver tells neither processes nor memory")
        return MemoryVerdict(state="back")
    if used > max(IDLE_BYTES, IDLE_SHARE * total):
        by = "by no process that the driver lists" if reading.pids is not None else "processes are not listed"
        return MemoryVerdict(state="held", why=f"{used / 1e9:.1f} GB in use, {by}")
    return MemoryVerdict(state="back")


def _part_verdict(reading: CardReading, share: float) -> MemoryVerdict:
    used, total = reading.used_bytes, reading.total_bytes
    if reading.pids == ():
        return MemoryVerdict(state="back")
    if used is None or total is None:
        return MemoryVerdict(state="unknown", why="the driver does not tell the memory, and others compute there")
    others = (1 - share) * total + max(IDLE_BYTES, IDLE_SHARE * total)
    if used > others:
        return MemoryVerdict(
            state="held", why=f"{used / 1e9:.1f} GB in use, the others' parts are {others / 1e9:.1f} GB"
        )
    return MemoryVerdict(state="back")
