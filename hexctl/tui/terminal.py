"""The terminal: what it can show, and that it is left as it was found, whatever ends us."""

import os
import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Mouse off (all the modes Textual turns on), bracketed paste off, focus reports off, in-band resize off, kitty keys off,
# line wrap on, cursor on, attributes off, normal screen.
RESTORE = "\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?2004l\x1b[?1004l\x1b[?2048l\x1b[<u\x1b[?7h\x1b[?25h\x1b[0m\x1b[?1049l"
GRACE_S = 2.0
PLAIN_TERMS = ("linux", "dumb", "vt100", "vt220", "ansi")


def wants_ascii(environment: Mapping[str, str]) -> bool:
    """Whether only ASCII may be drawn: a locale that is not UTF-8, or a terminal known for lacking glyphs.

    An unset locale counts as UTF-8 (containers have none, their terminals do). Python itself sets LC_CTYPE to C.UTF-8
    when it finds LANG=C, so that value does not count against an explicit LANG of C.
    """
    if environment.get("TERM", "") in PLAIN_TERMS:
        return True
    ctype = environment.get("LC_CTYPE", "")
    if ctype.upper() in ("C.UTF-8", "C.UTF8", "UTF-8"):
        ctype = ""
    chosen = environment.get("LC_ALL") or ctype or environment.get("LANG") or "C.UTF-8"
    return "UTF8" not in chosen.upper().replace("-", "")


class Guard:
    """SIGTERM and SIGHUP end the application cleanly; if it cannot end (a stalled or vanished terminal blocks it), the
    terminal is restored from outside after a grace period and the process ends."""

    def __init__(self, fileno: int) -> None:
        self._fileno = fileno
        self._before: list[Any] | None = None
        self.received: int | None = None  # the signal that asked us to end

    @contextmanager
    def watching(self, leave: Callable[[], None]) -> Iterator[None]:
        """While inside, the signals call `leave` from the main thread; afterwards handlers are as before."""
        try:
            self._before = termios.tcgetattr(self._fileno)
        except (termios.error, OSError):
            self._before = None

        def on_signal(number: int, frame: FrameType | None) -> None:
            del frame
            first = self.received is None
            self.received = self.received or number
            if first:
                watchdog = threading.Timer(GRACE_S, self._end_hard)
                watchdog.daemon = True
                watchdog.start()
                leave()

        watched = (signal.SIGTERM, signal.SIGHUP)
        old = {number: signal.signal(number, on_signal) for number in watched}
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def restore(self) -> None:
        """Write the restoring sequences and the line discipline straight to the terminal; never blocks."""
        try:
            os.set_blocking(self._fileno, False)
            os.write(self._fileno, RESTORE.encode())
            os.set_blocking(self._fileno, True)
            if self._before is not None:
                termios.tcsetattr(self._fileno, termios.TCSANOW, self._before)
        except (OSError, termios.error):
            return  # the terminal is gone

    def _end_hard(self) -> None:
        self.restore()
        os._exit(128 + (self.received or signal.SIGTERM))


def drawing_fileno() -> int:
    """The descriptor that Textual draws on."""
    stream = sys.__stderr__
    return stream.fileno() if stream is not None else 2
