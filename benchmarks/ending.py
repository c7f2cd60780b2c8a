"""A benchmark that is told to end clears up first: Python by itself dies of SIGTERM without a `finally`, and the daemon it
started, in a session of its own, would go on."""

import signal
from types import FrameType

ENDINGS = (signal.SIGTERM, signal.SIGHUP)


def end_when_told() -> None:
    """From now on SIGTERM and SIGHUP raise SystemExit(128 + number) in the main thread. Only the first does: a second one
    must not keep the first from clearing up."""

    def end(number: int, frame: FrameType | None) -> None:
        for n in ENDINGS:
            signal.signal(n, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for n in ENDINGS:
        signal.signal(n, end)
