"""`hexctl status` and `hexctl gpus`: one reading of the snapshot."""

from pathlib import Path

import click

from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, output_option, run_options
from hexctl.cli.render.status import gpus_document, gpus_text, status_document, status_text
from hexctl.cli.which import connected


@click.command(help=COMMANDS["status"][1])
@run_options
@output_option
def status(root: Path, run_id: str | None, output: str) -> None:
    with connected(root, run_id) as (_, client):
        snapshot = client.now()
    answer(output, status_document(snapshot), status_text(snapshot))


@click.command(help=COMMANDS["gpus"][1])
@run_options
@output_option
def gpus(root: Path, run_id: str | None, output: str) -> None:
    with connected(root, run_id) as (_, client):
        snapshot = client.now()
    answer(output, gpus_document(snapshot), gpus_text(snapshot))
