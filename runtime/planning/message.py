"""What goes over the private pipe between the daemon and its own planner process."""

from planner.problem import Budget, Problem
from planner.record import record
from planner.solution import Feasible, Solution


@record
class Ask:
    """One problem. `seconds`: how long the child may search by its own clock."""

    problem: Problem
    scheduler: str
    budget: Budget
    seconds: float


@record
class Ready:
    """The child has its imports done and begins: its time counts from here."""


@record
class Incumbent:
    """The best plan so far."""

    feasible: Feasible


@record
class Done:
    """The answer."""

    solution: Solution


@record
class Broken:
    """The planner raised; the text says what."""

    message: str


FromChild = Ready | Incumbent | Done | Broken
