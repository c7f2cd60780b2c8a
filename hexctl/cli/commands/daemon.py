"""`hexctl daemon`: becomes the daemon, so that signals go straight to it."""

import os
import re
import sys
from pathlib import Path

import click

from hexctl.cli.extras import need_run_extra
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import load, root_option, seconds, set_option
from hexctl.cli.which import choose_run
from runtime.errors import ConfigError
from runtime.runs import list_runs


@click.command(
    help=COMMANDS["daemon"][1]
    + "\n\nCtrl-C ends the run; a lost terminal or a kill ends only the daemon, and `hexctl daemon --run ID` "
    "takes the run over again."
)
@click.argument("config", metavar="[CONFIG]", required=False)
@click.option("--run", "run_id", metavar="ID", help="Take over that run, or with a CONFIG give a new one that id.")
@root_option
@click.option("--steps", type=click.IntRange(min=1), help="End the run after that many optimiser steps.")
@click.option("--for", "duration", metavar="DURATION", help="End the run after that long, such as 5m.")
@set_option
def daemon(
    *,
    config: str | None,
    run_id: str | None,
    root: Path | None,
    steps: int | None,
    duration: str | None,
    settings: tuple[str, ...],
) -> None:
    from hexctl.cli.launch import DaemonOrder, settled

    if config is None and run_id is None:
        raise click.UsageError("give a CONFIG, or --run ID to take a run over")
    for_s = seconds(duration, where="--for") if duration is not None else None
    path = None
    if config is not None:
        path = settled(load(config, settings, to_run=True), settings)  # a fault is told here, before anything starts
    elif settings:
        raise click.UsageError("--set changes a CONFIG; a run that is taken over has its own")
    if run_id is not None:
        run_id = _run_id(root or Path("runs"), run_id, new=config is not None)
    need_run_extra("hexctl daemon")
    order = DaemonOrder(config=path, run_id=run_id, root=root, steps=steps, for_s=for_s)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, order.argv)


def _run_id(root: Path, text: str, *, new: bool) -> str:
    """The id of the run meant; with a configuration a new one may be named."""
    if not new or any(r.id == text for r in list_runs(root)):
        return choose_run(root, text).id
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", text):
        raise ConfigError("not a run id", where="--run", got=text, expected="lower-case letters, digits and dashes")
    return text
