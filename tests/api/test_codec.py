"""The codec: what goes in comes out; what is wrong is named, all of it."""

import collections.abc
import json
import math
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.api import wire
from runtime.api.codec import decode, encode
from runtime.errors import ConfigError

RECORDS = (wire.Command, wire.CommandResult, wire.EventRow, wire.DeviceRow, wire.PlanView, wire.Proposal,
           wire.FlowView, wire.MigrationView, wire.RunView, wire.Snapshot, wire.ApiError)  # fmt: skip


st.register_type_strategy(
    collections.abc.Mapping,
    lambda t: st.dictionaries(*(st.from_type(a) for a in typing.get_args(t)), max_size=3),
)


@pytest.mark.parametrize("cls", RECORDS)
@settings(max_examples=15)
@given(data=st.data())
def test_round_trip(cls: type, data: st.DataObject) -> None:
    value = data.draw(st.from_type(cls))
    raw = encode(value)
    json.loads(raw, parse_constant=pytest.fail)  # nothing that only some readers take for JSON
    assert _same(decode(cls, raw), value)


def _same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, typing.Mapping) and isinstance(b, typing.Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if hasattr(type(a), "__dataclass_fields__"):
        return type(a) is type(b) and all(_same(getattr(a, f), getattr(b, f)) for f in type(a).__dataclass_fields__)
    return a == b


def test_every_fault_is_named_with_its_path() -> None:
    body = b'{"name": "explode", "key": 5, "devise": "x", "force": "perhaps"}'
    with pytest.raises(ConfigError) as caught:
        decode(wire.Command, body, where="POST /v1/commands")
    text = str(caught.value)
    for part in ("POST /v1/commands", "name: ", "'cordon'", "key: ", "devise: unknown key", "force: ", "'perhaps'"):
        assert part in text


@pytest.mark.parametrize("body", [b"", b"null", b"[]", b"7", b"{", b"\xff\xfe", b'{"name": "down"}', b'"down"'])
def test_nonsense_is_one_error(body: bytes) -> None:
    with pytest.raises(ConfigError, match="Command does not decode"):
        decode(wire.Command, body)


def test_nested_fault_has_its_whole_path() -> None:
    body = b'{"plan": {"rev": "x"}, "expires_at_s": null, "gain_share": null}'
    with pytest.raises(ConfigError, match=r"plan\.rev: .*got 'x'"):
        decode(wire.Proposal, body)


def test_a_name_that_is_no_utf8_still_travels() -> None:
    row = wire.EventRow(seq=1, at_s=math.inf, level="info", kind="note", message="run \udcff at É")
    back = decode(wire.EventRow, encode(row))
    assert (back.message, back.at_s) == ("run ? at É", math.inf)
