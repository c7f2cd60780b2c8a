"""How the trainer reaches flow: patiently, and never beyond a deadline."""

import logging
import time
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

from planner.record import record
from runtime.errors import DeadlineError, LedgerError, RefusedError, RunError
from runtime.rl.types import Applied, NextBatch, TrainBatch, TrainerHello, TrainerWelcome, WeightsRef

T = TypeVar("T")
_log = logging.getLogger(__name__)


class TrainerFlow(Protocol):
    """Flow as the trainer sees it. Each call may raise RunError when flow does not answer (UnreachableError,
    DeadlineError) and RefusedError or LedgerError when it does and says no. All may be repeated."""

    def hello(self, hello: TrainerHello) -> TrainerWelcome: ...

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        """May wait about a second for a batch before it says "wait"."""
        ...

    def applied(self, applied: Applied) -> None: ...

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None: ...


class PendingBatch(Protocol):
    """A question asked ahead."""

    def taken(self) -> TrainBatch | None:
        """The batch if it has come; None when it has not, when there was none, or when flow did not answer. Never waits,
        never raises: `next_batch` gives the same batch, or says what is wrong."""
        ...


@runtime_checkable
class AsksAhead(Protocol):
    """A flow that can be asked for the next batch while the weights of the step before are published."""

    def ask_ahead(self, trainer: str, epoch: int) -> PendingBatch:
        """Returns at once and never raises. Only a batch is an answer: orders are given to `next_batch`."""
        ...


@record
class RetryTiming:
    """How long flow may stay away. It is restarted by itself, from its ledger, which takes seconds."""

    first_s: float = 0.1  # before the second try; doubled up to `most_s`
    most_s: float = 2.0
    deadline_s: float = 120.0  # of one call, tries and rests together


class Interrupted(Exception):
    """`stop` was called while the trainer waited for flow."""


def patiently(
    call: Callable[[], T],
    *,
    what: str,
    timing: RetryTiming,
    wait: Callable[[float], bool],
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """The answer of `call`, tried again while flow does not answer.

    `wait(seconds)` rests and returns True when the trainer is to stop, which raises Interrupted. RefusedError and
    LedgerError are answers and pass through. DeadlineError naming `what` when the time is over.
    """
    started, rest = clock(), timing.first_s
    while True:
        try:
            return call()
        except (RefusedError, LedgerError):
            raise
        except RunError as e:
            waited = clock() - started
            if waited + rest > timing.deadline_s:
                raise DeadlineError(f"flow did not answer: {what}", got=f"{waited:.0f} s", hint=str(e)) from e
            _log.warning("flow did not answer %s, trying again in %.1f s: %s", what, rest, e)
        if wait(rest):
            raise Interrupted
        rest = min(2 * rest, timing.most_s)
