"""What a person wants for the money: one value for each objective. Schedulers know none of them: they maximise throughput."""

import math

from planner.errors import InvalidInput
from planner.record import record


def _finite(name: str, value: float, *, zero: bool = False) -> None:
    if not (value >= 0 if zero else value > 0) or not value < math.inf:
        raise InvalidInput(
            f"{name} must be a {'number, 0 or more' if zero else 'positive number'}", where=name, got=value
        )


@record
class WithinBudget:
    """Most tokens/s for at most that price."""

    usd_per_h: float

    def __post_init__(self) -> None:
        _finite("usd_per_h", self.usd_per_h)


@record
class Reach:
    """The lowest price at which tokens/s reach that figure."""

    tokens_per_s: float

    def __post_init__(self) -> None:
        _finite("tokens_per_s", self.tokens_per_s)


@record
class SpotRisk:
    """What an interruption of a spot instance costs. Interruptions are independent and come at a constant rate."""

    interruptions_per_h: float  # of one instance
    restart_s: float = (
        600.0  # seconds the whole run loses each time (assumption: notice, a new instance, loading, redone work)
    )

    def __post_init__(self) -> None:
        _finite("interruptions_per_h", self.interruptions_per_h, zero=True)
        _finite("restart_s", self.restart_s, zero=True)


@record
class Deadline:
    """`steps` optimiser steps within `seconds` for the least money, egress and interruptions included."""

    steps: int
    seconds: float
    spot: SpotRisk | None = None  # None: on demand only

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise InvalidInput("steps must be at least 1", where="steps", got=self.steps)
        _finite("seconds", self.seconds)


@record
class PerDollar:
    """Most tokens a dollar at no less than that throughput."""

    floor_tokens_per_s: float

    def __post_init__(self) -> None:
        _finite("floor_tokens_per_s", self.floor_tokens_per_s)


MarketObjective = WithinBudget | Reach | Deadline | PerDollar
