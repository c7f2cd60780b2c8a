"""Errors of the runtime: one small tree, each with the exit code of the command line.

HexError                 (planner.errors)
 └─ RunError             1, our bug or the world's
     ├─ ConfigError      2, a file, flag or data row that does not decode
     ├─ FleetError       2, the fleet asked for is not here (no library, no free card, foreign process)
     ├─ UnreachableError 3, no daemon answers
     ├─ RefusedError     4, the daemon says no (stale revision, second daemon, other user)
     ├─ InfeasibleError  5, no plan, or blocked
     ├─ DeadlineError    6, a wait ran out; says what it waited for
     ├─ WeightsError     1, a generation whose hash does not match
     └─ LedgerError      1, the ledger cannot keep its promise (disk full, EIO)
"""

from planner.errors import HexError

LINE_CHARS = 200  # of what others' exceptions say


class RunError(HexError):
    """Something went wrong while running."""

    exit_code = 1


class ConfigError(RunError):
    """Configuration, flags or data that do not decode."""

    exit_code = 2


class FleetError(RunError):
    """The fleet asked for is not here."""

    exit_code = 2


class UnreachableError(RunError):
    """No daemon answers."""

    exit_code = 3


class RefusedError(RunError):
    """The daemon or a lock says no."""

    exit_code = 4


class InfeasibleError(RunError):
    """No plan exists, or the migration is blocked."""

    exit_code = 5


class DeadlineError(RunError):
    """A wait ran out."""

    exit_code = 6


class WeightsError(RunError):
    """A weight generation that is not what its manifest says."""


class LedgerError(RunError):
    """The ledger cannot keep its promise; nothing was acknowledged."""


def first_line(error: BaseException) -> str:
    """What it says, for a note; what it is called where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:LINE_CHARS]
