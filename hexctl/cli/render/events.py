"""Events as documents and as text. Pure: the clock's zone comes in as an argument."""

from collections.abc import Callable
from typing import Any

from hexctl.cli.render.text import clean
from runtime.api.wire import EventRow

_MARK = {"info": " ", "warning": "!", "error": "✕"}


def event_document(e: EventRow) -> dict[str, Any]:
    """One event, field by field."""
    return {name: getattr(e, name) for name in EventRow.__dataclass_fields__}


def event_line(e: EventRow, time_of_day: Callable[[float], str]) -> str:
    """One event in one line; `time_of_day` puts unix seconds into words."""
    subject = f"{e.subject}: " if e.subject and e.subject not in e.message else ""
    return clean(f"{time_of_day(e.at_s)} {_MARK[e.level]} {subject}{e.message}")
