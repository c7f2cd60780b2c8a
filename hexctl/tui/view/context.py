"""What a view must know besides the snapshot."""

from planner.record import record


@record
class Context:
    """How to draw. `elapsed_s`: since the snapshot came; it is added to every age."""

    elapsed_s: float = 0.0
    utc_offset_s: int = 0  # seconds east of Greenwich, for wall-clock times
    ascii: bool = False  # spell out what has no good ASCII stand-in


@record
class Health:
    """Whether the daemon answers. `silent_s` counts from its last answer (or from the start)."""

    answering: bool
    silent_s: float
    reason: str = ""
    retry_s: float | None = None  # from the last failed try to the next
