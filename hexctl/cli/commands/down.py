"""`hexctl down`: the end of a run, orderly if its daemon answers, by recorded processes if not."""

import os
import shutil
from pathlib import Path

import click

from hexctl.cli.commands.overrides import send
from hexctl.cli.exits import Progress, say
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import run_options
from hexctl.cli.processes import descendants, end_recorded, wait_gone
from hexctl.cli.render.text import counted
from hexctl.cli.which import choose_run, something_lives
from hexctl.roots import root_words
from planner.record import replace
from runtime.errors import DeadlineError, RunError, UnreachableError
from runtime.paths import short_root
from runtime.runs import RunInfo, read_run, write_run

ORDERLY_S = 90.0


@click.command(
    help=COMMANDS["down"][1]
    + "\n\nA run whose daemon is gone is ended by its recorded processes (pid and start time): exactly those and "
    "what they started. Nothing durable is lost by that."
)
@click.option("--force", is_flag=True, help="Do not ask the daemon; end the recorded processes.")
@run_options
def down(*, force: bool, root: Path, run_id: str | None) -> None:
    run = choose_run(root, run_id)
    if run.state == "ended" and not something_lives(run):
        say(f"run {run.id} has ended already" + (f": {run.ending}" if run.ending else ""))
        return
    if not force and _orderly(root, run):
        ending = read_run(Path(run.folder))
        if ending.state != "ended":
            raise RunError(
                "the daemon went away without ending the run",
                where=run.id,
                hint=f"hexctl down --run {run.id}{root_words(run.folder)}",
            )
        _remove_sockets(ending)
        say(f"run {run.id} has ended: {ending.ending}")
        return
    if not force:
        say(f"run {run.id}: no daemon answers; ending its recorded processes")
    ended = end_recorded(read_run(Path(run.folder)), say=say)
    _write_ending(Path(run.folder), "ended by hexctl down without its daemon")
    say(f"run {run.id} has ended ({counted(ended, 'process', 'processes')})")


def _orderly(root: Path, run: RunInfo) -> bool:
    """Ask the daemon and wait until everything is gone; False when it does not answer."""
    marks = (
        [m for m in (run.daemon, *run.ray_processes) if m is not None]
        if run.ray_owned
        else [m for m in (run.daemon,) if m]
    )
    progress = Progress()
    try:
        left = wait_gone(
            descendants(marks),
            ORDERLY_S,
            begin=lambda: say(send(root, run.id, name="down").message),
            on_left=lambda n: progress(f"waiting for {counted(n, 'process', 'processes')} to end"),
        )
    except UnreachableError:
        return False
    progress.done()
    if left:
        raise DeadlineError(
            f"run {run.id} is still ending", got=", ".join(f"pid {m.pid}" for m in left), expected=f"none after {ORDERLY_S:.0f} s",
            hint=f"hexctl down --run {run.id}{root_words(run.folder)} --force",
        )  # fmt: skip
    return True


def _write_ending(folder: Path, ending: str) -> None:
    """Put the end on record."""
    run = read_run(folder)
    write_run(replace(run, state="ended", ending=run.ending or ending, daemon=None, ray_processes=()))
    _remove_sockets(run)


def _remove_sockets(run: RunInfo) -> None:
    """Remove the run's folder for sockets, where nothing of the run lives any more."""
    short = Path(run.short)
    if short.parent == short_root() and short.is_dir() and short.stat().st_uid == os.getuid():
        shutil.rmtree(short, ignore_errors=True)
