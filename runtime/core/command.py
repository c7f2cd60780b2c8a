"""Commands against the state: what is recorded and answered, or RefusedError. Pure and idempotent."""

import difflib

from planner.override import Override, OverrideKind, Role
from runtime.api.wire import Command, CommandResult
from runtime.core.event import Event, RunEndRequested
from runtime.core.fleet_event import DeviceReleased
from runtime.core.plan_event import (
    CommandAccepted,
    OverrideCleared,
    OverrideSet,
    PlanApproved,
    PlanRejected,
    ReplanRequested,
)
from runtime.core.state import ClusterState
from runtime.errors import RefusedError


def handle(c: Command, state: ClusterState, now_s: float) -> tuple[tuple[Event, ...], CommandResult]:
    """Events to record (none when the key was answered before) and the answer. RefusedError when the daemon says no."""
    before = state.answers.get(c.key)
    if before is not None:
        return (), before
    if state.ending and c.name != "down":
        raise RefusedError("the run is ending", where=c.name, got=state.ending)
    match c.name:
        case "cordon" | "drain":
            events, message, device = _cordon(c, state, now_s)
        case "uncordon":
            events, message, device = _uncordon(c, state)
        case "pin":
            events, message, device = _pin(c, state, now_s)
        case "unpin":
            events, message, device = _unpin(c, state)
        case "replan":
            events, message, device = (ReplanRequested(author=c.author, reason=c.reason),), "planning anew", None
        case "approve" | "reject":
            events, message, device = _answer_proposal(c, state)
        case "down":
            reason = c.reason or "asked by the operator"
            requested = () if state.ending else (RunEndRequested(reason=reason, author=c.author),)
            events, message, device = requested, "suspending samples, stopping the run", None
    rev = max([state.override_rev, *(e.rev for e in events if isinstance(e, OverrideSet | OverrideCleared))])
    plan_rev = state.plan.rev if state.plan is not None else None
    if c.name == "approve":
        plan_rev = c.plan_rev
    result = CommandResult(accepted=True, message=message, override_rev=rev, plan_rev=plan_rev)
    accepted = CommandAccepted(
        key=c.key,
        name=c.name,
        message=message,
        author=c.author,
        reason=c.reason,
        device=device,
        override_rev=rev,
        plan_rev=plan_rev,
    )
    return (*events, accepted), result


Outcome = tuple[tuple[Event, ...], str, str | None]


def resolve(given: str | None, state: ClusterState) -> str:
    """The id of a device from its id, display name or an unambiguous prefix of either; RefusedError otherwise."""
    if not given:
        raise RefusedError("which device?", where="device", hint="hexctl gpus lists them")
    by_name = {d.id: d.id for d in state.devices.values()} | {d.display: d.id for d in state.devices.values()}
    if given in by_name:
        return by_name[given]
    found = sorted({device for name, device in by_name.items() if name.startswith(given)})
    if len(found) == 1:
        return found[0]
    if found:
        names = ", ".join(state.display(d) for d in found[:8])
        raise RefusedError("ambiguous device", where="device", got=given, expected=f"one of {names}")
    close = difflib.get_close_matches(given, by_name, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}?" if close else "hexctl gpus lists them"
    raise RefusedError("no such device", where="device", got=given, hint=hint)


def _cordon(c: Command, state: ClusterState, now_s: float) -> Outcome:
    device = resolve(c.device, state)
    kind: OverrideKind = "cordon" if c.name == "cordon" else "drain"
    name, old = state.display(device), state.override(device, "cordon", "drain")
    if old is not None and old.kind == kind:
        return (), f"{name} is {'cordoned' if kind == 'cordon' else 'drained'} already", device
    wish = Override(device=device, kind=kind, author=c.author, reason=c.reason, at_s=now_s)
    _refuse_unless_viable(c, state, (*(o for o in state.overrides if o is not old), wish))
    message = f"{name} gets no new work; what runs there moves off"
    return (OverrideSet(override=wish, rev=state.override_rev + 1),), message, device


def _uncordon(c: Command, state: ClusterState) -> Outcome:
    device = resolve(c.device, state)
    name, old = state.display(device), state.override(device, "cordon", "drain")
    events: list[Event] = []
    if state.devices[device].quarantined:
        events.append(DeviceReleased(device=device))
    if old is not None:
        rev = state.override_rev + 1
        events.append(OverrideCleared(device=device, kind=old.kind, rev=rev, author=c.author, reason=c.reason))
    return tuple(events), f"{name} may work again" if events else f"{name} is not cordoned", device


def _pin(c: Command, state: ClusterState, now_s: float) -> Outcome:
    device = resolve(c.device, state)
    name = state.display(device)
    if c.role is None:
        raise RefusedError("pin to which role?", where="role", expected="train, rollout or idle")
    cordon = state.override(device, "cordon", "drain")
    if cordon is not None and c.role != "idle":
        raise RefusedError(f"{name} is cordoned", where="device", hint=f"hexctl uncordon {name} first")
    if state.devices[device].lost:
        raise RefusedError(f"{name} is lost", where="device", got=state.devices[device].lost)
    old = state.override(device, "pin")
    if old is not None and old.role == c.role:
        return (), f"{name} is pinned to {c.role} already", device
    events: list[Event] = []
    rev = state.override_rev
    if c.role == "train":
        for other in _pinned_to_train(state, device):
            if not c.force:
                other_name = state.display(other.device)
                raise RefusedError(
                    f"{other_name} is pinned to train, and one device trains",
                    where="role",
                    hint=f"hexctl unpin {other_name} first, or --force to move the pin",
                )
            rev += 1
            events.append(OverrideCleared(device=other.device, kind="pin", rev=rev, author=c.author, reason=c.reason))
    role: Role = c.role
    wish = Override(device=device, kind="pin", role=role, author=c.author, reason=c.reason, at_s=now_s)
    cleared = {e.device for e in events if isinstance(e, OverrideCleared)} | {device}
    others = tuple(o for o in state.overrides if o.kind != "pin" or o.device not in cleared)
    _refuse_unless_viable(c, state, (*others, wish))
    events.append(OverrideSet(override=wish, rev=rev + 1))
    return tuple(events), f"{name} is pinned to {role}", device


def _pinned_to_train(state: ClusterState, but: str) -> tuple[Override, ...]:
    return tuple(o for o in state.overrides if o.kind == "pin" and o.role == "train" and o.device != but)


def _unpin(c: Command, state: ClusterState) -> Outcome:
    device = resolve(c.device, state)
    name, old = state.display(device), state.override(device, "pin")
    if old is None:
        return (), f"{name} is not pinned", device
    rev = state.override_rev + 1
    cleared = OverrideCleared(device=device, kind="pin", rev=rev, author=c.author, reason=c.reason)
    return (cleared,), f"{name} is free for any role", device


def _refuse_unless_viable(c: Command, state: ClusterState, overrides: tuple[Override, ...]) -> None:
    """At least one device must be able to train and another to roll out, unless the operator insists."""
    why = unviable(state, overrides)
    if why and not c.force:
        raise RefusedError(f"refused: {why}", where=c.name, got=c.device, hint="--force to do it all the same")


def unviable(state: ClusterState, overrides: tuple[Override, ...]) -> str:
    """Why no training run fits on what `overrides` leave; "" when one does."""
    barred = {o.device for o in overrides if o.kind in ("cordon", "drain") or o.role == "idle"}
    pins = {o.device: o.role for o in overrides if o.kind == "pin"}
    free = [d.id for d in state.present if d.id not in barred and not d.quarantined]
    train = [d for d in free if pins.get(d, "train") == "train"]
    rollout = [d for d in free if pins.get(d, "rollout") == "rollout"]
    if not rollout:
        return "no device would be left for rollout"
    if not train:
        return "no device would be left to train"
    if len({*train, *rollout}) < 2:
        return f"{state.display(free[0])} alone would have to train and roll out"
    return ""


def _answer_proposal(c: Command, state: ClusterState) -> Outcome:
    if state.proposal is None:
        raise RefusedError("no plan is proposed", where=c.name, got=c.plan_rev)
    rev = state.proposal.solved.rev
    if c.plan_rev is None:
        raise RefusedError(f"{c.name} needs the plan revision it saw", where="plan_rev", expected=f"{rev}")
    if c.plan_rev != rev:
        raise RefusedError(
            "that revision is old", where="plan_rev", got=c.plan_rev, expected=f"{rev}", hint="look at the plan again"
        )
    if c.name == "approve":
        return (PlanApproved(rev=rev, author=c.author),), f"plan r{rev} is in force", None
    rejected = PlanRejected(rev=rev, author=c.author, reason=c.reason)
    return (rejected,), f"plan r{rev} is rejected", None
