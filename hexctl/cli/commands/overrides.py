"""Commands to a running daemon: overrides, re-planning and consent."""

import getpass
import uuid
from pathlib import Path
from typing import Any

import click

from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, output_option, run_options
from hexctl.cli.which import connected
from runtime.api.wire import Command, CommandResult
from runtime.errors import RefusedError

_reason = click.option("--reason", default="", help="Why; shown with the override.")
_force = click.option("--force", is_flag=True, help="Even if it leaves no rollout or no trainer.")
_device = click.argument("device")
_rev = click.argument("rev", type=click.IntRange(min=0))


def send(root: Path, run_id: str | None, **fields: Any) -> CommandResult:
    """Send one command; RefusedError when the daemon says no."""
    with connected(root, run_id) as (_, client):
        result = client.command(Command(key=uuid.uuid4().hex, author=_author(), **fields))
    if not result.accepted:
        raise RefusedError(result.message)
    return result


def _author() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid without a name
        return ""


def _send_and_answer(output: str, root: Path, run_id: str | None, **fields: Any) -> None:
    result = send(root, run_id, **fields)
    document = {
        "accepted": result.accepted, "message": result.message, "override_rev": result.override_rev, "plan_rev": result.plan_rev,
    }  # fmt: skip
    answer(output, document, result.message)


@click.command(help=COMMANDS["cordon"][1])
@_device
@_reason
@_force
@run_options
@output_option
def cordon(device: str, **options: Any) -> None:
    _send_and_answer(name="cordon", device=device, **options)


@click.command(help=COMMANDS["uncordon"][1])
@_device
@run_options
@output_option
def uncordon(device: str, **options: Any) -> None:
    _send_and_answer(name="uncordon", device=device, **options)


@click.command(help=COMMANDS["drain"][1])
@_device
@_reason
@_force
@run_options
@output_option
def drain(device: str, **options: Any) -> None:
    _send_and_answer(name="drain", device=device, **options)


@click.command(help=COMMANDS["pin"][1])
@_device
@click.argument("role", type=click.Choice(["train", "rollout", "idle"]))
@_reason
@_force
@run_options
@output_option
def pin(device: str, role: str, **options: Any) -> None:
    _send_and_answer(name="pin", device=device, role=role, **options)


@click.command(help=COMMANDS["unpin"][1])
@_device
@run_options
@output_option
def unpin(device: str, **options: Any) -> None:
    _send_and_answer(name="unpin", device=device, **options)


@click.command(help=COMMANDS["replan"][1])
@_reason
@run_options
@output_option
def replan(**options: Any) -> None:
    _send_and_answer(name="replan", **options)


@click.command(help=COMMANDS["approve"][1] + " REV is the revision you saw; an old one is refused.")
@_rev
@run_options
@output_option
def approve(rev: int, **options: Any) -> None:
    _send_and_answer(name="approve", plan_rev=rev, **options)


@click.command(help=COMMANDS["reject"][1] + " REV is the revision you saw; an old one is refused.")
@_rev
@_reason
@run_options
@output_option
def reject(rev: int, **options: Any) -> None:
    _send_and_answer(name="reject", plan_rev=rev, **options)
