"""Devices and bodies of a simulated fleet in virtual time: they are moved, never computed with."""

import dataclasses
import random
from collections.abc import Iterable

from planner.cluster import Device
from planner.record import record
from runtime.backends.simulated.script import (
    Behaviour,
    DeviceJoins,
    DeviceLeaves,
    DeviceSlows,
    Fault,
    UnitDies,
    UnitHangs,
)
from runtime.core.action import (
    DrainReplica,
    QuiesceTrainer,
    StartReplica,
    StartTrainer,
    Step,
    StopReplica,
    StopTrainer,
)
from runtime.core.observation import DeviceSample, DeviceSeen, ReplicaPhase, TrainerPhase

# A body's phase in the words of an observation.
REPLICA_PHASES: dict[str, ReplicaPhase] = {
    "starting": "starting",
    "serving": "serving",
    "draining": "draining",
    "drained": "drained",
    "dead": "dead",
}
TRAINER_PHASES: dict[str, TrainerPhase] = {
    "starting": "starting",
    "serving": "running",
    "draining": "quiescing",
    "drained": "quiesced",
    "dead": "dead",
}


@dataclasses.dataclass
class SimDevice:
    """A device and whether anybody can see it."""

    device: Device
    present: bool | None = True
    silent_since_s: float = 0.0


@dataclasses.dataclass
class SimBody:
    """One incarnation of a unit."""

    id: str
    epoch: int
    trains: bool
    devices: tuple[str, ...]
    phase: str  # as in the observation, in the words of replicas
    until_s: float  # when the phase ends by itself
    pid: int
    hung_since_s: float | None = None
    reason: str = ""
    served: bool = False  # when it died: its samples are still leased to it


@record
class Effect:
    """A step on its way."""

    at_s: float
    number: int
    step: Step


class SimFleet:
    """`advance(now)` carries out what is due; `conflicts` lists every attempt to give a device to two bodies."""

    def __init__(self, devices: Iterable[Device], behaviour: Behaviour, faults: Iterable[Fault], seed: int) -> None:
        self.devices = {d.id: SimDevice(device=d) for d in devices}
        self.bodies: dict[tuple[str, int], SimBody] = {}
        self.speeds: dict[str, float] = {}  # shares, of devices that were slowed
        self.conflicts: list[str] = []
        self.applied: list[Step] = []
        self.now_s = 0.0
        self._behaviour = behaviour
        self._random = random.Random(seed)
        self._faults = sorted(faults, key=lambda f: f.at_s)
        self._effects: list[Effect] = []
        self._ended: dict[str, int] = {}  # unit -> newest epoch that was stopped
        self._pids = 100_000
        self._numbers = 0

    def seen(self, now_s: float) -> tuple[DeviceSeen, ...]:
        """The devices as an observation has them."""
        return tuple(
            DeviceSeen(
                id=d.device.id,
                kind=d.device.kind,
                node=d.device.node,
                index=d.device.index,
                present=d.present,
                sample=DeviceSample(),
                age_s=0.0 if d.present is not None else now_s - d.silent_since_s,
            )
            for d in self.devices.values()
        )

    def speed(self, body: SimBody) -> float:
        """Share of its speed that a body works at: that of its slowest device."""
        return min(self.speeds.get(d, 1.0) for d in body.devices)

    def inject(self, fault: Fault) -> None:
        """One more fault."""
        self._faults = sorted([*self._faults, fault], key=lambda f: f.at_s)

    def begin(self, step: Step) -> None:
        """Take a step on; it may be lost or late."""
        self.applied.append(step)
        b, late_s = self._behaviour, 0.0
        if self.now_s < b.lossy_until_s:
            if self._random.random() < b.lost_share:
                return
            late_s = self._random.random() * b.late_s
        self._numbers += 1
        self._effects.append(Effect(at_s=self.now_s + late_s, number=self._numbers, step=step))

    def advance(self, now_s: float) -> None:
        """Carry out what is due until `now_s`, in order of time."""
        while True:
            due: list[tuple[float, int, Effect | Fault]] = [
                (e.at_s, e.number, e) for e in self._effects if e.at_s <= now_s
            ]
            due += [(f.at_s, -1, f) for f in self._faults if f.at_s <= now_s]
            if not due:
                break
            at_s, _, first = min(due, key=lambda x: x[:2])
            self.now_s = max(self.now_s, at_s)
            self._ripen()
            if isinstance(first, Effect):
                self._effects.remove(first)
                self._carry_out(first.step)
            else:
                self._faults.remove(first)
                self._strike(first)
        self.now_s = max(self.now_s, now_s)
        self._ripen()

    def _ripen(self) -> None:
        """Phases that end by themselves."""
        following = {"starting": "serving", "draining": "drained"}
        for b in self.bodies.values():
            if b.phase in following and b.until_s <= self.now_s and b.hung_since_s is None:
                b.phase, b.until_s = following[b.phase], float("inf")

    def _carry_out(self, step: Step) -> None:
        match step:
            case StartReplica():
                self._start(step.replica, step.epoch, step.devices, trains=False)
            case StartTrainer():
                self._start(step.trainer, step.epoch, step.devices, trains=True)
            case DrainReplica():
                self._let_go(step.replica, step.epoch, self._behaviour.drain_s)
            case QuiesceTrainer():
                self._let_go(step.trainer, step.epoch, self._behaviour.quiesce_s)
            case StopReplica():
                self._stop(step.replica, step.epoch)
            case StopTrainer():
                self._stop(step.trainer, step.epoch)

    def _start(self, unit: str, epoch: int, devices: tuple[str, ...], *, trains: bool) -> None:
        if epoch <= self._ended.get(unit, 0) or any(b.id == unit and b.epoch >= epoch for b in self.bodies.values()):
            return
        holders = [b for b in self.bodies.values() if set(b.devices) & set(devices)]
        holders += [b for b in self.bodies.values() if trains and b.trains and b not in holders]
        if holders:
            self.conflicts.append(f"{unit}:{epoch} on {devices} held by {[(b.id, b.epoch) for b in holders]}")
        self._pids += 1
        body = SimBody(
            id=unit,
            epoch=epoch,
            trains=trains,
            devices=devices,
            phase="starting",
            until_s=self.now_s + self._behaviour.start_s,
            pid=self._pids,
        )
        if not all(d in self.devices and self.devices[d].present for d in devices):
            body.phase, body.reason = "dead", "no such device"
        self.bodies[unit, epoch] = body

    def _let_go(self, unit: str, epoch: int, seconds: float) -> None:
        b = self.bodies.get((unit, epoch))
        if b is not None and b.phase in ("serving", "starting"):
            b.phase, b.until_s = "draining", self.now_s + seconds

    def _stop(self, unit: str, epoch: int) -> None:
        self._ended[unit] = max(epoch, self._ended.get(unit, 0))
        for key in [k for k in self.bodies if k[0] == unit and k[1] <= epoch]:
            del self.bodies[key]

    def _strike(self, fault: Fault) -> None:
        match fault:
            case DeviceJoins():
                self.devices[fault.device.id] = SimDevice(device=fault.device)
            case DeviceSlows():
                self.speeds[fault.device] = fault.speed
            case DeviceLeaves():
                self._leave(fault)
            case UnitDies():
                for b in self._on(fault.device):
                    b.served, b.phase, b.reason = b.phase == "serving", "dead", fault.reason
            case UnitHangs():
                for b in self._on(fault.device):
                    b.hung_since_s = self.now_s

    def _leave(self, fault: DeviceLeaves) -> None:
        d = self.devices.get(fault.device)
        if d is None:
            return
        if not fault.noticed:
            d.present, d.silent_since_s = None, self.now_s
            if fault.returns_s is not None:
                self.inject(DeviceJoins(at_s=fault.returns_s, device=d.device))
            return
        d.present = False
        for b in self._on(fault.device):
            b.served, b.phase, b.reason = b.phase == "serving", "dead", "its device is gone"

    def _on(self, device: str) -> list[SimBody]:
        return [b for b in self.bodies.values() if device in b.devices and b.phase != "dead"]
