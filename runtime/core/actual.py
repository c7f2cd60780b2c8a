"""What stands where: every body that occupies devices, from observation and record together."""

from typing import Literal

from planner.record import record
from runtime.core.fleet_event import UnitRole
from runtime.core.observation import Observation, ReplicaSeen
from runtime.core.state import ClusterState, Unit
from runtime.core.unit_belief import Seen, seen_units

Phase = Literal["ordered", "starting", "serving", "draining", "drained", "dead", "unknown"]

_PHASES: dict[str, Phase] = {
    "starting": "starting",
    "serving": "serving",
    "running": "serving",
    "draining": "draining",
    "quiescing": "draining",
    "drained": "drained",
    "quiesced": "drained",
    "dead": "dead",
    "unknown": "unknown",
}


@record
class Body:
    """One incarnation of a unit that holds its devices until it is gone.

    `ordered`: its start is recorded, nobody has seen it yet. `dead` includes the hung and those of an older epoch:
    all that is left to do is to clear it away.
    """

    unit: str
    epoch: int
    role: UnitRole
    devices: tuple[str, ...]
    phase: Phase
    leased: int = 0
    leaving: bool = False  # a drain, quiesce or stop was recorded for it


def bodies(obs: Observation, state: ClusterState) -> tuple[Body, ...]:
    """Every body, ordered by unit and epoch."""
    found = [_seen_body(u, state.units.get(u.id)) for u in seen_units(obs)]
    there = {(b.unit, b.epoch) for b in found}
    found += [_unseen_body(u) for u in state.units.values() if (u.id, u.epoch) not in there and u.status != "stopped"]
    return tuple(sorted(found, key=lambda b: (b.unit, b.epoch)))


def _seen_body(u: Seen, unit: Unit | None) -> Body:
    current = unit is not None and unit.epoch == u.epoch and unit.status not in ("dead", "stopped")
    phase = _PHASES[u.phase] if current else "dead"
    if phase == "starting" and unit is not None and unit.status in ("serving", "drained"):
        phase = "unknown"  # it has served: whoever tells of it has not heard of it yet
    return Body(
        unit=u.id,
        epoch=u.epoch,
        role="rollout" if isinstance(u, ReplicaSeen) else "train",
        devices=u.devices,
        phase=phase,
        leased=u.leased if isinstance(u, ReplicaSeen) else 0,
        leaving=current and unit is not None and unit.ordered("drain", "quiesce", "stop"),
    )


def _unseen_body(unit: Unit) -> Body:
    phase: Phase = "dead" if unit.status == "dead" else "ordered" if unit.status == "ordered" else "unknown"
    return Body(
        unit=unit.id,
        epoch=unit.epoch,
        role=unit.role,
        devices=unit.devices,
        phase=phase,
        leaving=unit.ordered("drain", "quiesce", "stop"),
    )
