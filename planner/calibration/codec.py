"""`Calibration` as JSON text and back.

A table is its column names and rows of values, so that a file of thousands of points stays small and can be read:

    {"format": "hexctl-calibration", "version": 1, "kinds": [
      {"kind": "H100", "provenance": {"source": "...", "how": "measured", ...},
       "gemm": {"columns": ["m", "n", "k", "dtype", "seconds"], "rows": [[1, 4096, 4096, "bf16", 1.6e-05]]}}]}

Columns may come in any order; one with a default may be absent. Decoding errors say which file, table and row.
"""

import dataclasses
import json
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from planner.calibration.records import (
    Calibration,
    CollectivePoint,
    CopyPoint,
    DecodePoint,
    EngineRate,
    GemmPoint,
    KindTables,
    LinkPoint,
    PrefillPoint,
    Provenance,
    TrainerRate,
    UpdateTime,
)
from planner.errors import InvalidInput

FORMAT, VERSION = "hexctl-calibration", 1
_TABLES: Mapping[str, type] = types.MappingProxyType(
    {
        "gemm": GemmPoint,
        "prefill": PrefillPoint,
        "decode": DecodePoint,
        "collectives": CollectivePoint,
        "hbm_copy": CopyPoint,
        "links": LinkPoint,
        "engine": EngineRate,
        "trainer": TrainerRate,
        "updates": UpdateTime,
    }
)


def encode(calibration: Calibration) -> str:
    """JSON text, one row of a table a line; decodes to an equal value."""
    kinds = ",\n".join(_encoded(t) for t in calibration.kinds)
    return f'{{"format": "{FORMAT}", "version": {VERSION}, "kinds": [\n{kinds}\n]}}\n'


def _encoded(tables: KindTables) -> str:
    parts = [
        f'"kind": {json.dumps(tables.kind)}',
        f'"provenance": {json.dumps(dataclasses.asdict(tables.provenance))}',
    ]
    for name in _TABLES:
        points: Sequence[Any] = getattr(tables, name)
        if points:
            columns = [f.name for f in dataclasses.fields(points[0])]
            rows = ",\n   ".join(json.dumps([getattr(p, c) for c in columns]) for p in points)
            parts.append(f'"{name}": {{"columns": {json.dumps(columns)}, "rows": [\n   {rows}]}}')
    return " {" + ",\n  ".join(parts) + "}"


def decode(text: str, *, where: str = "calibration") -> Calibration:
    """The value that `text` stands for; InvalidInput, which says where, for anything else. `where` names the file."""
    try:
        value = json.loads(text)
    except ValueError as e:
        raise InvalidInput("a calibration that is not JSON", where=where, got=str(e)) from e
    top = _mapping(value, where)
    if top.get("format") != FORMAT or top.get("version") != VERSION:
        raise InvalidInput(
            "not a calibration this version reads",
            where=where,
            got=(top.get("format"), top.get("version")),
            expected=f"format {FORMAT!r}, version {VERSION}",
            hint="write it anew with hexctl profile",
        )
    _known(top, ("format", "version", "kinds"), where)
    kinds = _list(top.get("kinds"), f"{where}: kinds")
    return Calibration(kinds=tuple(_kind(k, f"{where}: kinds[{i}]") for i, k in enumerate(kinds)))


def _kind(value: object, where: str) -> KindTables:
    given = _mapping(value, where)
    _known(given, ("kind", "provenance", *_TABLES), where)
    name = _typed(given.get("kind"), str, f"{where}.kind")
    origin = _mapping(given.get("provenance"), f"{where}.provenance")
    tables = {t: _table(given[t], cls, f"{where} ({name}).{t}") for t, cls in _TABLES.items() if t in given}
    return KindTables(kind=name, provenance=_made(Provenance, origin, f"{where}.provenance"), **tables)


def _table(value: object, cls: type, where: str) -> tuple[Any, ...]:
    table = _mapping(value, where)
    _known(table, ("columns", "rows"), where)
    columns = [_typed(c, str, f"{where}.columns") for c in _list(table.get("columns"), f"{where}.columns")]
    out = []
    for i, row in enumerate(_list(table.get("rows"), f"{where}.rows")):
        cells = _list(row, f"{where}.rows[{i}]")
        if len(cells) != len(columns):
            raise InvalidInput(
                "a row of another width", where=f"{where}.rows[{i}]", got=len(cells), expected=f"{len(columns)} values"
            )
        out.append(_made(cls, dict(zip(columns, cells, strict=True)), f"{where}.rows[{i}]"))
    return tuple(out)


def _made(cls: type, values: Mapping[str, object], where: str) -> Any:
    """A record from its fields, each of the declared type."""
    fields = {f.name: f for f in dataclasses.fields(cls)}
    _known(values, tuple(fields), where)
    hints = typing.get_type_hints(cls)
    made: dict[str, object] = {}
    for name, field in fields.items():
        if name in values:
            made[name] = _typed(values[name], hints[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING:
            raise InvalidInput(f"{name} is missing", where=where, expected=", ".join(fields))
    try:
        return cls(**made)
    except InvalidInput as e:
        raise InvalidInput(e.what, where=where, got=e.got, expected=e.expected) from e


def _typed(value: object, declared: Any, where: str) -> Any:
    if typing.get_origin(declared) is typing.Literal:
        choices = typing.get_args(declared)
        if value not in choices:
            raise InvalidInput("not one of the words it may be", where=where, got=value, expected=", ".join(choices))
        return value
    if typing.get_origin(declared) is types.UnionType:  # a value or None
        return None if value is None else _typed(value, typing.get_args(declared)[0], where)
    if declared is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not declared:
        raise InvalidInput("a value of another type", where=where, got=value, expected=declared.__name__)
    return value


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidInput("not an object", where=where, got=type(value).__name__, expected="{...}")
    return value


def _list(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, list):
        raise InvalidInput("not a list", where=where, got=type(value).__name__, expected="[...]")
    return value


def _known(given: Mapping[str, object], names: Sequence[str], where: str) -> None:
    for name in given:
        if name not in names:
            raise InvalidInput("an unknown name", where=where, got=name, expected=", ".join(names))
