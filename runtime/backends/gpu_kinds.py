"""Which kind of device a card is, by the driver's name for it."""

import re

from planner.catalogue import CATALOGUE
from planner.cluster import DeviceKind
from planner.record import replace
from runtime.config.schema import Config, KindSection
from runtime.errors import FleetError
from runtime.telemetry.reading import GpuReading

HOST = "host-cpu"

# First match wins: the longer names come before those they contain.
_NAMES = (
    (r"\bH800\b", "H800"),
    (r"\bH200\b", "H200"),
    (r"\bH100 PCIe\b", "H100-PCIe"),
    (r"\bH100\b", "H100"),
    (r"\bH20\b", "H20"),
    (r"\bB200\b", "B200"),
    (r"\bA100.*80GB PCIe|\bA100-PCIE-80GB", "A100-80-PCIe"),
    (r"\bA100.*80GB", "A100-80"),
    (r"\bA100.*40GB", "A100-40"),
    (r"\bL40S\b", "L40S"),
    (r"\bL4\b", "L4"),
    (r"\bA30\b", "A30"),
    (r"\bA10G\b", "A10G"),
    (r"\bRTX PRO 6000\b", "RTX-PRO-6000"),
    (r"\bRTX A6000\b", "A6000"),
    (r"\bRTX 4090\b", "RTX-4090"),
    (r"\bRTX 3090\b", "RTX-3090"),
    (r"\bV100.*16GB", "V100-16"),
    (r"\bT4\b", "T4"),
)


def kind_of_name(name: str) -> str | None:
    """The catalogue's kind of a card by the driver's name for it; None for one nobody knows, and for a MIG instance, which is
    named like its card and computes at a part of its speed."""
    if re.search(r"\bMIG\b", name):
        return None
    return next((kind for pattern, kind in _NAMES if re.search(pattern, name)), None)


def gpu_kind(gpu: GpuReading, config: Config) -> DeviceKind:
    """The card's kind with the memory it really has. The configuration's kinds come first, by the driver's or the
    catalogue's name. FleetError for a card that neither knows."""
    known = kind_of_name(gpu.name)
    for name in (gpu.name, known):
        if name is not None and name in config.fleet.kinds:
            return declared(name, config.fleet.kinds[name])
    if known is None:
        raise FleetError(
            "no figures for this card",
            where=f"GPU {gpu.index}",
            got=gpu.name,
            expected=", ".join(k for k in CATALOGUE if k != HOST),
            hint=f'declare it under [fleet.kinds."{gpu.name}"] with peak_flops, hbm, memory and link',
        )
    kind = CATALOGUE[known]
    return kind if gpu.memory_total_bytes is None else replace(kind, memory_bytes=gpu.memory_total_bytes)


def host_kind(config: Config) -> DeviceKind:
    """The host's CPU as a device."""
    section = config.fleet.kinds.get(HOST)
    return declared(HOST, section) if section is not None else CATALOGUE[HOST]


def declared(name: str, section: KindSection) -> DeviceKind:
    """A kind as the configuration declares it."""
    return DeviceKind(
        name=name,
        peak_flops=section.peak_flops,
        hbm_bytes_per_s=section.hbm,
        memory_bytes=section.memory,
        link_bytes_per_s=section.link,
        price_usd_per_h=section.price_usd_per_h,
        launch_s=section.launch,
        source="configuration",
    )
