"""Asking actors without waiting, and telling a positive absence from silence.

ActorDiedError says that Ray knows the actor to be dead; anything else (no answer, unavailable, restarting) is silence.
"""

import math
import time
from typing import Any, Literal, TypeVar

from planner.errors import HexError
from planner.record import record
from runtime.errors import DeadlineError, RunError

T = TypeVar("T")


@record
class Answer:
    """What is known of the last question to one actor."""

    state: Literal["never", "answered", "dead", "failed"]
    value: Any = None
    at_s: float | None = None  # monotonic seconds of the last answer or of the death
    reason: str = ""


def why_dead(error: BaseException) -> str:
    """Ray's reason for a death, one line for people."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = next((line for line in lines if "exit detail" in line or "exit type" in line), lines[0] if lines else "")
    for known, words in (
        ("INTENDED", "ended by request"),
        ("connection error code 2", "its process ended without notice (a signal or a crash)"),
    ):
        if known in cause:
            return words
    creation = next((line for line in lines if "Error" in line and "creation" not in line), "")
    return (creation or cause)[:300]


class Question:
    """A repeated question to one actor: at most one outstanding, never waited for."""

    def __init__(self, ray: Any, handle: Any, method: str, *, every_s: float) -> None:
        self._ray, self._handle, self._method, self.every_s = ray, handle, method, every_s
        self._ref: Any = None
        self._asked_s = float("-inf")
        self.answer = Answer(state="never")

    def due_s(self) -> float:
        """Monotonic seconds when it is to be asked again; infinity while it is being asked, or when there is nobody to ask."""
        return math.inf if self._ref is not None or self.answer.state == "dead" else self._asked_s + self.every_s

    def ask(self, now_s: float, ahead_s: float = 0.0) -> Any:
        """Ask again when it is time, or will be within `ahead_s`; returns the outstanding reference, or None."""
        if self.due_s() <= now_s + ahead_s:
            self._asked_s = now_s
            try:
                self._ref = getattr(self._handle, self._method).remote()
            except self._ray.exceptions.RayError as e:
                self._settle(e, now_s)
        return self._ref

    def take(self, now_s: float) -> None:
        """Take the answer that has arrived."""
        ref, self._ref = self._ref, None
        try:
            value = self._ray.get(ref, timeout=1.0)
        except Exception as e:  # noqa: BLE001 - whatever the actor raised becomes its level
            self._settle(e, now_s)
        else:
            self.answer = Answer(state="answered", value=value, at_s=now_s)

    def _settle(self, error: BaseException, now_s: float) -> None:
        if isinstance(error, self._ray.exceptions.ActorDiedError):
            self.answer = Answer(state="dead", value=self.answer.value, at_s=now_s, reason=why_dead(error))
        elif isinstance(error, self._ray.exceptions.ActorUnavailableError | self._ray.exceptions.GetTimeoutError):
            return  # silence: the last answer ages
        else:
            self.answer = Answer(
                state="failed", value=self.answer.value, at_s=self.answer.at_s, reason=str(unwrap(error))
            )


def unwrap(error: BaseException) -> BaseException:
    """The error that the actor raised, out of Ray's wrapping."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def call(ray: Any, ref: Any, *, what: str, deadline_s: float) -> Any:
    """Wait for one answer. DeadlineError naming `what`; the actor's own HexError as it was raised; else RunError."""
    try:
        return ray.get(ref, timeout=deadline_s)
    except ray.exceptions.GetTimeoutError as e:
        raise DeadlineError(f"no answer: {what}", got=f"{deadline_s:.0f} s") from e
    except ray.exceptions.RayTaskError as e:
        cause = unwrap(e)
        if isinstance(cause, HexError):
            raise cause from None
        raise RunError(f"{what} failed", got=f"{type(cause).__name__}: {cause}") from e
    except ray.exceptions.RayError as e:
        raise RunError(f"{what} failed", got=why_dead(e)) from e


def age(answer: Answer, now_s: float | None = None) -> float | None:
    """Seconds since the last answer; None when there never was one."""
    if answer.at_s is None:
        return None
    return max(0.0, (time.monotonic() if now_s is None else now_s) - answer.at_s)
