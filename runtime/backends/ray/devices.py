"""Devices as the observation shows them: GPUs from NVML, paced and CPU devices from the process that carries them."""

import threading
import time
from collections.abc import Callable

from planner.cluster import Cluster, Device
from runtime.cards import card_of, is_gpu, parts_of
from runtime.core.observation import DeviceSample, DeviceSeen, ReplicaSeen, TrainerSeen
from runtime.policy.gpu_memory import CardReading, memory_verdict
from runtime.telemetry.reading import GpuReading, ProcessReading, Report

HOST_BOUND = 0.10  # share of its clock a paced device may fall behind
MEMORY_BACK_S = 15.0


class DeviceView:
    """The fleet's devices, in the cluster's order."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def seen(
        self,
        report: Report | None,
        report_age_s: float | None,
        replicas: tuple[ReplicaSeen, ...],
        trainers: tuple[TrainerSeen, ...],
    ) -> tuple[DeviceSeen, ...]:
        """One row a device."""
        carriers: dict[str, ReplicaSeen | TrainerSeen] = {d: t for t in trainers for d in t.devices}
        carriers |= {d: r for r in replicas for d in r.devices}
        gpus = {g.id: g for g in report.gpus} if report is not None else {}
        processes = {p.pid: p for p in report.host.processes} if report is not None else {}
        return tuple(
            _gpu_row(d, gpus.get(card_of(d.id)), report, report_age_s)
            if is_gpu(d.id)
            else self._host_row(d, carriers.get(d.id), processes, report_age_s)
            for d in self._cluster.devices
        )

    def _host_row(
        self,
        device: Device,
        carrier: ReplicaSeen | TrainerSeen | None,
        processes: dict[int, ProcessReading],
        age_s: float | None,
    ) -> DeviceSeen:
        pid = (
            carrier.pid_on(device.id)
            if isinstance(carrier, TrainerSeen)
            else carrier.pid
            if carrier is not None
            else None
        )
        process = processes.get(pid) if pid is not None else None
        lag = carrier.host_lag_share if carrier is not None else None
        share = process.cpu_share if process is not None else None
        kind = self._cluster.kinds[device.kind]
        return DeviceSeen(
            id=device.id,
            kind=device.kind,
            node=device.node,
            index=device.index,
            present=True,
            sample=DeviceSample(
                util_share=None if share is None else min(1.0, share),
                memory_used_bytes=process.resident_bytes if process is not None else None,
                # A paced device's memory is declared, not enforced: a process's real size is no share of it.
                memory_total_bytes=None if kind.paced else kind.memory_bytes,
                host_bound=lag > HOST_BOUND if kind.paced and lag is not None else None,
            ),
            age_s=age_s,
        )


def _gpu_row(device: Device, gpu: GpuReading | None, report: Report | None, report_age_s: float | None) -> DeviceSeen:
    """A card's reading. A part of one shows the whole card's, which is all the driver has, and its part of the power."""
    parts = parts_of(device.id)
    if gpu is None:
        note = (report.message or "the driver does not list it") if report is not None else ""
        gone = report is not None and report.library == "ok"
        return DeviceSeen(
            id=device.id,
            kind=device.kind,
            node=device.node,
            index=device.index,
            present=False if gone else None,
            sample=DeviceSample(note=note),
            age_s=None,
        )
    return DeviceSeen(
        id=device.id,
        kind=device.kind,
        node=device.node,
        index=gpu.index if parts == 1 else device.index,
        present=gpu.present,
        sample=DeviceSample(
            util_share=gpu.util_share,
            memory_used_bytes=gpu.memory_used_bytes,
            memory_total_bytes=gpu.memory_total_bytes,
            power_w=None if gpu.power_w is None else gpu.power_w / parts,
            temperature_c=gpu.temperature_c,
            throttled=gpu.throttled,
            note=gpu.note or (", ".join(gpu.throttle_reasons) if gpu.throttled else ""),
        ),
        age_s=None if gpu.age_s is None else gpu.age_s + (report_age_s or 0.0),
    )


def memory_back(
    newest: Callable[[], tuple[Report | None, float | None]],
    devices: tuple[str, ...],
    deadline_s: float = MEMORY_BACK_S,
) -> str:
    """Wait until fresh readings of GPUs show that nobody computes there; "" then, else which does not give its memory back.

    A reading counts when it was made after this call began.
    """
    began, pause = time.monotonic(), threading.Event()
    waiting = {d: "no reading" for d in devices if is_gpu(d)}
    while waiting and time.monotonic() - began < deadline_s:
        report, age_s = newest()
        if report is not None and age_s is not None:
            made_s = time.monotonic() - age_s
            readings = {g.id: _card(g, made_s) for g in report.gpus}
            verdicts = {
                d: memory_verdict(readings.get(card_of(d)), killed_s=began, share=1 / parts_of(d)) for d in waiting
            }
            waiting = {d: v.why for d, v in verdicts.items() if v.state != "back"}
            if not waiting:
                return ""
        pause.wait(0.2)
    return "; ".join(f"GPU {d} did not give its memory back: {why}" for d, why in waiting.items())


def _card(gpu: GpuReading, made_s: float) -> CardReading:
    return CardReading(
        made_s=made_s - (gpu.age_s or 0.0),
        pids=gpu.pids,
        used_bytes=gpu.memory_used_bytes,
        total_bytes=gpu.memory_total_bytes,
    )
