"""Predicted beside measured, for every unit, and the calibration factors that follow. Pure.

A unit's work (`Work`: busy seconds, steps, tokens) is cut into blocks of some busy seconds. For each block the cost model
says how long exactly that work should have taken, at the running batch and with the prefill it really had, so that idle
time, admission and waits for data are in neither figure. What is kept, by device and role, is

    l = ln(modelled seconds / measured seconds) = ln(measured speed / modelled speed),

averaged over the first blocks and exponentially smoothed after that. From it come two words that must not be mixed up:

- the **calibration factor** of a kind in a role: exp of the median of l over its devices. It says how wrong the model is
  about the kind, goes into the next plan's problem, and is an event when it changes materially.
- the **drift factor** of a device: exp(its l less the kind's median). It says how far one device is from its peers, and
  changes no problem. Measured / modelled = calibration factor x drift factor, so nothing is counted twice.

Blocks in which a device is behind its clock, stale or lost are thrown away: they tell of the moment, not of the model. Those
in which it is throttled say nothing of its kind either, but they are among its newest (`Recent`), from which
`runtime.core.drifting` finds slow devices.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Protocol

from planner.record import record, replace
from runtime.core.fleet_event import CalibrationChanged, UnitRole
from runtime.core.observation import Observation, ReplicaSeen, TrainerSeen, Work
from runtime.core.state import ClusterState
from runtime.core.unit_belief import Seen, seen_units

BLOCK_S = 5.0  # busy seconds a block has at least
DECODE_STEPS = 8  # and so many decode steps
WARM_S = 2.0  # busy seconds of a fresh process that tell nothing: caches, allocators, first kernels
WARM_STEPS = 2
LEAST_SAMPLES = 3  # blocks of a device before its figure counts
RECENT = 5  # newest blocks of a unit whose median is its speed of now
KEEP = 0.9  # weight of the past in the smoothed figure, once there are more than 1 / (1 - KEEP) blocks
LEAST, MOST = 0.25, 4.0  # bounds of a factor: beyond, the model is about another thing and a plan would be a guess
MATERIAL = 0.05  # a change of a factor below that is not said and not used
_OUTLIER = math.log(8.0)  # one block never says more than that

Factors = Mapping[tuple[str, UnitRole], float]
"""Calibration factors by (kind, role). A pair that is not there was not measured."""


@record
class Modelled:
    """What the cost model says of a block. `tokens_per_s` in the plan's terms: sampled, or trained response tokens."""

    seconds: float
    tokens_per_s: float


class Model(Protocol):
    """The cost model as the run's problem has it, without any calibration factor."""

    def decode(self, kind: str, devices: int, work: Work) -> Modelled | None:
        """A replica's block; None when the model has no answer."""
        ...

    def train(self, devices: tuple[str, ...], work: Work) -> Modelled | None:
        """A trainer's block; None when no plan places a trainer there."""
        ...


@record
class Estimate:
    """What one device has shown in one role."""

    samples: int
    log_ratio: float  # smoothed ln(measured / modelled speed)
    modelled_tokens_per_s: float  # of the newest block
    measured_tokens_per_s: float
    modelled_step_s: float
    measured_step_s: float
    running: float | None  # rollout: mean samples decoded at once
    at_s: float  # when the newest block ended, unix seconds

    @property
    def counts(self) -> bool:
        """Whether there are enough blocks."""
        return self.samples >= LEAST_SAMPLES


@record
class Recent:
    """The newest blocks of one incarnation of a unit, oldest first, as ln(measured / modelled speed)."""

    unit: str
    role: UnitRole
    devices: tuple[str, ...]
    log_ratios: tuple[float, ...]
    modelled_tokens_per_s: float  # of the newest block
    at_s: float  # when that ended, unix seconds

    @property
    def counts(self) -> bool:
        """Whether there are enough blocks."""
        return len(self.log_ratios) >= LEAST_SAMPLES

    @property
    def log_ratio(self) -> float:
        """Speed of now."""
        return statistics.median(self.log_ratios)


@record
class Begin:
    """Where a block begins. `throttled`: a device of the unit was, since then."""

    work: Work
    throttled: bool


@record
class Calibrating:
    """What is carried from one observation to the next. A daemon that starts anew begins it anew; factors are in the state."""

    marks: Mapping[tuple[str, int], Begin] = dataclasses.field(default_factory=dict)  # (unit, epoch) -> block's begin
    estimates: Mapping[tuple[str, UnitRole], Estimate] = dataclasses.field(default_factory=dict)  # by (device, role)
    recents: Mapping[tuple[str, int], Recent] = dataclasses.field(default_factory=dict)  # by (unit, epoch)


def calibrate(
    obs: Observation,
    state: ClusterState,
    before: Calibrating,
    model: Callable[[], Model],
    now_s: float,
    *,
    aside: Collection[str] = (),
) -> tuple[tuple[CalibrationChanged, ...], Calibrating]:
    """Close the blocks that are long enough; events for factors that changed materially.

    `model` is called only when a block closes; `now_s` is unix seconds. Devices `aside` are measured, but say nothing of their
    kind.
    """
    odd = _odd_devices(obs, state)
    hot = {d.id for d in obs.devices if d.sample.throttled}
    units = seen_units(obs)
    marks: dict[tuple[str, int], Begin] = {}
    estimates, there = dict(before.estimates), {(u.id, u.epoch) for u in units}
    recents = {key: r for key, r in before.recents.items() if key in there}
    for unit in units:
        if unit.work is None or unit.phase not in ("serving", "running") or not odd.isdisjoint(unit.devices):
            continue
        key, now = (unit.id, unit.epoch), Begin(work=unit.work, throttled=not hot.isdisjoint(unit.devices))
        begin = before.marks.get(key)
        if begin is None or not _grew(begin.work, now.work):
            if now.work.busy_s >= WARM_S and now.work.steps >= WARM_STEPS:
                marks[key] = now
            continue
        if now.throttled:
            begin = replace(begin, throttled=True)
        block = _less(now.work, begin.work)
        if not _long_enough(block, unit):
            marks[key] = begin
            continue
        marks[key] = now
        modelled = _modelled(unit, block, state, model())
        if modelled is not None and modelled.seconds > 0:
            recents[key] = _newest(recents.get(key), unit, block, modelled, now_s)
            if not begin.throttled:
                _feed(estimates, unit, block, modelled, now_s)
    after = Calibrating(marks=marks, estimates=estimates, recents=recents)
    return _changes(after, state, aside), after


def _odd_devices(obs: Observation, state: ClusterState) -> frozenset[str]:
    """Devices whose speed of the moment says nothing about the model, nor about themselves."""
    seen = {d.id for d in obs.devices if d.sample.host_bound or d.present is not True}
    return frozenset(seen | {d.id for d in state.devices.values() if d.host_bound or d.stale or d.lost})


def _grew(begin: Work, now: Work) -> bool:
    return now.busy_s >= begin.busy_s and now.steps >= begin.steps and now.tokens >= begin.tokens


def _less(now: Work, begin: Work) -> Work:
    return Work(
        busy_s=now.busy_s - begin.busy_s,
        steps=now.steps - begin.steps,
        tokens=now.tokens - begin.tokens,
        prefill_tokens=max(0, now.prefill_tokens - begin.prefill_tokens),
    )


def _long_enough(block: Work, unit: Seen) -> bool:
    steps = DECODE_STEPS if isinstance(unit, ReplicaSeen) else 1
    return block.busy_s >= BLOCK_S and block.steps >= steps and block.tokens > 0


def _modelled(unit: Seen, block: Work, state: ClusterState, model: Model) -> Modelled | None:
    if isinstance(unit, TrainerSeen):
        return model.train(unit.devices, block)
    kinds = {state.devices[d].kind for d in unit.devices if d in state.devices}
    return model.decode(kinds.pop(), len(unit.devices), block) if len(kinds) == 1 else None


def _newest(old: Recent | None, unit: Seen, block: Work, modelled: Modelled, now_s: float) -> Recent:
    past = () if old is None else old.log_ratios
    return Recent(
        unit=unit.id,
        role="rollout" if isinstance(unit, ReplicaSeen) else "train",
        devices=unit.devices,
        # As it is: the median needs no bounds, and devices compare however wrong the model is of all of them.
        log_ratios=(*past, math.log(modelled.seconds / block.busy_s))[-RECENT:],
        modelled_tokens_per_s=modelled.tokens_per_s,
        at_s=now_s,
    )


def _feed(
    estimates: dict[tuple[str, UnitRole], Estimate], unit: Seen, block: Work, modelled: Modelled, now_s: float
) -> None:
    """One more block for every device of the unit."""
    role: UnitRole = "rollout" if isinstance(unit, ReplicaSeen) else "train"
    ratio = modelled.seconds / block.busy_s
    sample = min(_OUTLIER, max(-_OUTLIER, math.log(ratio)))
    for device in unit.devices:
        old = estimates.get((device, role))
        samples = 1 if old is None else old.samples + 1
        past = 0.0 if old is None else old.log_ratio
        # A plain mean of the first blocks, so that the first of them has no more weight than the others.
        log_ratio = past + max(1.0 / samples, 1.0 - KEEP) * (sample - past)
        estimates[device, role] = Estimate(
            samples=samples,
            log_ratio=log_ratio,
            modelled_tokens_per_s=modelled.tokens_per_s,
            measured_tokens_per_s=modelled.tokens_per_s * ratio,
            modelled_step_s=modelled.seconds / block.steps,
            measured_step_s=block.busy_s / block.steps,
            running=block.tokens / block.steps if role == "rollout" else None,
            at_s=now_s,
        )


def kind_estimates(
    estimates: Mapping[tuple[str, UnitRole], Estimate], kinds: Mapping[str, str]
) -> dict[tuple[str, UnitRole], dict[str, Estimate]]:
    """Estimates that count, by (kind, role) and device. `kinds`: kind of each device; others are left out."""
    found: dict[tuple[str, UnitRole], dict[str, Estimate]] = {}
    for (device, role), estimate in estimates.items():
        if device in kinds and estimate.counts:
            found.setdefault((kinds[device], role), {})[device] = estimate
    return found


def factor_of(estimates: Iterable[Estimate]) -> float:
    """The calibration factor that devices of one kind in one role show together: bounded, one odd device cannot pull it."""
    return bounded(math.exp(statistics.median(e.log_ratio for e in estimates)))


def bounded(factor: float) -> float:
    """A factor inside its bounds."""
    return min(MOST, max(LEAST, factor))


def drift_of(device: str, peers: Mapping[str, Estimate]) -> float | None:
    """The drift factor of a device against its peers; None without a figure of its own or without a peer."""
    if device not in peers or len(peers) < 2:
        return None
    return math.exp(peers[device].log_ratio - statistics.median(e.log_ratio for e in peers.values()))


def _changes(now: Calibrating, state: ClusterState, aside: Collection[str]) -> tuple[CalibrationChanged, ...]:
    kinds = {d.id: d.kind for d in state.present if d.id not in aside}
    events: list[CalibrationChanged] = []
    for (kind, role), peers in sorted(kind_estimates(now.estimates, kinds).items(), key=lambda x: x[0]):
        before, factor = state.calibration.get((kind, role), 1.0), factor_of(peers.values())
        if abs(math.log(factor / before)) < math.log1p(MATERIAL):
            continue
        events.append(
            CalibrationChanged(
                kind=kind,
                role=role,
                factor=factor,
                before=before,
                samples=sum(e.samples for e in peers.values()),
                device_count=len(peers),
                modelled_tokens_per_s=statistics.fmean(e.modelled_tokens_per_s for e in peers.values()),
                measured_tokens_per_s=statistics.fmean(e.measured_tokens_per_s for e in peers.values()),
            )
        )
    return tuple(events)


def factor_for(factors: Factors, kind: str, role: UnitRole) -> float:
    """The factor to plan with. A kind that was not measured in a role gets the median of those that were: what the model
    misses is mostly the software's, and a correction of one kind alone would make the others look better than they are."""
    own = factors.get((kind, role))
    if own is not None:
        return bounded(own)
    others = [f for (_, r), f in factors.items() if r == role]
    return bounded(math.exp(statistics.median(map(math.log, others)))) if others else 1.0


def without_units_gone(before: Calibrating, present: Iterable[str]) -> Calibrating:
    """Estimates of devices that are still there; a lost device that comes back is measured anew."""
    there = set(present)
    return replace(before, estimates={k: e for k, e in before.estimates.items() if k[0] in there})
