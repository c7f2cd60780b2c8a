"""`hexctl profile`: measure this machine, or every node of a cluster, into a calibration file. A child does the measuring."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from hexctl.cli.exits import Exit
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, load, output_option, root_option, set_option
from hexctl.cli.render.profile import profile_text
from runtime.config.calibration import NAME
from runtime.errors import RunError
from runtime.scratch import remove_abandoned

END_S = 90.0  # for the child after Ctrl-C, which it gets too: a turn ends, a checkpoint is written, an engine is closed
_SAID = (2, 3, 4, 5, 6, 130)  # exit codes with which the child has told what and why


@click.command(
    help=COMMANDS["profile"][1]
    + "\n\nGPUs that are free are measured; without any the CPU, and the paced devices of CONFIG (a file or the name of "
    "a shipped one; default: local). With a CONFIG of GPUs or CPUs the model, engine and trainer of its run are measured on this "
    "machine, so that plans predict its steps. With HEXCTL_RAY_ADDRESS set every node of that Ray cluster is measured. Less than "
    "three minutes a node, more with a large model (--dry-run says); Ctrl-C writes nothing."
)
@click.argument("config", metavar="[CONFIG]", required=False)
@click.option("--quick", is_flag=True, help="Fewer points and less time for each: under a minute.")
@click.option("--dry-run", is_flag=True, help="Only say what would be measured, and about how long it takes.")
@click.option(
    "--out",
    "-f",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Calibration file to write; what it has of other kinds stays. Default: calibration.json in the folder of runs.",
)
@root_option
@set_option
@output_option
def profile(
    *,
    config: str | None,
    quick: bool,
    dry_run: bool,
    out: Path | None,
    root: Path | None,
    settings: tuple[str, ...],
    output: str,
) -> int:
    from hexctl.cli.extras import need_run_extra

    need_run_extra("hexctl profile")
    words: list[str] = []
    folder = root or Path("runs")
    if config is not None or not _has_cards():
        from hexctl.cli.commands.up import DEFAULT_CONFIG
        from hexctl.cli.launch import settled

        loaded = load(config or DEFAULT_CONFIG, settings)
        folder = root or loaded.config.run.root
        words += ["--config", str(settled(loaded, settings)), *(["--cpu"] if config is None else [])]
    elif settings:
        raise click.UsageError("--set changes a configuration: name one")
    file = out or folder / NAME
    words += ["--out", str(file), *(["--quick"] if quick else []), *(["--dry-run"] if dry_run else [])]
    try:
        document = _measured([sys.executable, "-m", "runtime.profile", *words])
    finally:
        for parent in (file.parent, None):
            remove_abandoned(parent)  # what a child that ended at once had there
    answer(output, document, profile_text(document))
    return Exit.FINE


def _has_cards() -> bool:
    import os

    from hexctl.cli.probe import visible

    return bool(os.environ.get("HEXCTL_RAY_ADDRESS")) or visible() > 0


def _measured(command: list[str]) -> dict[str, Any]:
    """The child's document. Its talk goes to our stderr as it comes."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    try:
        out, _ = child.communicate()
    except BaseException:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(END_S)  # it has the same Ctrl-C
        raise
    finally:
        child.kill()  # it may be here still after END_S, or after a second Ctrl-C of ours alone
        child.wait()
    if child.returncode in _SAID:
        raise click.exceptions.Exit(child.returncode)
    if not out.strip():
        raise RunError("the profile failed", got=f"exit code {child.returncode}", hint="its last words are above")
    document: dict[str, Any] = json.loads(out)
    return document
