"""`hexctl daemon`: becomes the daemon, so that signals go straight to it."""

import os
import sys
from pathlib import Path

import click

from hexctl.cli.extras import need_run_extra
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import load, seconds, set_option
from hexctl.cli.which import choose_run


@click.command(
    help=COMMANDS["daemon"][1]
    + "\n\nCtrl-C ends the run; a lost terminal or a kill ends only the daemon, and `hexctl daemon --run ID` "
    "takes the run over again."
)
@click.argument("config", metavar="[CONFIG]", required=False)
@click.option("--run", "run_id", metavar="ID", help="Take over that run.")
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help="Folder that holds run folders; default: run.root of the configuration.",
)
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
    from hexctl.cli.launch import DaemonOrder

    if config is None and run_id is None:
        raise click.UsageError("give a CONFIG, or --run ID to take a run over")
    for_s = seconds(duration, where="--for") if duration is not None else None
    path = None
    if config is not None:
        path = load(config, settings).path  # a fault is told here, before anything starts
    if run_id is not None:
        run_id = choose_run(root or Path("runs"), run_id).id
    need_run_extra("hexctl daemon")
    order = DaemonOrder(config=path, run_id=run_id, root=root, steps=steps, for_s=for_s, settings=settings)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, order.argv)
