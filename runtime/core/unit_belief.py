"""What became of the units: appeared, in service, drained, dead, hung, gone."""

from collections.abc import Mapping

from planner.record import record, replace
from runtime.core.event import Event
from runtime.core.fleet_event import UnitAdopted, UnitAppeared, UnitDied, UnitDrained, UnitRole, UnitServed, UnitStopped
from runtime.core.limits import Limits, Progress, Since
from runtime.core.observation import Observation, ReplicaSeen, TrainerSeen
from runtime.core.state import ClusterState, Unit

Seen = ReplicaSeen | TrainerSeen


def seen_units(obs: Observation) -> tuple[Seen, ...]:
    """Replicas and trainers together."""
    return (*obs.replicas, *obs.trainers)


@record
class Look:
    """One look at the units."""

    limits: Limits
    since: Since
    progress: Mapping[str, Progress]
    held: Mapping[tuple[str, int], int]  # samples leased, by (unit, epoch), as flow has it
    flow_fresh: bool
    lost: frozenset[str]  # devices
    now_s: float

    def lost_device(self, unit: Unit) -> bool:
        """Whether the unit stood on a device that is gone."""
        return any(d in self.lost for d in unit.devices)


def unit_events(obs: Observation, state: ClusterState, look: Look) -> list[Event]:
    """What changed about units between the state and the observation."""
    seen = {(u.id, u.epoch): u for u in seen_units(obs)}
    events: list[Event] = []
    for u in seen.values():
        known = state.units.get(u.id)
        if known is None or known.epoch < u.epoch:
            role: UnitRole = "rollout" if isinstance(u, ReplicaSeen) else "train"
            events.append(UnitAdopted(unit=u.id, role=role, epoch=u.epoch, devices=u.devices))
    for unit in state.units.values():
        if unit.status == "stopped":
            continue
        found = seen.get((unit.id, unit.epoch))
        if found is None:
            events += _absent(unit, look)
        elif unit.status != "dead" and not unit.ordered("stop"):  # an end that was ordered is no death
            cause = _death(unit, found, look)
            events += _progressed(unit, found, look.now_s) if cause is None else [_with_held(cause, unit, found, look)]
    return events


def _with_held(cause: UnitDied, unit: Unit, found: Seen, look: Look) -> UnitDied:
    leased = found.leased if isinstance(found, ReplicaSeen) else 0
    held = max(leased, look.held.get((unit.id, unit.epoch), 0))
    return replace(cause, held=held, device_lost=look.lost_device(unit))


def _absent(unit: Unit, look: Look) -> list[Event]:
    """A unit of the record that the observation does not show."""
    absent_s = look.since.held_s(f"absent-{unit.epoch}", unit.id)
    if unit.ordered("stop"):
        stopping_s = look.since.held_s(f"stopping-{unit.epoch}", unit.id)
        settle_s = look.limits.unseen_settle_s if unit.status == "ordered" else look.limits.settle_s
        gone = min(absent_s, stopping_s) >= settle_s
        return [UnitStopped(unit=unit.id, epoch=unit.epoch)] if gone else []
    if unit.status == "dead":
        return []
    if unit.status == "ordered":
        if look.now_s - unit.ordered_at_s <= look.limits.appear_s:
            return []
        reason = f"never appeared within {look.limits.appear_s:.0f} s"
    elif absent_s >= look.limits.vanish_s:
        reason = "disappeared"
    else:
        return []
    held = look.held.get((unit.id, unit.epoch), 0)
    return [UnitDied(unit=unit.id, epoch=unit.epoch, reason=reason, held=held, device_lost=look.lost_device(unit))]


def _death(unit: Unit, found: Seen, look: Look) -> UnitDied | None:
    """The sure sign of its death, or None."""
    limits = look.limits
    match found.phase:
        case "dead":
            ended = "its device was lost" if look.lost_device(unit) else "its process ended"
            return UnitDied(unit=unit.id, epoch=unit.epoch, reason=found.reason or ended)
        case "unknown":
            silent_s = max(look.since.held_s(f"unknown-{unit.epoch}", unit.id), found.age_s or 0.0)
            return _hung(unit, f"no sign for {silent_s:.0f} s") if silent_s > limits.unknown_s else None
        case "starting":
            # A unit that served before looks like this too: while its new daemon or flow has not heard of it yet.
            served = unit.status not in ("ordered", "seen")
            again_s = look.since.held_s(f"starting-{unit.epoch}", unit.id)
            late = (again_s if served else look.now_s - unit.ordered_at_s) > limits.start_s
            return _hung(unit, f"not in service within {limits.start_s:.0f} s") if late else None
        case "draining" if unit.ordered("drain"):
            draining_s = look.since.held_s(f"draining-{unit.epoch}", unit.id)
            if draining_s > limits.drain_s:
                return _hung(unit, f"not drained within {draining_s:.0f} s")
        case "quiescing" if unit.ordered("quiesce"):
            quiescing_s = look.since.held_s(f"quiescing-{unit.epoch}", unit.id)
            if quiescing_s > limits.trainer_silent_s:
                return _hung(unit, f"no step boundary within {quiescing_s:.0f} s")
        case _:
            pass
    if isinstance(found, TrainerSeen):
        silent = found.age_s is not None and found.age_s > limits.trainer_silent_s
        return _hung(unit, f"silent for {found.age_s:.0f} s") if silent else None
    return _stalled(unit, found, look)


def _stalled(unit: Unit, found: ReplicaSeen, look: Look) -> UnitDied | None:
    """Liveness of a replica is an exchange with flow and a generated token, not that its process answers."""
    if not look.flow_fresh:
        return None  # flow's silence makes every exchange old
    if found.age_s is not None and found.age_s > look.limits.exchange_s:
        return _hung(unit, f"last exchange {found.age_s:.0f} s ago")
    still = look.progress.get(f"{unit.id}:{unit.epoch}")
    still_s = 0.0 if still is None else look.now_s - still.since_s
    if found.running > 0 and still_s > look.limits.progress_s:
        return _hung(unit, f"runs {found.running} samples and decoded nothing for {still_s:.0f} s")
    return None


def _hung(unit: Unit, reason: str) -> UnitDied:
    return UnitDied(unit=unit.id, epoch=unit.epoch, reason=reason, hung=True)


def _progressed(unit: Unit, found: Seen, now_s: float) -> list[Event]:
    """Good news of a living unit."""
    events: list[Event] = []
    if unit.status == "ordered" and found.phase == "starting":
        events.append(UnitAppeared(unit=unit.id, epoch=unit.epoch, pid=found.pid))
    if unit.status in ("ordered", "seen") and found.phase in ("serving", "running"):
        version = found.version if isinstance(found, ReplicaSeen) else found.step
        after_s = max(0.0, now_s - unit.ordered_at_s)
        events.append(UnitServed(unit=unit.id, epoch=unit.epoch, version=version, after_s=after_s, pid=found.pid))
    if unit.status in ("ordered", "seen", "serving") and found.phase in ("drained", "quiesced"):
        events.append(UnitDrained(unit=unit.id, epoch=unit.epoch))
    return events
