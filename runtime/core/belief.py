"""From observation to events: what changed, said only when it is sure. Unknown is not dead.

Only a positive absence or an age limit removes a device or a unit. `Memory` holds what is not worth recording
(since when something is odd, smoothed rates): a daemon that starts anew begins it anew, and no decision is lost.
"""

import math
from collections.abc import Mapping

from runtime.core.event import Event, FlowAnswered, FlowFellSilent, MilestoneReached
from runtime.core.fleet_event import (
    DeviceAnswered,
    DeviceBecameHostBound,
    DeviceCaughtUp,
    DeviceJoined,
    DeviceLost,
    DeviceWentStale,
)
from runtime.core.limits import Limits, Memory, Progress, Rate, Since
from runtime.core.observation import DeviceSeen, Observation
from runtime.core.state import ClusterState, DeviceBelief
from runtime.core.unit_belief import Look, seen_units, unit_events


def believe(
    obs: Observation, state: ClusterState, memory: Memory, limits: Limits, now_s: float
) -> tuple[tuple[Event, ...], Memory]:
    """What changed between the state and the observation, and what to remember. Pure; `now_s` is unix seconds."""
    since = Since(memory.since_s, now_s)
    events: list[Event] = []
    events += _flow(obs, state, limits)
    events += _devices(obs, state, limits, since)
    progress = _progress(obs, memory, now_s)
    gone = {e.device for e in events if isinstance(e, DeviceLost)}
    look = Look(
        limits=limits,
        since=since,
        progress=progress,
        held={(r.replica, r.epoch): r.leased for r in (obs.flow.replicas if obs.flow is not None else ())},
        flow_fresh=obs.flow_age_s is not None and obs.flow_age_s <= limits.flow_silent_s,
        lost=frozenset(gone | {d.id for d in state.devices.values() if d.lost}),
        now_s=now_s,
    )
    events += unit_events(obs, state, look)
    rates = _rates(obs, memory.rates, limits.rate_tau_s, now_s)
    return tuple(events), Memory(since_s=since.after, progress=progress, rates=rates)


def _flow(obs: Observation, state: ClusterState, limits: Limits) -> list[Event]:
    if obs.flow is None or obs.flow_age_s is None:
        return []  # never answered: it is starting
    events: list[Event] = []
    silent = obs.flow_age_s > limits.flow_silent_s
    if silent and state.flow_silent is False:
        events.append(FlowFellSilent(age_s=obs.flow_age_s))
    if not silent and state.flow_silent is not False:
        events.append(FlowAnswered(pid=obs.flow_pid))
    if obs.flow.weights is not None and "first weights" not in state.milestones:
        w = obs.flow.weights
        events.append(MilestoneReached(name="first weights", detail=f"version {w.version} published, {w.digest[:8]}"))
    if obs.flow.steps_done > 0 and "first step" not in state.milestones:
        events.append(MilestoneReached(name="first step", detail=f"optimiser step {obs.flow.step - 1} applied"))
    return events


def _devices(obs: Observation, state: ClusterState, limits: Limits, since: Since) -> list[Event]:
    events: list[Event] = []
    seen = {d.id: d for d in obs.devices}
    for d in obs.devices:
        known = state.devices.get(d.id)
        if d.present is True and (known is None or known.lost):
            events.append(DeviceJoined(device=d.id, kind=d.kind, node=d.node, index=d.index))
    for known in state.present:
        events += _device(known, seen.get(known.id), limits, since)
    return events


def _device(known: DeviceBelief, seen: DeviceSeen | None, limits: Limits, since: Since) -> list[Event]:
    if seen is not None and seen.present is False:
        return [DeviceLost(device=known.id, reason=seen.sample.note or "gone")]
    if seen is None or seen.present is None:
        return _silent_device(known, seen, limits, since)
    events: list[Event] = []
    age_s = seen.age_s or 0.0
    if age_s > limits.device_stale_s and not known.stale:
        events.append(DeviceWentStale(device=known.id, age_s=age_s, note=seen.sample.note))
    if age_s <= limits.device_stale_s and known.stale:
        events.append(DeviceAnswered(device=known.id))
    return events + _host_bound(known, seen, limits, since)


def _silent_device(known: DeviceBelief, seen: DeviceSeen | None, limits: Limits, since: Since) -> list[Event]:
    silent_s = since.held_s("silent", known.id)
    if seen is not None and seen.age_s is not None:
        silent_s = max(silent_s, seen.age_s)
    note = "" if seen is None else seen.sample.note
    if silent_s > limits.device_lost_s:
        return [DeviceLost(device=known.id, reason=note or f"no sign for {silent_s:.0f} s")]
    if silent_s > limits.device_stale_s and not known.stale:
        return [DeviceWentStale(device=known.id, age_s=silent_s, note=note)]
    return []


def _host_bound(known: DeviceBelief, seen: DeviceSeen, limits: Limits, since: Since) -> list[Event]:
    # Without a reading nothing runs there: that blames nobody.
    if seen.sample.host_bound and not known.host_bound:
        if since.held_s("host-bound", known.id) >= limits.host_bound_enter_s:
            return [DeviceBecameHostBound(device=known.id, lag_share=None)]
    elif (
        not seen.sample.host_bound
        and known.host_bound
        and (since.held_s("on-clock", known.id) >= limits.host_bound_leave_s)
    ):
        return [DeviceCaughtUp(device=known.id)]
    return []


def _progress(obs: Observation, memory: Memory, now_s: float) -> dict[str, Progress]:
    found: dict[str, Progress] = {}
    for r in obs.flow.replicas if obs.flow is not None else ():
        key, stats = f"{r.replica}:{r.epoch}", r.stats
        mark = (stats.decoded_tokens, stats.prefill_tokens, stats.updates)
        old = memory.progress.get(key)
        idle = stats.running == 0 and stats.waiting == 0
        found[key] = old if old is not None and old.mark == mark and not idle else Progress(mark=mark, since_s=now_s)
    return found


def _rates(obs: Observation, before: Mapping[str, Rate], tau_s: float, now_s: float) -> dict[str, Rate]:
    """Exponentially smoothed tokens/s of every living unit; an unknown rate keeps nothing."""
    rates: dict[str, Rate] = {}
    for u in seen_units(obs):
        if u.tokens_per_s is None or u.phase not in ("serving", "running", "draining"):
            continue
        key = f"{u.id}:{u.epoch}"
        old = before.get(key)
        if old is None:
            rates[key] = Rate(tokens_per_s=u.tokens_per_s, at_s=now_s)
            continue
        keep = math.exp(-max(0.0, now_s - old.at_s) / tau_s)
        rates[key] = Rate(tokens_per_s=keep * old.tokens_per_s + (1 - keep) * u.tokens_per_s, at_s=now_s)
    return rates
