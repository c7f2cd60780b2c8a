"""A tree of plain values as TOML text that reads back as the same tree."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def to_toml(tree: Mapping[str, Any]) -> str:
    """TOML of nested mappings, lists, texts, booleans and numbers; None is left out."""
    return "\n".join(_table(tree, "")).lstrip("\n") + "\n"


def _table(tree: Mapping[str, Any], name: str) -> Iterator[str]:
    plain = {k: v for k, v in tree.items() if not _is_tables(v)}
    if name and (plain or not tree):
        yield f"\n[{name}]"
    for key, value in plain.items():
        if value is not None:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in tree.items():
        if not _is_tables(value):
            continue
        inner = f"{name}.{_key(key)}" if name else _key(key)
        if isinstance(value, Mapping):
            yield from _table(value, inner)
            continue
        for element in value:
            yield f"\n[[{inner}]]"
            for k, v in element.items():
                if v is not None:
                    yield f"{_key(k)} = {_value(v)}"


def _is_tables(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(v, Mapping) for v in value)


def _key(key: str) -> str:
    return key if _BARE.match(key) else _text(key)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case list() | tuple():
            return "[" + ", ".join(_value(v) for v in value) + "]"
        case Mapping():
            pairs = (f"{_key(k)} = {_value(v)}" for k, v in value.items() if v is not None)
            return "{" + ", ".join(pairs) + "}"
        case _:
            return _text(str(value))
