"""`hexctl events`: what happened, and what happens next."""

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, output_option, run_options, to_json
from hexctl.cli.render.events import event_document, event_line
from hexctl.cli.which import connected
from runtime.api.wire import EventRow

if TYPE_CHECKING:
    from hexctl.client import Client

POLL_S = 10.0


@click.command(help=COMMANDS["events"][1])
@click.option(
    "--follow", "-f", is_flag=True, help="Go on with what happens; --output json then writes one object a line."
)
@click.option("--after", type=click.IntRange(min=0), help="Only events with a higher number; default: the newest ones.")
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="At most that many to begin with."
)
@run_options
@output_option
def events(*, follow: bool, after: int | None, limit: int, root: Path, run_id: str | None, output: str) -> None:
    with connected(root, run_id) as (_, client):
        snapshot = client.now()
        rows = snapshot.events[-limit:] if after is None else client.events(after, limit)
        if not follow:
            answer(output, [event_document(e) for e in rows], "\n".join(map(_line, rows)))
            return
        _write(rows, output)
        last = rows[-1].seq if rows else after or 0
        _follow(client, snapshot.seq, last, output)


def _follow(client: "Client", seq: int, last: int, output: str) -> None:
    """Write events as they come, until the reader, the daemon or the person ends it."""
    while True:
        snapshot = client.snapshot(seq, POLL_S)
        if snapshot is None:
            continue
        seq = snapshot.seq
        while rows := client.events(last):
            _write(rows, output)
            last = rows[-1].seq


def _write(rows: tuple[EventRow, ...], output: str) -> None:
    for e in rows:
        click.echo(to_json(event_document(e), indent=None) if output == "json" else _line(e))


def _line(e: EventRow) -> str:
    return event_line(e, lambda at_s: datetime.fromtimestamp(at_s).astimezone().strftime("%H:%M:%S"))
