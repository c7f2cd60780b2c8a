"""The seam between control loop and world. Both calls return at once; only the next observation counts."""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

from runtime.core.action import Step
from runtime.core.observation import Observation


class Backend(Protocol):
    """Ray or simulated."""

    def observe(self, now_s: float) -> Observation:
        """The newest level, without waiting."""
        ...

    def apply(self, step: Step) -> None:
        """Begin `step` if it is not under way or done; never raises for what the world does, never waits."""
        ...

    def finish(self, deadline_s: float) -> None:
        """End of the run: suspend samples to the ledger, stop actors, stop Ray if this run started it."""
        ...

    def close(self) -> None:
        """Let go of the run without ending it: the daemon leaves, the actors go on. Also after `finish`; safe to repeat."""
        ...


@runtime_checkable
class Allotting(Protocol):
    """A backend whose replicas can be told how many samples to decode at once."""

    def allot(self, slots: Mapping[str, int]) -> None:
        """By the replica's name, as the plan in force has it; said at every look, and only the newest counts. Returns at once."""
        ...


@runtime_checkable
class Attentive(Protocol):
    """A backend that speaks up by itself, and so may be looked at less often while nothing is on its way."""

    def on_news(self, tell: Callable[[], None]) -> None:
        """`tell` is called, from any thread, when something happened that must not wait for the next look: a death, a new
        phase, a body that came or went."""
        ...

    def rest(self, calm: bool) -> None:
        """While it is calm figures once a second are enough; deaths are noticed as fast as ever."""
        ...


@runtime_checkable
class Gathering(Protocol):
    """A backend that observes and acts before everything that carries the run is there."""

    def wait_built(self) -> None:
        """Block until it is. Raises what kept it from that, after the run's beginnings are gone."""
        ...
