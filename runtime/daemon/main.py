"""`python -m runtime.daemon CONFIG`: arguments, log, exit code. Standard output stays empty."""

import argparse
import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import HexError
from planner.units import parse_seconds
from runtime.daemon.startup import OpenRun, Options, open_run
from runtime.errors import RunError

if TYPE_CHECKING:
    from runtime.daemon.worlds import World

logger = logging.getLogger("hexctl")


def parse(argv: Sequence[str] | None) -> Options:
    """Options from the command line; argparse ends with 2 when they do not decode."""
    p = argparse.ArgumentParser(prog="python -m runtime.daemon", description="hexctl's daemon, in the foreground")
    p.add_argument("config", nargs="?", type=Path, help="configuration file; may be left out with --run")
    p.add_argument("--run", help="adopt this run (or make it, when there is none of that id)")
    p.add_argument("--root", type=Path, help="folder of run folders; default: run.root of the configuration")
    p.add_argument("--steps", type=int, help="end after that many optimiser steps of the run")
    p.add_argument("--for", dest="for_s", type=_seconds, help='end after that time, such as "5m"')
    p.add_argument("--detached", action="store_true", help="log to logs/daemon.log of the run folder")
    given = p.parse_args(argv)
    if given.config is None and given.run is None:
        p.error("a configuration or --run ID is needed")
    if given.steps is not None and given.steps < 1:
        p.error(f"--steps: got {given.steps}, expected at least 1")
    return Options(
        config=given.config,
        run=given.run,
        root=given.root,
        steps=given.steps,
        for_s=given.for_s,
        detached=given.detached,
    )


def _seconds(text: str) -> float:
    try:
        seconds = parse_seconds(text)
    except HexError as e:
        raise argparse.ArgumentTypeError(str(e)) from e
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected more than 0 s")
    return seconds


def main(argv: Sequence[str] | None = None, *, world: "World | None" = None) -> int:
    """Run the daemon; returns the exit code of the command line. `world`: a `runtime.daemon.worlds.World`, default Ray."""
    options = parse(argv)
    _log_to_stderr()
    try:
        return _serve(options, world)
    except HexError as e:
        return _fail(e)
    except KeyboardInterrupt:
        return 130


def _serve(options: Options, world: "World | None") -> int:
    from runtime.daemon.service import Service
    from runtime.daemon.worlds import world_of

    opened = open_run(options)
    logger.info("run %s in %s", opened.info.id, opened.paths.folder)
    terminal = _Terminal()
    try:
        if options.detached:
            terminal.leave_for(opened)
        outcome = asyncio.run(Service(opened, options, world or world_of(opened.config)).run(on_serving=terminal.close))
    except HexError as e:
        terminal.say(f"error: {e}")
        raise
    finally:
        opened.lock.release()
    return outcome.exit_code


class _Terminal:
    """The standard error the daemon was started with, while a detached one still has something to say there."""

    def __init__(self) -> None:
        self._fd: int | None = None

    def leave_for(self, opened: OpenRun) -> None:
        """From now on standard output and error are the run's daemon.log."""
        path = opened.paths.logs / "daemon.log"
        try:
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as e:
            raise RunError("cannot open the daemon's log", where=str(path), got=e.strerror) from e
        self._fd = os.dup(2)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)

    def say(self, message: str) -> None:
        """A last word to whoever started a detached daemon."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                os.write(self._fd, (message + "\n").encode())

    def close(self) -> None:
        """The daemon serves: who started it reads the API now."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname).1s %(message)s", datefmt="%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for quiet in ("uvicorn", "asyncio", "httpx"):
        logging.getLogger(quiet).setLevel(logging.WARNING)


def _fail(error: HexError) -> int:
    sys.stderr.write(f"error: {error}\n")
    return error.exit_code if isinstance(error, RunError) else 2
