"""Options several commands share, and what they lead to: a run, a client, a configuration, an answer on stdout."""

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from runtime.config.load import LoadedConfig

F = TypeVar("F", bound=Callable[..., Any])


def output_option(f: F) -> F:
    """--output text|json."""
    return click.option(
        "--output",
        "-o",
        type=click.Choice(["text", "json"]),
        default="text",
        show_default=True,
        help="Form of the answer.",
    )(f)


def run_options(f: F) -> F:
    """--run and --root."""
    f = click.option(
        "--root",
        type=click.Path(path_type=Path),
        default=Path("runs"),
        show_default=True,
        help="Folder that holds run folders.",
    )(f)
    return click.option(
        "--run", "run_id", metavar="ID", help="The run, by id or the start of it; default: the only live one."
    )(f)


def root_option(f: F) -> F:
    """--root of the commands that read a configuration."""
    return click.option(
        "--root",
        type=click.Path(path_type=Path),
        help="Folder that holds run folders; default: run.root of the configuration.",
    )(f)


def calibration_option(f: F) -> F:
    """--calibration."""
    return click.option(
        "--calibration",
        metavar="FILE",
        help='Count with what hexctl profile measured; "none": with nothing measured here. Default: planner.calibration of '
        "the configuration, else calibration.json in its run.root.",
    )(f)


def set_option(f: F) -> F:
    """--set KEY=VALUE."""
    return click.option(
        "--set",
        "settings",
        metavar="KEY=VALUE",
        multiple=True,
        help="Override one value of the configuration, such as algorithm.eta=0.",
    )(f)


def overrides(settings: tuple[str, ...]) -> dict[str, str]:
    """`--set` texts as a mapping."""
    pairs = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise click.UsageError(f"--set {text}: expected KEY=VALUE")
        pairs[key.strip()] = value.strip()
    return pairs


def config_path(text: str) -> Path:
    """The configuration file a person means: a path, or the name of one that is shipped ("local")."""
    from hexctl.data import data_folder
    from runtime.errors import ConfigError

    path = Path(text)
    if path.exists():
        return path
    shipped = {p.stem: p for p in sorted(data_folder("configs").glob("*.toml"))}
    if "/" not in text and path.suffix in ("", ".toml") and path.stem in shipped:
        return shipped[path.stem]
    hint = (
        f"hexctl ships one of that name: give just {path.stem}"
        if path.stem in shipped
        else f"shipped: {', '.join(shipped)}"
    )
    raise ConfigError("no such configuration", where=text, hint=hint)


def text_of(path: str, *, option: str) -> str:
    """The text of the file that an option names; ConfigError where there is none."""
    from runtime.errors import ConfigError

    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise ConfigError("cannot be read", where=path, got=e.strerror, hint=f"{option} names a file") from e
    except UnicodeDecodeError as e:
        raise ConfigError(
            "not a text file",
            where=path,
            got=e.object[e.start : e.end],
            expected="UTF-8",
            hint=f"{option} names a file",
        ) from e


def load(text: str, settings: tuple[str, ...] = (), *, to_run: bool = False) -> "LoadedConfig":
    """Load the configuration a person means; `to_run` also asks whether everything a run needs is named and there."""
    from runtime.config.load import load_config, need_runnable

    loaded = load_config(config_path(text), overrides=overrides(settings), check_files=to_run)
    if to_run:
        need_runnable(loaded)
    return loaded


def answer(output: str, document: object, text: str) -> None:
    """The command's data on stdout: `document` as JSON or `text`."""
    click.echo(to_json(document) if output == "json" else text.rstrip("\n"))


def to_json(document: object, *, indent: int | None = 1) -> str:
    """JSON any reader takes: what is not finite is null."""
    return json.dumps(_finite(document), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


@contextmanager
def stdout_kept_pure() -> Iterator[None]:
    """Within, whatever writes to file descriptor 1 (a solver's banner, a child) lands on stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def seconds(text: str, *, where: str) -> float:
    """A duration such as "5m" or "30s"; a bare number is seconds."""
    from planner.units import parse_seconds
    from runtime.errors import ConfigError

    try:
        value = float(text)
    except ValueError:
        value = parse_seconds(text, where=where)
    if not 0 < value < math.inf:
        raise ConfigError("not a duration", where=where, got=text, expected='more than zero, such as "5m"')
    return value
