"""`hexctl wait --until`: block until a figure of the status is as wished."""

import time
from pathlib import Path
from typing import Any

import click

from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, output_option, run_options, seconds
from hexctl.cli.render.status import status_document, status_text
from hexctl.cli.render.text import duration
from hexctl.cli.until import Term, look_up, parse
from hexctl.cli.which import choose_run, connected
from runtime.errors import DeadlineError, UnreachableError

POLL_S = 5.0


@click.command(help=COMMANDS["wait"][1])
@click.option(
    "--until",
    metavar="CONDITION",
    required=True,
    help='Such as "step>=50", "state=running" or "reward>0.9 and staleness_max<=4".',
)
@click.option(
    "--timeout", metavar="DURATION", default="10m", show_default=True, help="Give up after that long, with exit code 6."
)
@run_options
@output_option
def wait(until: str, timeout: str, root: Path, run_id: str | None, output: str) -> None:
    terms = parse(until)
    limit_s = seconds(timeout, where="--timeout")
    deadline = time.monotonic() + limit_s
    run = choose_run(root, run_id)
    seq: int | None = None
    document: dict[str, Any] = {}
    try:
        with connected(root, run.id) as (_, client):
            while True:
                left = max(0.0, deadline - time.monotonic())
                snapshot = client.snapshot(seq, min(left, POLL_S))
                if snapshot is not None:
                    seq, document = snapshot.seq, status_document(snapshot)
                    held = [t.holds(document) for t in terms]  # all of them, so that each is checked for sense
                    if all(held):
                        answer(output, document, status_text(snapshot))
                        return
                if left <= 0:
                    raise _late(f"not within {duration(limit_s)}", until, terms, document)
    except UnreachableError as e:
        if not document:
            raise
        raise _late(f"the daemon went away ({e.what})", until, terms, document) from e


def _late(what: str, until: str, terms: tuple[Term, ...], document: dict[str, Any]) -> DeadlineError:
    seen = ", ".join(f"{t.name} {look_up(document, t.name)}" for t in terms) if document else "no snapshot"
    return DeadlineError(f"waiting until {until}: {what}", got=seen, expected=until, hint="hexctl status")
