"""Measured points of device kinds: the records, their JSON text, and the curves the cost model draws through them."""

from planner.calibration.codec import decode, encode
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

__all__ = [
    "Calibration",
    "CollectivePoint",
    "CopyPoint",
    "DecodePoint",
    "EngineRate",
    "GemmPoint",
    "KindTables",
    "LinkPoint",
    "PrefillPoint",
    "Provenance",
    "TrainerRate",
    "UpdateTime",
    "decode",
    "encode",
]
