"""`hexctl up` and `hexctl attach`: the ways into the dashboard."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hexctl.cli.exits import say
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import load, root_option, run_options, set_option
from hexctl.cli.which import choose_run, explained
from hexctl.roots import root_words
from runtime.errors import UnreachableError
from runtime.runs import RunInfo, list_runs

if TYPE_CHECKING:
    from runtime.config.load import LoadedConfig

DEFAULT_CONFIG = "local"
# The default configuration declares a paced fleet; where there are GPUs the free ones are taken instead.
SETTINGS_WITH_GPUS = ("fleet.source=auto",)
_theme = click.option("--theme", metavar="NAME", help="Colours of the dashboard.")


@click.command(
    help=COMMANDS["up"][1]
    + "\n\nCONFIG is a file or the name of a shipped one. Without it the free GPUs of this machine are taken; "
    "where there are none, paced devices on its CPU. A live run of the same configuration is attached to."
)
@click.argument("config", metavar="[CONFIG]", required=False)
@click.option("--run", "run_id", metavar="ID", help="Come back to that run, taking it over if its daemon is gone.")
@root_option
@click.option("--detach", "-d", is_flag=True, help="No dashboard: wait until the run works, print its id.")
@_theme
@set_option
def up(
    *,
    config: str | None,
    run_id: str | None,
    root: Path | None,
    detach: bool,
    theme: str | None,
    settings: tuple[str, ...],
) -> int:
    from hexctl.cli.launch import DaemonOrder, answers, settled, start_detached

    if run_id is not None:
        if config is not None or settings:
            raise click.UsageError(
                "--run comes back to a run, which has its own configuration: leave CONFIG and --set out"
            )
        where = root or Path("runs")
        run = choose_run(where, run_id)
        if not answers(run):
            say(f"run {run.id}: no daemon; starting one that takes it over")
            run = start_detached(DaemonOrder(run_id=run.id, root=where, detached=True).argv, where, say=say)
        return _enter(run, detach, theme)
    if config is None:
        from hexctl.cli.probe import visible

        config = DEFAULT_CONFIG
        settings = (*SETTINGS_WITH_GPUS, *settings) if visible() else settings
    loaded = load(config, settings, to_run=True)
    where = root or loaded.config.run.root
    live = _live_with(loaded, where)
    if live is not None and answers(live):
        say(f"attaching to run {live.id}")
        return _enter(live, detach, theme)
    order = DaemonOrder(config=settled(loaded, settings), root=where, detached=True)
    return _enter(start_detached(order.argv, where, say=say), detach, theme)


@click.command(help=COMMANDS["attach"][1])
@run_options
@_theme
def attach(*, run_id: str | None, root: Path, theme: str | None) -> int:
    from hexctl.cli.launch import answers

    run = choose_run(root, run_id)
    if not answers(run):
        raise explained(UnreachableError("no daemon answers", where=str(run.paths.api_socket)), run)
    return _dashboard(run, theme)


def _live_with(loaded: "LoadedConfig", root: Path) -> RunInfo | None:
    """The newest live run of the same configuration."""
    return next((r for r in reversed(list_runs(root)) if r.state == "live" and r.config_sha256 == loaded.sha256), None)


def _enter(run: RunInfo, detach: bool, theme: str | None) -> int:
    if not detach and sys.stdin.isatty() and sys.stdout.isatty():
        return _dashboard(run, theme)
    from hexctl.cli.launch import await_running

    await_running(run, say=say)
    click.echo(run.id)
    root = root_words(run.folder)
    say(f"run {run.id} goes on by itself: hexctl attach{root}, hexctl status{root}, hexctl down{root}")
    return 0


def _dashboard(run: RunInfo, theme: str | None) -> int:
    from hexctl.tui.app import run_tui

    return run_tui(run.paths.api_socket, run.id, theme)
