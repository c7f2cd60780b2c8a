"""When a search ends early: at its time, or at Ctrl-C, with the best so far."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hexctl.cli.exits import say


class Stop:
    """Says whether to stop. Monotonic clock."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.interrupted = False
        self.again()

    def again(self) -> None:
        """As much time for the next search; an interrupt holds for that too."""
        self._end = time.monotonic() + self._limit_s

    def __call__(self) -> bool:
        """Whether time is up or Ctrl-C was pressed."""
        return self.interrupted or time.monotonic() > self._end


@contextmanager
def stop_after(limit_s: float) -> Iterator[Stop]:
    """A `Stop` that the first Ctrl-C sets; the second one interrupts as ever."""
    stop = Stop(limit_s)

    def on_interrupt(_signal: int, _frame: FrameType | None) -> None:
        if stop.interrupted:
            raise KeyboardInterrupt
        stop.interrupted = True
        say("stopping: the best so far follows; Ctrl-C again gives up")

    try:
        before = signal.signal(signal.SIGINT, on_interrupt)
    except ValueError:  # not the main thread, which alone takes signals
        yield stop
        return
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
