"""Reads that may hang. Each runs in a thread that can be abandoned; one hung card holds up nothing but itself."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Poller(Generic[T]):
    """Repeats one read in a thread of its own. `ask` starts a read unless one is under way; nobody waits for it.

    A thread that hangs in the kernel cannot be killed: it is left alone, and the level says for how long.
    """

    def __init__(self, name: str, read: Callable[[], T], clock: Callable[[], float] = time.monotonic) -> None:
        self._read, self._clock = read, clock
        # One truth under one lock: a read is under way as long as the moment it was asked for is kept.
        self._turn = threading.Condition()
        self._asked_s: float | None = None
        self._ended = False
        self.value: T | None = None
        self.error: Exception | None = None
        self.value_s: float | None = None
        self._thread = threading.Thread(target=self._work, name=f"poll-{name}", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._ended or self._asked_s is not None)
                if self._ended:
                    return
            try:
                value, error = self._read(), None
            except Exception as e:  # noqa: BLE001 - whatever the driver does belongs in the level
                value, error = None, e
            with self._turn:
                self._asked_s = None
                self.error = error
                if error is None:
                    self.value, self.value_s = value, self._clock()
                self._turn.notify_all()

    def ask(self) -> None:
        """Begin a read; nothing happens while one is under way."""
        with self._turn:
            if self._asked_s is None:
                self._asked_s = self._clock()
                self._turn.notify_all()

    def settle(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` seconds for the read under way; True when there is none any more."""
        with self._turn:
            return self._turn.wait_for(lambda: self._asked_s is None, max(0.0, timeout_s))

    def hung_s(self) -> float:
        """Seconds the read under way has taken; 0 when there is none."""
        with self._turn:
            return 0.0 if self._asked_s is None else self._clock() - self._asked_s

    def age_s(self) -> float | None:
        """Age of the value; None when there never was one."""
        with self._turn:
            return None if self.value_s is None else self._clock() - self.value_s

    def close(self) -> None:
        """Let the thread end (unless it hangs)."""
        with self._turn:
            self._ended = True
            self._turn.notify_all()
