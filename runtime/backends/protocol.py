"""The seam between control loop and world. Both calls return at once; only the next observation counts."""

from typing import Protocol

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
