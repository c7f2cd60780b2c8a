"""state = fold(events): total (every event has a meaning in every state) and deterministic."""

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from typing import Any

from planner.record import replace
from runtime.api.wire import CommandResult
from runtime.core import event as ev
from runtime.core import fleet_event as fleet
from runtime.core import plan_event as plans
from runtime.core.drifting import drift_reason, retry_reason
from runtime.core.event import Stored
from runtime.core.needing import needed, unanswered
from runtime.core.solved import PlanCause, SolvedPlan
from runtime.core.state import ClusterState, DeviceBelief, DriftPlanned, OpenProposal, Unit, UnitStatus

HEALTHY_STRETCH_S = 60.0  # serving that long clears a device's failures
KEPT_ANSWERS = 256


def fold(state: ClusterState, events: Iterable[Stored]) -> ClusterState:
    """The state after `events`."""
    return reduce(step, events, state)


def step(state: ClusterState, stored: Stored) -> ClusterState:
    """The state after one event."""
    handler = _HANDLERS.get(type(stored.event))
    return state if handler is None else handler(state, stored.event, stored.at_s)


def _device(state: ClusterState, device: str, **changes: Any) -> ClusterState:
    known = state.devices.get(device)
    if known is None:
        return state
    return replace(state, devices={**state.devices, device: replace(known, **changes)})


def _unit(state: ClusterState, unit: str, epoch: int, status: UnitStatus, at_s: float, **changes: Any) -> ClusterState:
    known = state.units.get(unit)
    if known is None or known.epoch != epoch:
        return state
    return replace(state, units={**state.units, unit: replace(known, status=status, since_s=at_s, **changes)})


def _needed(state: ClusterState, cause: PlanCause, reason: str, at_s: float) -> ClusterState:
    """A new plan is needed for one more reason."""
    rev = state.need_rev + 1
    return replace(state, need=needed(state.need, cause, reason, at_s, rev=rev), need_rev=rev)


def _answered(state: ClusterState, need_rev: int) -> ClusterState:
    """The planner answered the reasons up to `need_rev`."""
    return replace(state, need=unanswered(state.need, need_rev), planning_failed_at_s=None)


def _planning_failed(state: ClusterState, e: plans.PlanningFailed, at_s: float) -> ClusterState:
    # With a plan in force the need stands and is tried again; the first plan's failure is for whoever starts the run.
    need = state.need if state.plan is not None else unanswered(state.need, e.need_rev)
    return replace(state, need=need, planning_failed_at_s=at_s)


def _daemon_started(state: ClusterState, e: ev.DaemonStarted, at_s: float) -> ClusterState:
    # Whoever starts a daemon wants the run to go on: that is newer than an end that was asked for and not reached.
    state = replace(state, daemon_epoch=e.epoch, ending="", ended="")
    if not e.adopted:  # a run that ended and starts again: nothing of it stands, and the fleet may be another
        units = {k: replace(u, status="stopped", since_s=at_s) for k, u in state.units.items()}
        state = replace(
            state,
            units=units,
            milestones=(),
            plan=None,
            proposal=None,
            reached_rev=None,
            need=None,
            planning_failed_at_s=None,
            floor_waived_rev=None,
            infeasible="",
            blocked="",
            flow_silent=None,
            calibration={},
            learned={},
            drift_planned=None,
            devices={k: replace(d, speed=1.0, recoveries=0) for k, d in state.devices.items()},
        )
    return _needed(state, "start", "the run starts", at_s) if state.plan is None and state.need is None else state


def _device_joined(state: ClusterState, e: fleet.DeviceJoined, at_s: float) -> ClusterState:
    old = state.devices.get(e.device)
    belief = DeviceBelief(
        id=e.device,
        kind=e.kind,
        node=e.node,
        index=e.index,
        region=e.region,
        failures=old.failures if old else 0,
        failed_at_s=old.failed_at_s if old else 0.0,
    )
    state = replace(state, devices={**state.devices, e.device: belief})
    if state.plan is None and state.need is not None:
        return state  # part of the first fleet
    return _needed(state, "join", f"{belief.display} joined", at_s)


def _device_lost(state: ClusterState, e: fleet.DeviceLost, at_s: float) -> ClusterState:
    known = state.devices.get(e.device)
    if known is None or known.lost:
        return state
    state = _device(state, e.device, lost=e.reason or "gone", stale=False, host_bound=False, speed=1.0)
    state = replace(state, learned={key: s for key, s in state.learned.items() if key[0] != e.device})
    return _needed(state, "loss", f"{known.display} lost", at_s)


def _device_quarantined(state: ClusterState, e: fleet.DeviceQuarantined, at_s: float) -> ClusterState:
    state = _device(state, e.device, quarantined=e.reason)
    return _needed(state, "quarantine", f"{state.display(e.device)} quarantined", at_s)


def _device_released(state: ClusterState, e: fleet.DeviceReleased, at_s: float) -> ClusterState:
    state = _device(state, e.device, quarantined="", failures=0)
    return _needed(state, "operator", f"{state.display(e.device)} released", at_s)


def _device_drifted(state: ClusterState, e: fleet.DeviceDrifted, at_s: float) -> ClusterState:
    for device in e.devices:
        state = _device(state, device, speed=e.speed, recoveries=e.recoveries)
    if state.plan is None:
        return state  # the first plan counts with it
    names = ", ".join(state.display(d) for d in e.devices)
    return _needed(state, "drift", drift_reason(e, names), at_s)


def _device_retried(state: ClusterState, e: fleet.DeviceRetried, at_s: float) -> ClusterState:
    state = _device(state, e.device, speed=1.0, recoveries=e.recoveries)
    return state if state.plan is None else _needed(state, "drift", retry_reason(e, state.display(e.device)), at_s)


def _speeds_learned(state: ClusterState, e: fleet.SpeedsLearned, at_s: float) -> ClusterState:
    there = {(s.device, s.role): s for s in e.speeds if s.device in state.devices and not state.devices[s.device].lost}
    return replace(state, learned={**state.learned, **there})


def _step_ordered(state: ClusterState, e: fleet.StepOrdered, at_s: float) -> ClusterState:
    verb, kind = e.id.split(":", 1)[0].split("-", 1)
    if verb != "start":
        known = state.units.get(e.unit)
        if known is None or e.id in known.orders:
            return state
        return replace(state, units={**state.units, e.unit: replace(known, orders=(*known.orders, e.id))})
    known = state.units.get(e.unit)
    if known is not None and known.epoch >= e.epoch:
        return state
    unit = Unit(
        id=e.unit,
        role="train" if kind == "trainer" else "rollout",
        epoch=e.epoch,
        devices=e.devices,
        status="ordered",
        since_s=at_s,
        ordered_at_s=at_s,
        orders=(e.id,),
    )
    names = state.names if unit.role == "train" else {**state.names, e.devices: e.unit}
    return replace(state, units={**state.units, e.unit: unit}, names=names)


def _unit_adopted(state: ClusterState, e: fleet.UnitAdopted, at_s: float) -> ClusterState:
    unit = Unit(
        id=e.unit,
        role=e.role,
        epoch=e.epoch,
        devices=e.devices,
        status="seen",
        since_s=at_s,
        ordered_at_s=at_s,
    )
    names = state.names if e.role == "train" else {**state.names, e.devices: e.unit}
    return replace(state, units={**state.units, e.unit: unit}, names=names)


def _unit_served(state: ClusterState, e: fleet.UnitServed, at_s: float) -> ClusterState:
    known = state.units.get(e.unit)
    if known is not None and known.epoch == e.epoch:
        state = replace(state, start_s={**state.start_s, known.role: e.after_s})
    return _unit(state, e.unit, e.epoch, "serving", at_s, served_at_s=at_s)


def _unit_died(state: ClusterState, e: fleet.UnitDied, at_s: float) -> ClusterState:
    unit = state.units.get(e.unit)
    if unit is None or unit.epoch != e.epoch or unit.status in ("dead", "stopped"):
        return state
    healthy = unit.served_at_s is not None and at_s - unit.served_at_s >= HEALTHY_STRETCH_S
    state = _unit(state, e.unit, e.epoch, "dead", at_s, reason=e.reason, hung=e.hung)
    if e.device_lost:
        return state
    for device in unit.devices:
        known = state.devices.get(device)
        failures = 1 if known is None or healthy else known.failures + 1
        state = _device(state, device, failures=failures, failed_at_s=at_s)
    return state


def _same_place(kind: str) -> tuple[str, ...]:
    return ("pin",) if kind == "pin" else ("cordon", "drain")


def _override_set(state: ClusterState, e: plans.OverrideSet, at_s: float) -> ClusterState:
    o = e.override
    kept = tuple(x for x in state.overrides if x.device != o.device or x.kind not in _same_place(o.kind))
    state = replace(state, overrides=(*kept, o), override_rev=e.rev)
    name = state.display(o.device)
    what = f"pin {name} to {o.role}" if o.kind == "pin" else f"{o.kind} {name}"
    return _needed(state, "operator", what, at_s)


def _override_cleared(state: ClusterState, e: plans.OverrideCleared, at_s: float) -> ClusterState:
    kept = tuple(x for x in state.overrides if x.device != e.device or x.kind not in _same_place(e.kind))
    state = replace(state, overrides=kept, override_rev=e.rev)
    verb = "unpin" if e.kind == "pin" else "uncordon"
    return _needed(state, "operator", f"{verb} {state.display(e.device)}", at_s)


def _command_accepted(state: ClusterState, e: plans.CommandAccepted, at_s: float) -> ClusterState:
    answer = CommandResult(accepted=True, message=e.message, override_rev=e.override_rev, plan_rev=e.plan_rev)
    kept = list(state.answers.items())[-(KEPT_ANSWERS - 1) :]
    return replace(state, answers={**dict(kept), e.key: answer})


def _in_force(state: ClusterState, solved: SolvedPlan) -> ClusterState:
    return replace(
        state, plan=solved, plan_rev=max(state.plan_rev, solved.rev), proposal=None, infeasible="", blocked=""
    )


def _planning_started(state: ClusterState, e: plans.PlanningStarted, at_s: float) -> ClusterState:
    if not e.drift:
        return state
    slow = frozenset(d.id for d in state.present if d.speed < 1)
    return replace(state, drift_planned=DriftPlanned(at_s=at_s, slow=slow, doubtful=frozenset(e.doubtful)))


def _plan_proposed(state: ClusterState, e: plans.PlanProposed, at_s: float) -> ClusterState:
    proposal = OpenProposal(solved=e.solved, expires_at_s=e.expires_at_s, gain_share=e.gain_share)
    rev = max(state.plan_rev, e.solved.rev)
    return replace(_answered(state, e.need_rev), proposal=proposal, plan_rev=rev, infeasible="")


def _plan_approved(state: ClusterState, e: plans.PlanApproved, at_s: float) -> ClusterState:
    if state.proposal is None or state.proposal.solved.rev != e.rev:
        return state
    return _in_force(state, state.proposal.solved)


def _proposal_closed(state: ClusterState, e: plans.PlanRejected | plans.ProposalExpired, at_s: float) -> ClusterState:
    if state.proposal is None or state.proposal.solved.rev != e.rev:
        return state
    return replace(state, proposal=None)


def _milestone(state: ClusterState, e: ev.MilestoneReached, at_s: float) -> ClusterState:
    return state if e.name in state.milestones else replace(state, milestones=(*state.milestones, e.name))


def _run_ended(state: ClusterState, e: ev.RunEnded, at_s: float) -> ClusterState:
    units = {k: replace(u, status="stopped", since_s=at_s) for k, u in state.units.items()}
    return replace(state, ended=e.reason, units=units, need=None, proposal=None)


Handler = Callable[[ClusterState, Any, float], ClusterState]

_HANDLERS: Mapping[type, Handler] = {
    ev.DaemonStarted: _daemon_started,
    fleet.DeviceJoined: _device_joined,
    fleet.DeviceLost: _device_lost,
    fleet.DeviceWentStale: lambda s, e, t: _device(s, e.device, stale=True),
    fleet.DeviceAnswered: lambda s, e, t: _device(s, e.device, stale=False),
    fleet.DeviceBecameHostBound: lambda s, e, t: _device(s, e.device, host_bound=True),
    fleet.DeviceCaughtUp: lambda s, e, t: _device(s, e.device, host_bound=False),
    fleet.DeviceQuarantined: _device_quarantined,
    fleet.DeviceReleased: _device_released,
    fleet.DeviceDrifted: _device_drifted,
    fleet.DeviceRetried: _device_retried,
    fleet.SpeedsLearned: _speeds_learned,
    fleet.StepOrdered: _step_ordered,
    fleet.UnitAppeared: lambda s, e, t: _unit(s, e.unit, e.epoch, "seen", t),
    fleet.UnitAdopted: _unit_adopted,
    fleet.UnitServed: _unit_served,
    fleet.UnitDrained: lambda s, e, t: _unit(s, e.unit, e.epoch, "drained", t),
    fleet.UnitDied: _unit_died,
    fleet.UnitStopped: lambda s, e, t: _unit(s, e.unit, e.epoch, "stopped", t),
    plans.OverrideSet: _override_set,
    plans.OverrideCleared: _override_cleared,
    plans.CommandAccepted: _command_accepted,
    plans.ReplanRequested: lambda s, e, t: _needed(s, "operator", "asked by the operator", t),
    plans.PlanningStarted: _planning_started,
    plans.PlanAdopted: lambda s, e, t: _answered(_in_force(s, e.solved), e.need_rev),
    plans.PlanProposed: _plan_proposed,
    plans.PlanApproved: _plan_approved,
    plans.PlanRejected: _proposal_closed,
    plans.ProposalExpired: _proposal_closed,
    plans.PlanKept: lambda s, e, t: replace(_answered(s, e.need_rev), infeasible="", proposal=None),
    plans.PlanFoundInfeasible: lambda s, e, t: replace(_answered(s, e.need_rev), infeasible=e.message),
    plans.PlanningFailed: _planning_failed,
    fleet.CalibrationChanged: lambda s, e, t: replace(s, calibration={**s.calibration, (e.kind, e.role): e.factor}),
    plans.PlanReached: lambda s, e, t: replace(s, reached_rev=e.rev, blocked=""),
    plans.FloorWaived: lambda s, e, t: replace(s, floor_waived_rev=e.rev),
    plans.MigrationBlocked: lambda s, e, t: replace(s, blocked="; ".join((e.reason, *e.options))),
    plans.MigrationUnblocked: lambda s, e, t: replace(s, blocked=""),
    ev.FlowFellSilent: lambda s, e, t: replace(s, flow_silent=True),
    ev.FlowAnswered: lambda s, e, t: replace(s, flow_silent=False),
    ev.MilestoneReached: _milestone,
    ev.RunEndRequested: lambda s, e, t: replace(s, ending=e.reason),
    ev.RunEnded: _run_ended,
}
