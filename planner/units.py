"""Units: SI inside (bytes, seconds, FLOP/s, bytes/s, dollars/hour); text such as "80 GB" only at the edge.

Decimal prefixes are decimal (1 GB = 1e9 bytes), binary ones binary (1 GiB = 2**30 bytes). Bits and bytes are
never confused: "bit" and a lower-case "b" are bits, "B" is bytes; a rate in bits is divided by eight.
"""

import re

from planner.errors import InvalidInput

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_PREFIX = {**_DECIMAL, **_BINARY}
_NUMBER = r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*"
_BYTES = re.compile(rf"^{_NUMBER}([kKMGTP]i?|)(B|bytes?|bit|b)$")
_BYTES_PER_S = re.compile(rf"^{_NUMBER}([kKMGTP]i?|)(B|bytes?|bit|b)(?:/s|ps)$")
_FLOPS = re.compile(rf"^{_NUMBER}([kKMGTP]|)(?:FLOP/s|FLOPS|FLOPs)$")
_SECONDS = re.compile(rf"^{_NUMBER}(ns|us|µs|ms|s|m|min|h|d)$")
_SECOND_SCALE = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}


def _scale(prefix: str, unit: str) -> float:
    return _PREFIX[prefix] * (0.125 if unit in ("bit", "b") else 1.0)


def parse_bytes(text: str | float, *, where: str = "") -> float:
    """'80 GB' -> 8e10, '96 GiB' -> 103079215104; a bare number is bytes."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    if m := _BYTES.match(str(text)):
        return float(m[1]) * _scale(m[2], m[3])
    raise InvalidInput("not an amount of memory", where=where, got=text, expected='bytes, such as "80 GB" or "96 GiB"')


def parse_bytes_per_s(text: str | float, *, where: str = "") -> float:
    """'400 Gbit/s' -> 5e10, '1.5 GB/s' -> 1.5e9; a bare number is bytes per second."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    if m := _BYTES_PER_S.match(str(text)):
        return float(m[1]) * _scale(m[2], m[3])
    raise InvalidInput("not a bandwidth", where=where, got=text, expected='bytes/s, such as "400 Gbit/s" or "1.5 GB/s"')


def parse_flops(text: str | float, *, where: str = "") -> float:
    """'989 TFLOP/s' -> 9.89e14; a bare number is FLOP/s."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    if m := _FLOPS.match(str(text)):
        return float(m[1]) * _DECIMAL[m[2]]
    raise InvalidInput("not a compute rate", where=where, got=text, expected='FLOP/s, such as "989 TFLOP/s"')


def parse_seconds(text: str | float, *, where: str = "") -> float:
    """'5 ms' -> 0.005, '5m' -> 300.0; a bare number is seconds."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    if m := _SECONDS.match(str(text)):
        return float(m[1]) * _SECOND_SCALE[m[2]]
    raise InvalidInput("not a duration", where=where, got=text, expected='seconds, such as "30 s", "5m" or "10 ms"')
