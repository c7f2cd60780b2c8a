"""JSON codec of the wire records: strict about names, all faults at once, each with its path.

A float that is not finite travels as the text "NaN", "Infinity" or "-Infinity" (JSON has no such numbers) and comes
back as the float.
"""

import json
import math
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any, Optional, TypeVar, cast

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from runtime.errors import ConfigError

T = TypeVar("T")

_CONFIG = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


@cache
def _adapter(cls: Hashable) -> TypeAdapter[Any]:
    # A bare dataclass refuses a config from outside; `cls | None` takes it and hands it down to every nested record.
    optional: Any = Optional[cls]  # noqa: UP045  (built from a value)
    return TypeAdapter(optional, config=_CONFIG)


def encode(value: object) -> bytes:
    """The record `value` as UTF-8 JSON. Bytes of a file name that are not UTF-8 travel as "?"."""
    adapter = _adapter(cast(Hashable, type(value)))
    try:
        return adapter.dump_json(value)
    except PydanticSerializationError:  # a lone surrogate somewhere: the fast way has no replacement for it
        return json.dumps(_plain(adapter.dump_python(value)), ensure_ascii=False).encode("utf-8", "replace")


def decode(cls: type[T], data: bytes | str, *, where: str = "") -> T:
    """Read a record of type `cls`; ConfigError lists every fault as `path: message` (unknown keys are faults)."""
    try:
        value: object = _adapter(cast(Hashable, cls)).validate_json(data)
    except ValidationError as e:
        faults = describe(e)
        raise ConfigError(
            f"{cls.__name__} does not decode: " + "; ".join(faults), where=where, hint="unknown keys are refused"
        ) from e
    if value is None:
        raise ConfigError(f"{cls.__name__} does not decode", where=where, got="null", expected="a JSON object")
    return cast(T, value)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return value


def describe(error: ValidationError) -> tuple[str, ...]:
    """Each fault in one line: `path: message, got value`."""
    lines: list[str] = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(part) for part in fault["loc"])
        if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            message = "unknown key"
        else:
            message = fault["msg"].removeprefix("Value error, ")
            if fault["type"] not in ("missing", "json_invalid"):
                message += f", got {clip(fault['input'])}"
        lines.append(f"{path}: {message}" if path else message)
    return tuple(lines)


def clip(value: object, limit: int = 80) -> str:
    """`repr(value)`, shortened for a message."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"
