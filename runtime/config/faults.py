"""Faults of a configuration file: each in our words, with its place; all together one error.

A fault is found by pydantic, by a rule or by the planner's own checks (HexError); its place is a key of the file or of an
override.
"""

import difflib
import typing
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from planner.errors import HexError
from planner.record import record, replace
from runtime.config.locate import Loc
from runtime.config.schema import Config
from runtime.errors import ConfigError


@record
class Fault:
    """What is wrong with the value of a key, or with the lack of one."""

    loc: Loc
    what: str
    got: object = None
    expected: str = ""
    hint: str = ""
    line: int | None = None  # None: not of the file (an override)

    @property
    def key(self) -> str:
        """The dotted key."""
        return dotted_key(self.loc)


def dotted_key(loc: Loc) -> str:
    """The key as people write it."""
    return ".".join(str(p) for p in loc)


def config_error(path: Path, faults: Iterable[Fault], lines: Mapping[Loc, int], changed: frozenset[Loc]) -> ConfigError:
    """One error for all faults, in the order of the file. `lines`: of its keys; `changed`: keys that are overridden."""
    placed = [_placed(f, lines, changed) for f in faults]
    ordered = sorted(placed, key=lambda f: (f.line is None, f.line or 0, f.key))

    def where(f: Fault) -> str:
        return f"{path}:{f.line}" if f.line is not None else f"--set {f.key}"

    if len(ordered) == 1:
        f = ordered[0]
        what = f"{f.key}: {f.what}" if f.key else f.what
        return ConfigError(what, where=where(f), got=_short(f.got), expected=f.expected, hint=f.hint)
    said = [f"{len(ordered)} faults"]
    for f in ordered:
        got = f", got {_short(f.got)!r}" if f.got is not None else ""
        expected = f", expected {f.expected}" if f.expected else ""
        hint = f" ({f.hint})" if f.hint else ""
        said.append(f"  {where(f)}: {f.key}: {f.what}{got}{expected}{hint}")
    return ConfigError("\n".join(said), where=str(path))


def from_pydantic(detail: dict[str, Any]) -> Fault:
    """One pydantic fault in our words."""
    loc: Loc = tuple(p for p in detail["loc"] if p != "[key]")
    kind, message = detail["type"], str(detail["msg"])
    if kind == "extra_forbidden":
        known = sorted(_keys_at(loc[:-1]))
        close = difflib.get_close_matches(str(loc[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}?" if close else "known here: " + ", ".join(known)
        return Fault(loc=loc, what="unknown key", hint=hint)
    if kind == "missing":
        return Fault(loc=loc, what="missing", expected=_about(loc))
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, HexError):
        return Fault(loc=loc, what=cause.what, got=cause.got, expected=cause.expected, hint=cause.hint)
    if kind == "value_error":
        own = message.removeprefix("Value error, ")
        return Fault(loc=loc, what=own)
    expected = message.removeprefix("Input should be ").removeprefix("a ").removeprefix("valid ")
    return Fault(loc=loc, what="bad value", got=detail["input"], expected=expected)


def from_error(e: HexError) -> Fault:
    """A fault that was found with its dotted key."""
    loc: Loc = tuple(int(p) if p.isdigit() else p for p in e.where.split("."))
    return Fault(loc=loc, what=e.what, got=e.got, expected=e.expected, hint=e.hint)


def _placed(fault: Fault, lines: Mapping[Loc, int], changed: frozenset[Loc]) -> Fault:
    """The fault with its line: of the key, else of the nearest table around it; none for an override, or in a table that
    only an override has made."""
    if fault.loc in changed:
        return fault
    loc = fault.loc
    while loc and loc not in lines:
        if any(c[: len(loc)] == loc for c in changed):
            return fault
        loc = loc[:-1]
    return replace(fault, line=lines.get(loc, 1))


def _short(value: object) -> object:
    """What fits into a line. Of text both ends stay: a path's last part says more than its first."""
    if isinstance(value, str):
        return value if len(value) <= 80 else f"{value[:19]}…{value[-60:]}"
    text = repr(value)
    return value if len(text) <= 80 else text[:79] + "…"


def _models(annotation: Any) -> Iterator[tuple[Any, type[BaseModel]]]:
    """Section classes inside an annotation, each with the container around it (tuple, dict or None)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield None, annotation
        return
    origin = typing.get_origin(annotation)
    for inner in typing.get_args(annotation):
        for _, model in _models(inner):
            yield origin if origin in (tuple, dict) else None, model


def _section_at(loc: Loc) -> type[BaseModel] | None:
    """The section class that decodes the table at `loc`."""
    here: type[BaseModel] | None = Config
    parts = list(loc)
    while parts:
        field = here.model_fields.get(str(parts.pop(0))) if here else None
        found = next(_models(field.annotation), None) if field else None
        if found is None:
            return None
        container, here = found
        if container is not None and parts:
            parts.pop(0)  # the element's index or name
    return here


def _keys_at(loc: Loc) -> tuple[str, ...]:
    section = _section_at(loc)
    return tuple(section.model_fields) if section else ()


def _about(loc: Loc) -> str:
    section = _section_at(loc[:-1])
    field = section.model_fields.get(str(loc[-1])) if section else None
    return (field.description or "") if field else ""
