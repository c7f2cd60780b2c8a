"""One thing that `hexctl doctor` looked at."""

from typing import Literal

from planner.record import record

Verdict = Literal["ok", "note", "fault"]


@record
class Finding:
    """What was looked at, what was found, and what to do about it."""

    what: str
    verdict: Verdict
    found: str
    hint: str = ""
