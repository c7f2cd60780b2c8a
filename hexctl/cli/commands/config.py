"""`hexctl config show`: the resolved tree and where each value came from."""

import click

from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, load, output_option, set_option
from hexctl.cli.render.text import table


@click.group(help=COMMANDS["config"][1])
def config() -> None:
    pass


@config.command(
    short_help="Show every value and where it came from.",
    help="Show every value of CONFIG (a file, or the name of a shipped one) and where it came from.",
)
@click.argument("config", metavar="CONFIG")
@set_option
@output_option
def show(config: str, settings: tuple[str, ...], output: str) -> None:
    from runtime.config.load import leaves

    loaded = load(config, settings)
    rows = [(key, value, loaded.origins.get(key, "default")) for key, value in leaves(loaded.config)]
    document = {
        "path": str(loaded.path), "sha256": loaded.sha256, "values": {k: {"value": v, "origin": o} for k, v, o in rows},
    }  # fmt: skip
    answer(output, document, table(("KEY", "VALUE", "FROM"), [(k, _text(v), o) for k, v, o in rows]))


def _text(value: object) -> str:
    return "—" if value is None else str(value)
