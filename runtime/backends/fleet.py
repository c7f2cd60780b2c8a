"""What devices a run has: GPUs found by the node agent, the CPU as two devices, or what the configuration declares."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from planner.cluster import Cluster, Device, DeviceKind, Link
from planner.record import record, replace
from runtime.backends.gpu_kinds import HOST, gpu_kind, host_kind
from runtime.backends.ray.locks import owner
from runtime.cards import divided, parts_by_default
from runtime.config.problem import cluster_from_config, link_from
from runtime.config.schema import Config
from runtime.errors import FleetError, RunError
from runtime.telemetry.client import report_once
from runtime.telemetry.reading import GpuReading, Report
from runtime.telemetry.visible import visible

_LINK = Link(latency_s=1e-5, bytes_per_s=1.25e10)  # between nodes; one machine has none
Label = Literal["gpu", "cpu", "paced", "mixed"]


@record
class Discovery:
    """The fleet, its label for every screen, and what was left out or assumed, in words."""

    cluster: Cluster
    label: Label
    notes: tuple[str, ...] = ()


def discover(config: Config, *, own_run: str | None = None) -> Discovery:
    """The fleet of `config`. `own_run`: devices that this run has claimed already count as free.

    FleetError: GPUs are asked for and there are none to have.
    """
    match config.fleet.source:
        case "gpus":
            return _gpus(config, own_run)
        case "cpu":
            return _cpu(config)
        case "paced" | "declared" | "simulated":
            return _declared(config)
        case "auto":
            return _auto(config, own_run)


def _auto(config: Config, own_run: str | None) -> Discovery:
    """Free GPUs; without any what the configuration declares; else the CPU."""
    free: tuple[GpuReading, ...] = ()
    notes: tuple[str, ...] = ()
    try:
        report = report_once()
    except RunError as e:
        why = e.what
    else:
        why = report.message
        free, notes = _free(report, own_run)
    if free:
        return of_cards(config, free, notes, owner_of=owner, own_run=own_run)
    notes = (*notes, f"no free GPU: {why}" if why else "no free GPU")
    rest = _on_this_host(config, notes) if config.fleet.devices else _cpu(config)
    return Discovery(cluster=rest.cluster, label=rest.label, notes=(*notes, *rest.notes))


def _on_this_host(config: Config, notes: tuple[str, ...]) -> Discovery:
    """The declared devices as parts of the host's CPU; paced ones where their speeds are declared."""
    unknown = sorted({d.kind for d in config.fleet.devices} - config.fleet.kinds.keys())
    if unknown:
        raise FleetError(
            "devices are declared that this machine does not have",
            where="fleet.devices",
            got=f"{', '.join(unknown)}; {'; '.join(notes)}",
            expected="GPUs, or kinds declared in fleet.kinds",
            hint='take fleet.devices out, or plan only, with fleet.source = "declared"',
        )
    source = "paced" if config.fleet.pacing is not None else "cpu"
    fleet = config.fleet.model_copy(update={"source": source})
    return _declared(config.model_copy(update={"fleet": fleet}))


def _gpus(config: Config, own_run: str | None) -> Discovery:
    report = report_once()
    if report.library != "ok":
        hints = {
            "no-library": 'install the NVIDIA driver, or set HEXCTL_NVML to libnvidia-ml.so.1; without GPUs use fleet.source = "cpu"',
            "stub": "take the folder of stubs out of LD_LIBRARY_PATH, or set HEXCTL_NVML",
            "version-mismatch": "reboot, or reload the kernel module",
        }
        raise FleetError(
            "no GPUs", where="fleet.source", got=report.message, hint=hints.get(report.library, "try nvidia-smi")
        )
    free, notes = _free(report, own_run)
    if not free:
        raise FleetError(
            "no free GPU",
            where="fleet.source",
            got="; ".join(notes) or report.message,
            hint='use fleet.source = "auto" or "cpu"',
        )
    return of_cards(config, free, notes, owner_of=owner, own_run=own_run)


def of_cards(
    config: Config,
    free: Sequence[GpuReading],
    notes: tuple[str, ...] = (),
    *,
    owner_of: Callable[[str], str | None],
    own_run: str | None,
) -> Discovery:
    """The cards, in parts where the configuration says so or one of them has to do all. A run that has cards goes by those: a
    card that became free since must not change what its devices are called."""
    mine = [g for g in free if own_run is not None and owner_of(g.id) == own_run] or free
    parts = config.fleet.gpu_parts or parts_by_default(len(mine))
    if parts > 1:
        whose = "the GPU counts as" if len(free) == 1 else "each GPU counts as"
        extra = f"{whose} {parts} devices that take turns on it, each with 1/{parts} of its memory and, while all compute, of its speed"
        notes = (*notes, extra)
    return Discovery(cluster=divided(_cluster(config, free), parts), label="gpu", notes=notes)


def _free(report: Report, own_run: str | None) -> tuple[tuple[GpuReading, ...], tuple[str, ...]]:
    return free_cards(
        report,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        device_order=os.environ.get("CUDA_DEVICE_ORDER"),
        owner_of=owner,
        own_run=own_run,
    )


def free_cards(
    report: Report,
    *,
    visible_devices: str | None,
    device_order: str | None = None,
    owner_of: Callable[[str], str | None],
    own_run: str | None,
) -> tuple[tuple[GpuReading, ...], tuple[str, ...]]:
    """Cards that a run may use, and in words why others are left out. `visible_devices`, `device_order`: CUDA's variables;
    `owner_of` says which live run has a card."""
    by_id = {g.id: g for g in sorted(report.gpus, key=lambda g: g.pci or f"~{g.index:04d}")}
    chosen = visible(visible_devices, tuple(by_id))
    notes = []
    if len(chosen) < len(by_id):
        notes.append(f"CUDA_VISIBLE_DEVICES shows {len(chosen)} of {len(by_id)} GPUs")
    unlike = len({g.name for g in report.gpus if not g.id.startswith("MIG-")}) > 1
    if unlike and device_order != "PCI_BUS_ID" and any(e.strip().isdigit() for e in (visible_devices or "").split(",")):
        notes.append(
            "CUDA_VISIBLE_DEVICES names cards by number, taken as their order on PCI; CUDA itself counts unlike cards from the "
            "fastest on: name them by UUID, or set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    free = []
    for id_ in chosen:
        gpu, holder = by_id[id_], owner_of(id_)
        if gpu.note:
            notes.append(f"GPU {gpu.index} ({id_}) is left out: {gpu.note}")
        elif holder is not None and holder != own_run:
            notes.append(f"GPU {gpu.index} ({id_}) is left out: it belongs to run {holder}")
        elif gpu.pids and holder is None:
            notes.append(f"GPU {gpu.index} ({id_}) is left out: foreign process {', '.join(map(str, gpu.pids))}")
        else:
            free.append(gpu)
    return tuple(free), tuple(notes)


def _declared(config: Config) -> Discovery:
    cluster = cluster_from_config(config)
    paced = [cluster.kinds[d.kind].paced for d in cluster.devices]
    label: Label = "paced" if all(paced) else "mixed" if any(paced) else "cpu"
    return Discovery(cluster=cluster, label=label)


def _cpu(config: Config) -> Discovery:
    note = "the host's CPU counts as two devices, so that one can train and one generate; they share its cores"
    return Discovery(cluster=_cluster(config, (), cpus=2), label="cpu", notes=(note,))


def _cluster(config: Config, gpus: Sequence[GpuReading], cpus: int = 0) -> Cluster:
    """Kinds from the catalogue by the driver's name of the card, figures and prices from the configuration first."""
    kinds: dict[str, DeviceKind] = {}
    devices: list[Device] = []
    for gpu in gpus:
        kind = _priced(gpu_kind(gpu, config), config.fleet.prices)
        kinds[kind.name] = kind
        devices.append(Device(id=gpu.id, kind=kind.name, node="n0", index=len(devices)))
    if cpus:
        kinds[HOST] = _priced(host_kind(config), config.fleet.prices)
    devices += [Device(id=f"cpu-n0-{i}", kind=HOST, node="n0", index=i) for i in range(cpus)]
    fleet = config.fleet
    same, cross = link_from(fleet.same_kind, default=_LINK), link_from(fleet.cross_kind, default=_LINK)
    return Cluster(kinds=kinds, devices=tuple(devices), same_kind=same, cross_kind=cross)


def _priced(kind: DeviceKind, prices: Mapping[str, float]) -> DeviceKind:
    return replace(kind, price_usd_per_h=prices.get(kind.name, kind.price_usd_per_h))
