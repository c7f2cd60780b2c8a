"""Rows of the snapshot: devices with their role and status, plans, flow's figures, money. Pure."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Literal

from planner.cluster import DeviceKind
from planner.override import Override
from planner.plan import Placement
from planner.record import record
from runtime.api.wire import CalibrationRow, DeviceRow, FlowView, PlacementRow, PlanView, Proposal
from runtime.core.actual import Body, bodies
from runtime.core.calibrating import Calibrating, Estimate, drift_of, factor_of, kind_estimates
from runtime.core.fleet_event import UnitRole
from runtime.core.limits import Limits, Rate
from runtime.core.observation import DeviceSample, DeviceSeen, Observation, ReplicaSeen, TrainerSeen
from runtime.core.solved import SolvedPlan
from runtime.core.state import ClusterState, DeviceBelief, OpenProposal, Unit
from runtime.core.unit_belief import Seen, seen_units
from runtime.rl.types import FlowStatus


def usd_per_mtok(usd_per_h: float | None, tokens_per_s: float | None) -> float | None:
    """Dollars per million tokens at that rate; None without a price or a rate, never 0."""
    if usd_per_h is None or tokens_per_s is None or not tokens_per_s > 0:
        return None
    return usd_per_h / (tokens_per_s * 3600.0) * 1e6


def kwh_per_mtok(power_w: float | None, tokens_per_s: float | None) -> float | None:
    """Energy per million tokens at that power and rate: 1 kWh is 3.6e6 J. None without either, never 0."""
    if power_w is None or tokens_per_s is None or not tokens_per_s > 0:
        return None
    return power_w / tokens_per_s * 1e6 / 3.6e6


def fleet_power_w(devices: Iterable[DeviceSeen]) -> float | None:
    """What the devices draw together; None when one that is there does not say, since a sum without it would mislead."""
    powers = [d.sample.power_w for d in devices if d.present]
    known = [p for p in powers if p is not None]
    return sum(known) if known and len(known) == len(powers) else None


def plan_view(s: SolvedPlan) -> PlanView:
    """A solved plan for the console."""
    return PlanView(
        rev=s.rev,
        scheduler=s.scheduler,
        placements=tuple(placement_row(p) for p in s.plan.placements),
        step_s=s.prediction.step_s,
        train_s=s.prediction.train_s,
        rollout_s=s.prediction.rollout_s,
        tokens_per_s=s.prediction.tokens_per_s,
        usd_per_h=s.prediction.usd_per_h,
        usd_per_mtok=s.prediction.usd_per_mtok,
        bound_tokens_per_s=s.bound_tokens_per_s,
        bound_scope=s.bound_scope,
        gap=s.gap,
        solve_s=s.solve_s,
        headline=s.headline,
        why=s.why,
        trigger=s.trigger,
        made_at_s=s.made_at_s,
    )


def placement_row(p: Placement) -> PlacementRow:
    """A placement for the console."""
    return PlacementRow(
        role=p.role, kind=p.kind, devices=p.devices, tp=p.tp, pp=p.pp, dp=p.dp, rate_tokens_per_s=p.rate_tokens_per_s
    )


def proposal_view(p: OpenProposal | None) -> Proposal | None:
    """The open proposal for the console."""
    if p is None:
        return None
    return Proposal(plan=plan_view(p.solved), expires_at_s=p.expires_at_s, gain_share=p.gain_share)


def flow_view(f: FlowStatus, usd_per_h: float | None, power_w: float | None, groups_per_batch: int) -> FlowView:
    """Flow's figures and what they cost, in money and energy. `groups_per_batch`: G."""
    return FlowView(
        version=f.step,
        eta=f.eta,
        staleness_mean=f.staleness_mean,
        staleness_p95=f.staleness_p95,
        staleness_max=f.staleness_max,
        reward_mean=f.reward_mean,
        generated_tokens=f.generated_tokens,
        trained_tokens=f.trained_tokens,
        masked_tokens=f.masked_tokens,
        in_flight_tokens=f.in_flight_tokens,
        wasted_tokens=f.wasted_tokens,
        redone_tokens=f.redone_tokens,
        queue_groups=f.queue_groups,
        queue_batches=f.queue_groups / max(1, groups_per_batch),
        generated_tokens_per_s=f.generated_tokens_per_s,
        tokens_per_s=f.trained_tokens_per_s,
        usd_per_h=usd_per_h,
        usd_per_mtok=usd_per_mtok(usd_per_h, f.trained_tokens_per_s),
        power_w=power_w,
        kwh_per_mtok=kwh_per_mtok(power_w, f.trained_tokens_per_s),
        trainer_wait_share=f.trainer_wait_share,
        admission_wait_share=f.admission_wait_share,
        refill_s=max((r.refill_s for r in f.replicas if r.order == "serve" and r.refill_s is not None), default=None),
        waits=f.waits,
        samples_by_state=f.samples_by_state,
        steps_done=f.steps_done,
        spans_two_versions_share=f.spans_two_versions_share,
        metrics=f.last_metrics,
    )


@record
class Sources:
    """What device rows are made from, by device or unit."""

    state: ClusterState
    version: int | None  # flow's
    seen: Mapping[str, DeviceSeen]
    units: Mapping[tuple[str, int], Seen]
    body: Mapping[str, Body]
    predicted: Mapping[str, tuple[str, float]]  # role and tokens/s that the plan has the device do
    rates: Mapping[str, Rate]
    kinds: Mapping[str, DeviceKind]
    limits: Limits
    estimates: Mapping[tuple[str, UnitRole], Estimate]  # by (device, role)
    peers: Mapping[tuple[str, UnitRole], Mapping[str, Estimate]]  # by (kind, role)


def sources(
    state: ClusterState,
    obs: Observation | None,
    rates: Mapping[str, Rate],
    kinds: Mapping[str, DeviceKind],
    limits: Limits,
    *,
    calibrating: Calibrating,
) -> Sources:
    """Look everything up once, so that a fleet of thousands stays cheap."""
    body: dict[str, Body] = {}
    for b in sorted(() if obs is None else bodies(obs, state), key=lambda b: (b.phase != "dead", b.epoch)):
        body.update(dict.fromkeys(b.devices, b))  # a living one over a dead one, the newest last
    return Sources(
        state=state,
        version=None if obs is None or obs.flow is None else obs.flow.step,
        seen={} if obs is None else {d.id: d for d in obs.devices},
        units={} if obs is None else {(u.id, u.epoch): u for u in seen_units(obs)},
        body=body,
        predicted=_predictions(state),
        rates=rates,
        kinds=kinds,
        limits=limits,
        estimates=calibrating.estimates,
        peers=kind_estimates(calibrating.estimates, {d.id: d.kind for d in state.present}),
    )


def calibration_rows(state: ClusterState, calibrating: Calibrating, now_s: float) -> tuple[CalibrationRow, ...]:
    """Predicted beside measured by kind and role: of those that were measured in this daemon's life or have a factor."""
    kinds = {d.id: d.kind for d in state.present}
    peers = kind_estimates(calibrating.estimates, kinds)
    found: dict[tuple[str, UnitRole], list[Estimate]] = {k: [] for k in state.calibration}
    for (device, role), estimate in calibrating.estimates.items():
        if device in kinds:
            found.setdefault((kinds[device], role), []).append(estimate)
    return tuple(
        _calibration_row(key, known, state.calibration.get(key, 1.0), peers.get(key, {}), now_s)
        for key, known in sorted(found.items())
    )


def _calibration_row(
    key: tuple[str, UnitRole], known: list[Estimate], factor: float, peers: Mapping[str, Estimate], now_s: float
) -> CalibrationRow:
    def mean(field: str) -> float | None:
        values = [getattr(e, field) for e in known]
        return statistics.fmean(values) if values and None not in values else None

    return CalibrationRow(
        kind=key[0],
        role=key[1],
        factor=factor,
        measured_factor=factor_of(peers.values()) if peers else None,
        samples=sum(e.samples for e in known),
        devices=len(known),
        running=mean("running"),
        modelled_tokens_per_s=mean("modelled_tokens_per_s"),
        measured_tokens_per_s=mean("measured_tokens_per_s"),
        modelled_step_s=mean("modelled_step_s"),
        measured_step_s=mean("measured_step_s"),
        age_s=max(0.0, now_s - max(e.at_s for e in known)) if known else None,
    )


def _predictions(state: ClusterState) -> dict[str, tuple[str, float]]:
    placements = () if state.plan is None else state.plan.plan.placements
    rated = ((p, p.rate_tokens_per_s) for p in placements)
    return {d: (p.role, rate / len(p.devices)) for p, rate in rated if rate is not None for d in p.devices}


def device_rows(src: Sources) -> tuple[DeviceRow, ...]:
    """A row for every device that was ever seen, by node and index."""
    devices = sorted(src.state.devices.values(), key=lambda d: (d.node, d.index, d.id))
    overrides = _by_device(src.state)
    return tuple(_device_row(d, src, overrides.get(d.id, ())) for d in devices)


def _by_device(state: ClusterState) -> dict[str, tuple[Override, ...]]:
    found: dict[str, tuple[Override, ...]] = {}
    for o in state.overrides:
        found[o.device] = (*found.get(o.device, ()), o)
    return found


def _device_row(d: DeviceBelief, src: Sources, overrides: tuple[Override, ...]) -> DeviceRow:
    seen = src.seen.get(d.id)
    sample = seen.sample if seen is not None and not d.lost else DeviceSample()
    body = src.body.get(d.id)
    unit = None if body is None else src.units.get((body.unit, body.epoch))
    kind = src.kinds.get(d.kind)
    rate = None if body is None else src.rates.get(f"{body.unit}:{body.epoch}")
    tokens_per_s = None if rate is None or body is None else rate.tokens_per_s / len(body.devices)
    price = None if kind is None or d.lost else kind.price_usd_per_h
    pin = next((o for o in overrides if o.kind == "pin"), None)
    cordoned = any(o.kind != "pin" for o in overrides)
    replica = unit if isinstance(unit, ReplicaSeen) else None
    return DeviceRow(
        id=d.id,
        display=d.display,
        kind=d.kind,
        node=d.node,
        index=d.index,
        role=_role(d, body, src),
        status=_status(d, seen, body, src, cordoned=cordoned),
        paced=kind is not None and kind.paced,
        replica=None if body is None else body.unit,
        version=_version(unit, src),
        digest=None if replica is None else replica.digest,
        util_share=sample.util_share,
        memory_used_bytes=sample.memory_used_bytes,
        memory_total_bytes=sample.memory_total_bytes,
        power_w=sample.power_w,
        temperature_c=sample.temperature_c,
        tokens_per_s=tokens_per_s,
        predicted_tokens_per_s=_predicted(d.id, body, src),
        usd_per_h=price,
        usd_per_mtok=usd_per_mtok(price, tokens_per_s),
        running=None if replica is None else replica.running,
        slots=None if replica is None else replica.slots,
        pid=None if unit is None else unit.pid_on(d.id) if isinstance(unit, TrainerSeen) else unit.pid,
        cordoned=cordoned,
        pinned=None if pin is None else pin.role,
        age_s=None if seen is None else seen.age_s,
        note=_note(d, sample, body, src.state),
        modelled_tokens_per_s=_modelled(d, body, src),
        drift_factor=None if body is None else drift_of(d.id, src.peers.get((d.kind, body.role), {})),
        speed=d.speed,
    )


def _version(unit: Seen | None, src: Sources) -> int | None:
    return unit.version if isinstance(unit, ReplicaSeen) else None if unit is None else src.version


def _role(d: DeviceBelief, body: Body | None, src: Sources) -> Literal["train", "rollout", "idle"]:
    if body is not None:
        return body.role
    planned = "idle" if d.lost else src.predicted.get(d.id, ("idle", 0.0))[0]
    return "train" if planned == "train" else "rollout" if planned == "rollout" else "idle"


def _unit(body: Body | None, state: ClusterState) -> Unit | None:
    unit = None if body is None else state.units.get(body.unit)
    return unit if unit is not None and body is not None and unit.epoch == body.epoch else None


def _status(d: DeviceBelief, seen: DeviceSeen | None, body: Body | None, src: Sources, *, cordoned: bool) -> str:
    """One word, the gravest first."""
    unit = _unit(body, src.state)
    aged = seen is not None and (seen.age_s or 0.0) > src.limits.device_stale_s
    if d.lost:
        return "LOST"
    if unit is not None and unit.hung:
        return "HUNG"
    if d.stale or aged:
        return "STALE"
    if d.quarantined:
        return "quarantined"
    if body is not None and body.phase in ("draining", "drained"):
        return "draining"
    if body is not None and body.phase in ("ordered", "starting", "dead"):
        return "starting" if body.phase != "dead" else "stopping"
    if cordoned:
        return "cordoned"
    if d.host_bound:
        return "HOST-BOUND"
    if d.speed < 1:
        return "slow"
    return "throttled" if seen is not None and seen.sample.throttled else "ok"


def _predicted(device: str, body: Body | None, src: Sources) -> float | None:
    """The plan's rate of the device, where it does what the plan has it do."""
    role, rate = src.predicted.get(device, ("", 0.0))
    return rate if body is not None and body.role == role else None


def _modelled(d: DeviceBelief, body: Body | None, src: Sources) -> float | None:
    """The model's word on what it does now, in the newest block."""
    estimate = None if body is None else src.estimates.get((d.id, body.role))
    return None if estimate is None or body is None else estimate.modelled_tokens_per_s / len(body.devices)


def _note(d: DeviceBelief, sample: DeviceSample, body: Body | None, state: ClusterState) -> str:
    unit = _unit(body, state)
    dead = unit.reason if unit is not None and unit.status == "dead" else ""
    return d.lost or d.quarantined or sample.note or dead
