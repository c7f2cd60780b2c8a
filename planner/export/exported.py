"""What an exporter answers, and how settings become lines."""

from collections.abc import Iterable, Mapping

from planner.record import record

Value = bool | int | float | str


@record
class Exported:
    """Settings of one target: text by file name, and one sentence for everything of the plan they do not say."""

    target: str
    files: Mapping[str, str]
    notes: tuple[str, ...] = ()


def commented(lines: Iterable[str]) -> str:
    """Lines as `#` comments, which shells, TOML and YAML read alike."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def override_lines(settings: Mapping[str, Value], *, prefix: str = "") -> str:
    """One Hydra override a line, `key=value`; booleans as Hydra prints them. Values hold no spaces, so that a shell
    may split the lines into arguments."""
    return "".join(f"{prefix}{key}={plain(value)}\n" for key, value in settings.items())


def plain(value: Value) -> str:
    """A value as YAML and Hydra read it back."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def quoted(value: Value) -> str:
    """A value as TOML reads it back."""
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return plain(value)


def argument(text: str) -> str:
    """A name as one shell word without quotes: what could split or expand becomes "-"."""
    return "".join(c if c.isalnum() or c in "._/-" else "-" for c in text)
