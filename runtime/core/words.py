"""Events in words, for the log and the console: level, subject and one sentence."""

from collections.abc import Callable
from typing import assert_never

from planner.record import record
from runtime.api.wire import EventRow, Level
from runtime.core import event as ev
from runtime.core import fleet_event as fleet
from runtime.core import plan_event as plans
from runtime.core.drifting import drift_reason, retry_reason
from runtime.core.event import Event, Stored
from runtime.core.solved import SolvedPlan
from runtime.core.state import ClusterState

Display = Callable[[str], str]


@record
class Words:
    """One event for people."""

    message: str
    subject: str = ""
    level: Level = "info"


def row(stored: Stored, state: ClusterState) -> EventRow:
    """An event as the console shows it; `state` gives devices their names."""
    w = words(stored.event, state.display)
    return EventRow(
        seq=stored.seq,
        at_s=stored.at_s,
        level=w.level,
        kind=ev.kind(stored.event),
        message=w.message,
        subject=w.subject,
    )


def words(event: Event, display: Display) -> Words:
    """Level, subject and sentence of an event."""
    match event:
        case (
            fleet.DeviceJoined()
            | fleet.DeviceLost()
            | fleet.DeviceWentStale()
            | fleet.DeviceAnswered()
            | fleet.DeviceBecameHostBound()
            | fleet.DeviceCaughtUp()
            | fleet.DeviceQuarantined()
            | fleet.DeviceReleased()
        ):
            return _device_words(event, display(event.device))
        case fleet.DeviceDrifted():
            return _drift_words(event, display)
        case fleet.DeviceRetried():
            return Words(message=retry_reason(event, display(event.device)), subject=event.device)
        case fleet.SpeedsLearned():
            return Words(message=f"noted what {_names(tuple({s.device: None for s in event.speeds}), display)} showed")
        case fleet.UnitAppeared() | fleet.UnitServed() | fleet.UnitDrained() | fleet.UnitDied() | fleet.UnitStopped():
            return _unit_words(event)
        case fleet.UnitAdopted():
            what = f"{event.unit} on {_names(event.devices, display)} adopted as it is"
            return Words(message=what, subject=event.unit, level="warning")
        case fleet.StepOrdered():
            return Words(message=_step_words(event, display), subject=event.unit)
        case plans.OverrideSet() | plans.OverrideCleared() | plans.CommandAccepted() | plans.ReplanRequested():
            return _operator_words(event, display)
        case (
            plans.PlanningStarted()
            | plans.PlanAdopted()
            | plans.PlanProposed()
            | plans.PlanApproved()
            | plans.PlanRejected()
            | plans.ProposalExpired()
            | plans.PlanKept()
            | plans.PlanFoundInfeasible()
            | plans.PlanningFailed()
            | plans.PlanReached()
        ):
            return _plan_words(event, display)
        case fleet.CalibrationChanged():
            return _calibration_words(event)
        case _:
            return _run_words(event)


def _names(devices: tuple[str, ...], display: Display) -> str:
    return ", ".join(display(d) for d in devices)


def _by(author: str, reason: str) -> str:
    return (f" by {author}" if author else "") + (f": {reason}" if reason else "")


def _device_words(
    event: fleet.DeviceJoined
    | fleet.DeviceLost
    | fleet.DeviceWentStale
    | fleet.DeviceAnswered
    | fleet.DeviceBecameHostBound
    | fleet.DeviceCaughtUp
    | fleet.DeviceQuarantined
    | fleet.DeviceReleased,
    name: str,
) -> Words:
    match event:
        case fleet.DeviceJoined():
            return Words(message=f"{name} ({event.kind}) joined", subject=event.device)
        case fleet.DeviceLost():
            return Words(message=f"{name} lost ({event.reason})", subject=event.device, level="error")
        case fleet.DeviceWentStale():
            note = f" ({event.note})" if event.note else ""
            message = f"no news of {name} for {event.age_s:.0f} s{note}; it counts as there until that is known"
            return Words(message=message, subject=event.device, level="warning")
        case fleet.DeviceAnswered():
            return Words(message=f"{name} answers again", subject=event.device)
        case fleet.DeviceBecameHostBound():
            lag = "" if event.lag_share is None else f" by {event.lag_share:.0%}"
            message = f"{name} is behind its clock{lag}: the host is too slow, its figures do not count"
            return Words(message=message, subject=event.device, level="warning")
        case fleet.DeviceCaughtUp():
            return Words(message=f"{name} keeps its clock again", subject=event.device)
        case fleet.DeviceQuarantined():
            message = f"{name} quarantined after {event.failures} failures ({event.reason}); uncordon it to try again"
            return Words(message=message, subject=event.device, level="error")
        case fleet.DeviceReleased():
            return Words(message=f"{name} released from quarantine", subject=event.device)
        case _:
            assert_never(event)


def _drift_words(event: fleet.DeviceDrifted, display: Display) -> Words:
    rates = f"{event.measured_tokens_per_s:,.0f} instead of {event.assumed_tokens_per_s:,.0f} tokens/s"
    message = f"{drift_reason(event, _names(event.devices, display))} ({rates})"
    return Words(message=message, subject=event.devices[0], level="warning" if event.speed < 1 else "info")


def _unit_words(
    event: fleet.UnitAppeared | fleet.UnitServed | fleet.UnitDrained | fleet.UnitDied | fleet.UnitStopped,
) -> Words:
    unit = event.unit
    match event:
        case fleet.UnitAppeared():
            pid = "" if event.pid is None else f" (pid {event.pid})"
            return Words(message=f"{unit} starting{pid}", subject=unit)
        case fleet.UnitServed():
            version = "" if event.version is None else f" at version {event.version}"
            pid = "" if event.pid is None else f" (pid {event.pid})"
            message = f"{unit}{pid} in service{version}, {event.after_s:.1f} s after its start"
            return Words(message=message, subject=unit)
        case fleet.UnitDrained():
            return Words(message=f"{unit} holds nothing any more", subject=unit)
        case fleet.UnitDied():
            rest = f"; its {event.held} samples go on elsewhere from their tokens" if event.held else ""
            message = f"{unit} {'hung' if event.hung else 'died'} ({event.reason}){rest}"
            return Words(message=message, subject=unit, level="error")
        case fleet.UnitStopped():
            return Words(message=f"{unit} stopped, its devices are free", subject=unit)
        case _:
            assert_never(event)


def _step_words(event: fleet.StepOrdered, display: Display) -> str:
    verb = event.id.split("-", 1)[0]
    on = f" on {_names(event.devices, display)}" if event.devices else ""
    at = " at its next step boundary" if verb == "quiesce" else ""
    return f"{verb} {event.unit}{on}{at}" + (f" ({event.reason})" if event.reason else "")


def _operator_words(
    event: plans.OverrideSet | plans.OverrideCleared | plans.CommandAccepted | plans.ReplanRequested, display: Display
) -> Words:
    match event:
        case plans.OverrideSet():
            o = event.override
            what = (
                f"{display(o.device)} "
                + {
                    "cordon": "cordoned",
                    "drain": "drained",
                    "pin": f"pinned to {o.role}",
                }[o.kind]
            )
            return Words(message=what + _by(o.author, o.reason), subject=o.device, level="warning")
        case plans.OverrideCleared():
            what = f"{display(event.device)} {'unpinned' if event.kind == 'pin' else 'uncordoned'}"
            return Words(message=what + _by(event.author, event.reason), subject=event.device)
        case plans.CommandAccepted():
            by = f" ({event.author})" if event.author else ""
            return Words(message=f"{event.name}{by}: {event.message}", subject=event.device or "")
        case plans.ReplanRequested():
            return Words(message="new plan asked for" + _by(event.author, event.reason))
        case _:
            assert_never(event)


def _solved_words(s: SolvedPlan, display: Display) -> str:
    train = s.plan.train
    trains = f"train on {_names(train.devices, display)}" if train else "nobody trains"
    rollouts = ", ".join(_names(p.devices, display) for p in s.plan.rollouts)
    rate = f"{s.prediction.tokens_per_s:,.0f} tokens/s predicted, gap {s.gap:.1%}, solved in {s.solve_s:.1f} s"
    return f"{trains}; rollout on {rollouts or 'nothing'} ({rate})"


def _plan_words(
    event: plans.PlanningStarted
    | plans.PlanAdopted
    | plans.PlanProposed
    | plans.PlanApproved
    | plans.PlanRejected
    | plans.ProposalExpired
    | plans.PlanKept
    | plans.PlanFoundInfeasible
    | plans.PlanningFailed
    | plans.PlanReached,
    display: Display,
) -> Words:
    match event:
        case plans.PlanningStarted():
            return Words(message=f"planning: {event.trigger}")
        case plans.PlanAdopted():
            s = event.solved
            return Words(message=f"plan r{s.rev} in force ({s.trigger}): {_solved_words(s, display)}")
        case plans.PlanProposed():
            s, gain = event.solved, event.gain_share
            more = "" if gain is None else f", {gain:+.1%} tokens/s"
            message = f"plan r{s.rev} proposed ({s.trigger}){more}: {_solved_words(s, display)}"
            return Words(message=message, level="warning")
        case plans.PlanApproved():
            return Words(message=f"plan r{event.rev} approved{_by(event.author, '')}")
        case plans.PlanRejected():
            return Words(message=f"plan r{event.rev} rejected{_by(event.author, event.reason)}")
        case plans.ProposalExpired():
            return Words(message=f"proposal r{event.rev} expired unanswered", level="warning")
        case plans.PlanKept():
            why = event.why or f"nothing better found in {event.solve_s:.1f} s"
            return Words(message=f"plan kept ({event.trigger}): {why}")
        case plans.PlanFoundInfeasible():
            return Words(message=f"no plan exists ({event.trigger}): {event.message}", level="error")
        case plans.PlanningFailed():
            return Words(message=f"planning failed ({event.trigger}): {event.message}", level="error")
        case plans.PlanReached():
            return Words(message=f"plan r{event.rev} is in place")
        case _:
            assert_never(event)


def _calibration_words(event: fleet.CalibrationChanged) -> Words:
    verb = "generates" if event.role == "rollout" else "trains"
    devices = f"{event.device_count} device{'' if event.device_count == 1 else 's'}"
    message = (
        f"{event.kind} {verb} at {event.factor:.2f} of the modelled speed, not {event.before:.2f} "
        f"({event.measured_tokens_per_s:,.0f} beside {event.modelled_tokens_per_s:,.0f} tokens/s, {event.samples} samples "
        f"of {devices}); the next plan counts with it"
    )
    return Words(message=message)


def _run_words(
    event: ev.DaemonStarted
    | plans.FloorWaived
    | plans.MigrationBlocked
    | plans.MigrationUnblocked
    | ev.FlowFellSilent
    | ev.FlowAnswered
    | ev.MilestoneReached
    | ev.RunEndRequested
    | ev.RunEnded,
) -> Words:
    match event:
        case ev.DaemonStarted():
            what = "takes the living run over as it is" if event.adopted else "starts"
            return Words(message=f"daemon {event.epoch} (pid {event.pid}) {what}")
        case plans.FloorWaived():
            return Words(message=f"rollout pauses for a while: {event.reason}", level="warning")
        case plans.MigrationBlocked():
            options = f"; options: {'; '.join(event.options)}" if event.options else ""
            return Words(message=f"blocked: {event.reason}{options}", level="error")
        case plans.MigrationUnblocked():
            return Words(message="no longer blocked")
        case ev.FlowFellSilent():
            age = "" if event.age_s is None else f" for {event.age_s:.0f} s"
            return Words(message=f"flow does not answer{age}; replicas buffer and wait", level="error")
        case ev.FlowAnswered():
            pid = "" if event.pid is None else f" (pid {event.pid})"
            return Words(message=f"flow answers{pid}")
        case ev.MilestoneReached():
            return Words(message=f"{event.name}: {event.detail}")
        case ev.RunEndRequested():
            by = f" by {event.author}" if event.author else ""
            return Words(message=f"the run ends{by}: {event.reason}")
        case ev.RunEnded():
            return Words(message=f"run ended: {event.reason}", level="error" if event.failed else "info")
        case _:
            assert_never(event)
