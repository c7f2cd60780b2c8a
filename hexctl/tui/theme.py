"""Themes: files in `themes/`, data only. A theme gives every tone a style, and Textual's own chrome its colours."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.errors import StyleSyntaxError
from rich.style import Style
from textual.color import Color, ColorParseError
from textual.theme import Theme as TextualTheme

from hexctl.data import data_folder
from hexctl.tui.view.text import TONES, Tone
from planner.record import record
from runtime.errors import ConfigError

CHROME = (
    "primary",
    "secondary",
    "accent",
    "foreground",
    "background",
    "surface",
    "panel",
    "warning",
    "error",
    "success",
)
NO_COLOUR = "no-colour"
DEFAULT = "dark"


@record
class Theme:
    """A theme file, decoded. Without colour every style is made of bold, dim, underline and reverse alone."""

    name: str
    dark: bool
    colour: bool
    chrome: Mapping[str, str]
    styles: Mapping[Tone, Style]

    def textual(self) -> TextualTheme:
        """The part that Textual's own widgets use."""
        return TextualTheme(name=self.name, dark=self.dark, **self.chrome)  # type: ignore[arg-type]


def theme_names() -> tuple[str, ...]:
    """Every theme that ships."""
    return tuple(sorted(p.stem for p in data_folder("themes").glob("*.toml")))


def load_theme(name: str) -> Theme:
    """The theme of that name. ConfigError when there is none or its file is at fault."""
    path = data_folder("themes") / f"{name}.toml"
    if name not in theme_names():
        raise ConfigError("no such theme", got=name, expected=" or ".join(theme_names()))
    return read_theme(path)


def read_theme(path: Path) -> Theme:
    """Decode one file; all faults at once."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as fault:
        raise ConfigError(f"not a theme: {fault}", where=str(path)) from fault
    faults: list[str] = []
    chrome = _table(data, "chrome", CHROME, faults)
    tones = _table(data, "tones", TONES, faults)
    for key in sorted(set(data) - {"dark", "colour", "chrome", "tones"}):
        faults.append(f"unknown key {key}")
    for key in ("dark", "colour"):
        if not isinstance(data.get(key), bool):
            faults.append(f"{key} must be true or false")
    for key, value in chrome.items():
        try:
            Color.parse(value)
        except ColorParseError:
            faults.append(f"chrome.{key} is not a colour: {value!r}")
    styles: dict[Tone, Style] = {}
    for tone in TONES:
        try:
            styles[tone] = Style.parse(tones.get(tone, ""))
        except StyleSyntaxError:
            faults.append(f"tones.{tone} is not a style: {tones[tone]!r}")
            continue
        if data.get("colour") is False and (styles[tone].color or styles[tone].bgcolor):
            faults.append(f"tones.{tone} has a colour in a theme without colour")
    if faults:
        raise ConfigError("; ".join(faults), where=str(path))
    return Theme(name=path.stem, dark=data["dark"], colour=data["colour"], chrome=chrome, styles=styles)


def _table(data: Mapping[str, Any], name: str, keys: tuple[str, ...], faults: list[str]) -> dict[str, str]:
    """A table of strings with exactly these keys."""
    table = data.get(name)
    if not isinstance(table, dict):
        faults.append(f"table [{name}] is missing")
        return {}
    faults += [f"{name}.{key} is missing" for key in keys if key not in table]
    faults += [f"{name}.{key} is unknown" for key in sorted(set(table) - set(keys))]
    faults += [f"{name}.{key} must be text" for key, value in table.items() if not isinstance(value, str)]
    return {k: v for k, v in table.items() if k in keys and isinstance(v, str)}


def choose_theme(asked: str | None, environment: Mapping[str, str]) -> Theme:
    """What was asked for, else no colour where `NO_COLOR` says so (any value that is not empty), else the default."""
    if asked is not None:
        return load_theme(asked)
    return load_theme(NO_COLOUR if environment.get("NO_COLOR") else DEFAULT)
