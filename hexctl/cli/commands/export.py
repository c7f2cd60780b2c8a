"""`hexctl export`: weights as a Hugging Face folder, written by a child so that torch stays out of this process."""

import subprocess
import sys
from pathlib import Path

import click

from hexctl.cli.main import COMMANDS
from hexctl.cli.options import run_options
from hexctl.cli.which import choose_run
from runtime.errors import ConfigError, RefusedError, RunError


@click.command(help=COMMANDS["export"][1] + " DIR is made, or must be empty.")
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@run_options
def export(folder: Path, root: Path, run_id: str | None) -> None:
    from hexctl.cli.extras import need_run_extra

    run = choose_run(root, run_id)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise RefusedError("not an empty folder", where=str(folder), hint="name a new one; nothing is overwritten")
    except OSError as e:
        raise ConfigError("cannot look into the folder", where=str(folder), got=e.strerror) from e
    if run.label == "simulated":
        raise RefusedError("a simulated run has no weights", where=run.id, hint="hexctl export is for runs that train")
    need_run_extra("hexctl export")
    command = [sys.executable, "-m", "runtime.rl.export", "--run-folder", run.folder, "--out", str(folder.resolve())]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr.fileno(), stderr=subprocess.PIPE, text=True, check=False
    )
    click.echo(done.stderr, err=True, nl=False)
    if done.returncode == 0:
        click.echo(str(folder))
        return
    said_why = any(x.startswith("error: ") for x in done.stderr.splitlines())
    if done.returncode > 0 and said_why:
        raise click.exceptions.Exit(done.returncode)
    raise RunError("the export failed", where=str(folder), got=f"exit code {done.returncode}")
