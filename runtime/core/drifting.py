"""Which devices run slower than was assumed of them, from the same blocks as the calibration. Pure; the rule is
`runtime.policy.drift`, for the daemon and the simulator alike.

A unit's speed is the median of its newest blocks, so that one odd block says nothing and a change shows after three. It is
held against the other units of as many devices of its kind in its role that are not slow. So a model that is wrong about a whole kind makes
nobody slow: that is the calibration factor's business. A unit without such peers, as a run's only trainer, is held against its
own past, which follows it slowly while nothing is wrong: what changes over hours (longer answers) is calibration, what changes
within minutes is drift. A slow one that was moved to where it has neither peers nor a past is held against its kind's factor there, and
where no factor was measured, against its own first figures there, as those of a device that is as slow as it was.

A slow device that the plan leaves idle shows nothing, not even that it is fast again. So one that nobody could judge for
`retry_s` counts at its kind's speed again: where the plan then gives it work it is judged by that, and is slow again if it is.
Each time doubles what has to pass before the next, so that a device that stays slow is moved to and fro less and less: in a
time T at most 1 + log2(1 + T / retry_s) times, and one that recovers is tried again no later than it was slow, plus `retry_s`.

Slow devices, and those whose newest block was, are left out of their kind's factor (`aside`): measured / modelled speed =
calibration factor x speed, and nothing is counted twice. Devices of one unit share its figure; which of them is to blame
nobody can tell.
"""

import bisect
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from planner.record import record
from runtime.core.calibrating import KEEP, LEAST, LEAST_SAMPLES, MOST, RECENT, Calibrating, Recent, factor_for
from runtime.core.calibrating import MATERIAL as STEP
from runtime.core.fleet_event import DeviceDrifted, DeviceRetried, LearnedSpeed, SpeedsLearned, UnitRole
from runtime.core.state import ClusterState, DeviceBelief
from runtime.policy.drift import LEAST_SHARE, MATERIAL, DeviceDrift, DriftRule, watched

MOST_RETRY_DOUBLINGS = 30  # centuries: never again


@record
class Past:
    """What a device has shown in a role while nothing was wrong, as a smoothed ln(measured / modelled speed)."""

    log_ratio: float
    blocks: int


@record
class Drifting:
    """What is carried from one look to the next. Who is slow is in the state, and so is what devices have shown (`learned`): a
    daemon that takes over goes on from there, and begins the rest anew."""

    drifts: Mapping[str, DeviceDrift] = dataclasses.field(default_factory=dict)  # by device
    pasts: Mapping[tuple[str, UnitRole], Past] = dataclasses.field(default_factory=dict)  # by (device, role)
    suspects: frozenset[str] = frozenset()  # devices whose newest block was as slow as a slow one's
    judged_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # slow devices: when one was last judged


def doubtful(drifting: Drifting) -> frozenset[str]:
    """Devices that may be found slow soon: past the limit for less than the dwell, or with such a newest block."""
    dwelling = {d for d, x in drifting.drifts.items() if x.past_s is not None}
    slow = {d for d, x in drifting.drifts.items() if x.slow}
    return frozenset((drifting.suspects | dwelling) - slow)


def remembered(state: ClusterState) -> Drifting:
    """What a daemon that takes over goes on from."""
    return Drifting(pasts={k: Past(log_ratio=s.log_ratio, blocks=s.blocks) for k, s in state.learned.items()})


def learned(
    now: Drifting, state: ClusterState, told: Sequence[DeviceDrifted | DeviceRetried]
) -> tuple[SpeedsLearned, ...]:
    """What has to be on record beside the verdicts `told`, so that the next ones are the same whoever makes them: exactly for
    devices that were judged, and to a calibration factor's step for the others. `state`: before the verdicts."""
    judged = {d for e in told for d in (e.devices if isinstance(e, DeviceDrifted) else (e.device,))}
    known = {d.id: d for d in state.present}
    found = []
    for (device, role), past in now.pasts.items():
        if device not in known:
            continue
        old, matters = state.learned.get((device, role)), device in judged or known[device].speed < 1
        if old is None:
            new = matters or past.blocks >= LEAST_SAMPLES
        else:
            new = abs(past.log_ratio - old.log_ratio) > (0.0 if matters else math.log1p(STEP))
        if new:
            found.append(LearnedSpeed(device=device, role=role, log_ratio=past.log_ratio, blocks=past.blocks))
    return (SpeedsLearned(speeds=tuple(found)),) if found else ()


def aside(state: ClusterState, drifting: Drifting) -> frozenset[str]:
    """Devices whose figures say nothing of their kind: slow, or suspected of it."""
    return drifting.suspects | {d.id for d in state.present if d.speed < 1}


def drift(
    calibrating: Calibrating, state: ClusterState, before: Drifting, rule: DriftRule, now_s: float
) -> tuple[tuple[DeviceDrifted | DeviceRetried, ...], Drifting]:
    """One look at units whose newest block ended now: events for devices that are slow, fast again or otherwise slow, and for
    slow ones that nobody could judge for long."""
    known = {d.id: d for d in state.present}
    drifts = {
        d: before.drifts.get(d) or DeviceDrift(slow=b.speed < 1, recoveries=b.recoveries) for d, b in known.items()
    }
    pasts = {key: p for key, p in before.pasts.items() if key[0] in known}
    units = tuple(u for u in calibrating.recents.values() if u.counts and all(d in known for d in u.devices))
    look = _Look(state, units, drifts, pasts)
    told = [(u, reference) for u in units if u.at_s == now_s and (reference := look.reference(u)) is not None]
    shares = {d: math.exp(u.log_ratio - reference) for u, reference in told for d in u.devices}
    after = watched(drifts, shares, rule, now_s)
    limit = math.log(rule.enter_share)
    suspects = {d for d in before.suspects if d in known} - shares.keys()
    suspects |= {d for u, reference in told if u.log_ratios[-1] - reference <= limit for d in u.devices}
    wrong = suspects | {d for d, x in after.items() if x.slow or x.past_s is not None}
    for unit in units:
        if unit.at_s == now_s and len(unit.log_ratios) == RECENT and look.first_there(unit):
            slowed = {d: math.log(known[d].speed) for d in unit.devices}
            pasts |= {(d, unit.role): Past(log_ratio=unit.log_ratio - slowed[d], blocks=1) for d in unit.devices}
        if unit.at_s == now_s and len(unit.log_ratios) == RECENT and not wrong & set(unit.devices):
            pasts |= {(d, unit.role): _fed(pasts.get((d, unit.role)), unit.log_ratios[0]) for d in unit.devices}
    events = tuple(e for u, _ in told for e in look.changes(u, shares[u.devices[0]], after, now_s))
    judged_s = {d: now_s if d in shares else before.judged_s.get(d, now_s) for d, x in after.items() if x.slow}
    retried = tuple(
        _retried(known[d], now_s - at_s) for d, at_s in judged_s.items() if _is_due(known[d], now_s - at_s, rule)
    )
    again = {e.device: DeviceDrift(recoveries=e.recoveries) for e in retried}
    return (*events, *retried), Drifting(
        drifts=after | again,
        pasts=pasts,
        suspects=frozenset(suspects - again.keys()),
        judged_s={d: at_s for d, at_s in judged_s.items() if d not in again},
    )


def _is_due(device: DeviceBelief, unjudged_s: float, rule: DriftRule) -> bool:
    """Whether a slow device is to be tried again; `ldexp`, as a device may have recovered a thousand times."""
    return unjudged_s >= math.ldexp(rule.retry_s, min(device.recoveries, MOST_RETRY_DOUBLINGS))


def _retried(device: DeviceBelief, unjudged_s: float) -> DeviceRetried:
    return DeviceRetried(
        device=device.id, before=device.speed, unmeasured_s=unjudged_s, recoveries=device.recoveries + 1
    )


def _fed(old: Past | None, log_ratio: float) -> Past:
    """One more block, the oldest of those that still count as now: so a change is not in the past before it is found."""
    if old is None:
        return Past(log_ratio=log_ratio, blocks=1)
    weight = max(1 / (old.blocks + 1), 1 - KEEP)
    return Past(log_ratio=old.log_ratio + weight * (log_ratio - old.log_ratio), blocks=old.blocks + 1)


class _Look:
    """What units are held against. One look asks for every unit, so what they share is found once: of large fleets the pairs count."""

    def __init__(
        self,
        state: ClusterState,
        units: Sequence[Recent],
        drifts: Mapping[str, DeviceDrift],  # before this look
        pasts: Mapping[tuple[str, UnitRole], Past],
    ) -> None:
        self.state, self.drifts, self._pasts = state, drifts, pasts
        self._fast: dict[tuple[str, UnitRole, int], list[float]] = {}  # what those that are not slow show, ascending
        for unit in units:
            if not self._slow(unit):
                self._fast.setdefault((*self._key(unit), len(unit.devices)), []).append(unit.log_ratio)
        for ratios in self._fast.values():
            ratios.sort()

    def reference(self, unit: Recent) -> float | None:
        """ln(measured / modelled speed) that was to be expected of the unit; None where nobody can say."""
        key = self._key(unit)
        peers = self._fast.get((*key, len(unit.devices)), [])
        own = None if self._slow(unit) else bisect.bisect_left(peers, unit.log_ratio)  # it is no peer of itself
        if len(peers) > (own is not None):
            return median_of_others(peers, without=own)
        pasts = [p for d in unit.devices if (p := self._pasts.get((d, unit.role))) is not None]
        if pasts:
            return statistics.fmean(p.log_ratio for p in pasts)
        if not any(self.drifts[d].slow or self.drifts[d].recoveries for d in unit.devices):
            return None  # its first figures are what its kind is held for; not those of one that was slow before
        if key not in self.state.calibration:
            return None
        factor = factor_for(self.state.calibration, *key)
        return math.log(factor) if LEAST < factor < MOST else None

    def first_there(self, unit: Recent) -> bool:
        """Whether the unit is slow, and nothing but what it shows now says what it would be if it were not."""
        return all(self.state.devices[d].speed < 1 for d in unit.devices) and self.reference(unit) is None

    def changes(
        self, unit: Recent, share: float, after: Mapping[str, DeviceDrift], now_s: float
    ) -> tuple[DeviceDrifted, ...]:
        """What is to be said of a unit's devices: one event for those that counted alike."""
        speed = min(1.0, max(LEAST_SHARE, share))
        found: dict[tuple[float, float], list[str]] = {}
        for d in unit.devices:
            old, new = self.state.devices[d].speed, speed if after[d].slow else 1.0
            turned = (old < 1) != after[d].slow
            recovering = after[d].slow and after[d].past_s is not None
            if turned or (abs(new - old) > MATERIAL and not recovering):
                found.setdefault((old, new), []).append(d)
        measured = unit.modelled_tokens_per_s * math.exp(unit.log_ratio)
        return tuple(
            DeviceDrifted(
                devices=tuple(devices),
                role=unit.role,
                speed=new,
                before=old,
                share=share / old,
                for_s=max(now_s - (now_s if (past := self.drifts[d].past_s) is None else past) for d in devices),
                measured_tokens_per_s=measured,
                assumed_tokens_per_s=measured / share * old,
                recoveries=max(after[d].recoveries for d in devices),
            )
            for (old, new), devices in found.items()
        )

    def _slow(self, unit: Recent) -> bool:
        return any(self.drifts[d].slow for d in unit.devices)

    def _key(self, unit: Recent) -> tuple[str, UnitRole]:
        return "+".join(sorted({self.state.devices[d].kind for d in unit.devices})), unit.role


def median_of_others(ascending: Sequence[float], *, without: int | None) -> float:
    """Of all but the one at a place, in constant time."""
    count = len(ascending) - (without is not None)
    low, high = (i + (without is not None and i >= without) for i in ((count - 1) // 2, count // 2))
    return ascending[low] if low == high else (ascending[low] + ascending[high]) / 2


def speeds(state: ClusterState) -> dict[str, float]:
    """Shares of their kind's speed of the devices that are slow, as the planner's problem takes them."""
    return {d.id: d.speed for d in state.present if d.speed < 1}


def drift_reason(e: DeviceDrifted, names: str) -> str:
    """Why a plan is needed, or what happened, in words; `names`: of the devices."""
    one = len(e.devices) == 1
    verb = {"rollout": "generates" if one else "generate", "train": "trains" if one else "train"}[e.role]
    of_plan = f"{e.share:.2f} of what the plan assumed"
    if e.speed < 1:
        return f"{names} {verb} at {of_plan}" + (f" for {e.for_s:.0f} s" if e.for_s >= 1 else "")
    return f"{names} {verb} at {'its' if one else 'their'} kind's speed again, {of_plan} for {e.for_s:.0f} s"


def retry_reason(e: DeviceRetried, name: str) -> str:
    """The same of a device that is tried again."""
    return f"{name} is tried at its kind's speed again: nobody could judge it for {e.unmeasured_s:.0f} s"
