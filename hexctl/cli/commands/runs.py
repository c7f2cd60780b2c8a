"""`hexctl runs`: the run folders below the root."""

from datetime import datetime
from pathlib import Path

import click

from hexctl.cli.exits import say
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, output_option
from hexctl.cli.render.text import table
from runtime.runs import RunInfo, alive, look_at_runs


@click.command(help=COMMANDS["runs"][1])
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder that holds run folders.",
)
@output_option
def runs(root: Path, output: str) -> None:
    found, unreadable = look_at_runs(root)
    rows = [(r.id, standing(r), r.label, _when(r.created_at_s), r.ending, r.config_path) for r in found]
    text = table(("RUN", "STATE", "FLEET", "STARTED", "ENDING", "CONFIG"), rows) if rows else f"no runs in {root}"
    answer(output, [_document(r) for r in found], text)
    for fault in unreadable.values():
        say(f"left out: {fault.where}: {fault.what}, got {fault.got!r}")


def standing(run: RunInfo) -> str:
    """How a run stands: live, without daemon, dead (nothing of it lives, yet it never ended) or ended."""
    if run.state == "ended":
        return "ended"
    if alive(run.daemon):
        return "live"
    return "without daemon" if any(alive(p) for p in run.ray_processes) else "dead"


def _when(at_s: float) -> str:
    return datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M")


def _document(run: RunInfo) -> dict[str, object]:
    return {
        "id": run.id, "name": run.name, "state": run.state, "standing": standing(run), "label": run.label, "folder": run.folder,
        "config_path": run.config_path, "config_sha256": run.config_sha256, "created_at_s": run.created_at_s,
        "ending": run.ending, "daemon_pid": run.daemon.pid if run.daemon is not None else None,
        "hexctl_version": run.hexctl_version,
    }  # fmt: skip
