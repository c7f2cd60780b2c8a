"""The command `hexctl`. A command's module is imported when that command is called: `--help` stays light."""

import importlib
import os
import sys
from collections.abc import Mapping, Sequence

import click

from hexctl.cli import exits

# name: (module below hexctl.cli.commands, what it does)
COMMANDS: Mapping[str, tuple[str, str]] = {
    "up": ("up", "Start a run, or come back to it, and open the dashboard."),
    "daemon": ("daemon", "Run in the foreground without a dashboard; the log goes to stderr."),
    "attach": ("up", "Open the dashboard of a run that lives."),
    "down": ("down", "End a run: suspend its samples, stop its processes."),
    "runs": ("runs", "List the runs."),
    "plan": ("plan", "Plan offline: who generates, who trains, how fast, why."),
    "simulate": ("simulate", "Simulate a whole run of a plan, in virtual time."),
    "status": ("status", "Show the figures of a run."),
    "gpus": ("status", "List the devices of a run."),
    "events": ("events", "Show what happened in a run."),
    "cordon": ("overrides", "Give a device no new work and drain it."),
    "uncordon": ("overrides", "Let the planner use a device again."),
    "drain": ("overrides", "Move what runs on a device off it, as before it goes away."),
    "pin": ("overrides", "Fix the role of a device, whatever the planner thinks."),
    "unpin": ("overrides", "Let the planner decide about a device again."),
    "replan": ("overrides", "Plan now."),
    "approve": ("overrides", "Put a proposed plan in force."),
    "reject": ("overrides", "Drop a proposed plan."),
    "wait": ("wait", "Wait until a figure of a run is as wished."),
    "export": ("export", "Write a run's weights as a Hugging Face folder."),
    "config": ("config", "Look at configurations."),
    "profile": ("profile", "Measure this machine for the planner: kernels, links, engine and trainer."),
    "doctor": ("doctor", "Look at this machine: what is there, missing, left behind."),
}


class LazyGroup(click.Group):
    """Knows its commands by name and summary, and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"hexctl.cli.commands.{COMMANDS[cmd_name][0]}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as e:
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1) if args else []
            text = f"No such command {args[0]!r}." + (f" Did you mean {close[0]}?" if close else "")
            raise click.UsageError(text, ctx) from e

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(None, "--version", package_name="hexctl", message="%(prog)s %(version)s")
def cli() -> None:
    """The control plane for reinforcement-learning post-training of language models on mixed GPUs.

    stdout is data (--output json where it reads), stderr is talk. Exit codes: 0 fine, 1 our bug, 2 usage or
    configuration, 3 daemon unreachable, 4 refused, 5 infeasible or blocked, 6 timed out, 130 interrupted.
    """


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; answers with the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if "_HEXCTL_COMPLETE" in os.environ:
        cli.main(args=args, prog_name="hexctl")  # click's shell completion; exits by itself

    def command() -> object:
        # Not `cli.main`: it would answer a closed pipe with our exit code for bugs.
        with cli.make_context("hexctl", args) as context:
            return cli.invoke(context)

    return exits.run(command)
