"""Exit codes, and the one place that turns an exception into words and a code."""

import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from enum import IntEnum

import click

from planner.errors import HexError

# A group called without a command; click before 8.2 answers that by itself.
_HELP_WANTED: tuple[type[click.ClickException], ...] = (
    (click.exceptions.NoArgsIsHelpError,) if hasattr(click.exceptions, "NoArgsIsHelpError") else ()
)
_TICK_S = 0.2


class Exit(IntEnum):
    """What the shell sees."""

    FINE = 0
    BUG = 1
    USAGE = 2  # or configuration
    UNREACHABLE = 3
    REFUSED = 4
    INFEASIBLE = 5  # or blocked
    TIMED_OUT = 6
    INTERRUPTED = 130


def run(command: Callable[[], object]) -> int:
    """Call `command` and answer with its exit code; errors go to stderr as words, never as a traceback
    (HEXCTL_DEBUG=1 shows it)."""
    try:
        result = command()
        sys.stdout.flush()
    except click.exceptions.Exit as e:
        return e.exit_code
    except (click.Abort, KeyboardInterrupt):
        _debug()
        say("interrupted")
        return Exit.INTERRUPTED
    except click.ClickException as e:
        _debug()
        if isinstance(e, _HELP_WANTED):
            say(e.format_message())
        else:
            error(e.format_message(), hint=_usage_hint(e))
        return e.exit_code if isinstance(e, click.UsageError) else Exit.USAGE
    except HexError as e:
        _debug()
        text, _, hint = str(e).partition("\nhint: ")
        error(text, hint=hint)
        return int(getattr(e, "exit_code", Exit.USAGE))
    except BrokenPipeError:  # the reader has gone, as `head` does
        _forget_stdout()
        return Exit.FINE
    except OSError as e:
        _debug()
        _forget_stdout()
        error(f"{e.filename or 'standard output'}: {e.strerror}")
        # A path that cannot be used is for its owner to mend; an output that cannot be written lost an answer.
        return Exit.USAGE if e.filename else Exit.BUG
    except Exception as e:  # noqa: BLE001  (the last line before the shell)
        _debug()
        error(f"this is a bug in hexctl: {type(e).__name__}: {e}", hint="HEXCTL_DEBUG=1 shows the traceback")
        return Exit.BUG
    return result if isinstance(result, int) else Exit.FINE


def error(text: str, *, hint: str = "") -> None:
    """An error for people, on stderr."""
    click.echo(f"error: {text}", err=True)
    if hint:
        click.echo(f"hint: {hint}", err=True)


def say(text: str) -> None:
    """Talk, on stderr."""
    click.echo(text, err=True)


class Progress:
    """Talk that changes: on a terminal one line overwritten, elsewhere only the first text."""

    def __init__(self) -> None:
        self._shown = False
        self._told = -math.inf

    def __call__(self, text: str) -> None:
        """Show `text` in place of the last one."""
        if sys.stderr.isatty():
            click.echo(f"\r\x1b[K{text}", err=True, nl=False)
        elif not self._shown:
            say(text)
        self._shown = True

    def tick(self, text: str) -> None:
        """As a call, of what is told over and over: on a terminal, as often as it can be read; elsewhere silence."""
        if sys.stderr.isatty() and time.monotonic() - self._told > _TICK_S:
            self._told = time.monotonic()
            self(text)

    def done(self) -> None:
        """Leave the line."""
        if self._shown and sys.stderr.isatty():
            click.echo("\r\x1b[K", err=True, nl=False)


def _forget_stdout() -> None:
    """What is still buffered goes nowhere: the interpreter would complain of it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _usage_hint(e: click.ClickException) -> str:
    if isinstance(e, click.UsageError) and e.ctx is not None:
        return f"{e.ctx.command_path} --help"
    return ""


def _debug() -> None:
    if os.environ.get("HEXCTL_DEBUG") == "1":
        traceback.print_exc(file=sys.stderr)
