"""Events: what happened, in the past tense. Append-only; the state is a fold over them.

An event is a record of plain JSON values (and records of such); its kind is the class's name, in whichever module it is.
Here are the run's own, and what is common to all.
"""

from typing import get_args

from planner.record import record
from runtime.core.fleet_event import FleetEvent, SpeedsLearned
from runtime.core.plan_event import CommandAccepted, PlanEvent


@record
class DaemonStarted:
    """A daemon took the run over. `adopted`: the run had been living before."""

    epoch: int
    pid: int
    adopted: bool


@record
class FlowFellSilent:
    """The data plane's writer does not answer."""

    age_s: float | None


@record
class FlowAnswered:
    """The data plane's writer answers again (or for the first time)."""

    pid: int | None


@record
class MilestoneReached:
    """Something a newcomer waits for, once a run."""

    name: str
    detail: str


@record
class RunEndRequested:
    """The run is to end: an operator's word, a limit reached, or Ctrl-C."""

    reason: str
    author: str = ""


@record
class RunEnded:
    """Samples are suspended in the ledger and the actors are stopped."""

    reason: str
    failed: bool = False


RunEvent = DaemonStarted | FlowFellSilent | FlowAnswered | MilestoneReached | RunEndRequested | RunEnded

Event = FleetEvent | PlanEvent | RunEvent

UNSAID = (CommandAccepted, SpeedsLearned)
"""For the audit and for a daemon that takes over: what they led to says itself."""

EVENT_TYPES: dict[str, type[Event]] = {t.__name__: t for t in get_args(Event)}


def kind(event: Event) -> str:
    """The name an event is stored under."""
    return type(event).__name__


@record
class Stored:
    """An event as the store keeps it: its place in the log and its time in unix seconds."""

    seq: int
    at_s: float
    event: Event
