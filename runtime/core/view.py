"""Rows of the snapshot: devices with their role and status, plans, flow's figures, money. Pure."""

from collections.abc import Iterable, Mapping
from typing import Literal

from planner.cluster import DeviceKind
from planner.plan import Placement
from planner.record import record
from runtime.api.wire import DeviceRow, FlowView, PlacementRow, PlanView, Proposal
from runtime.core.actual import Body
from runtime.core.limits import Limits, Rate
from runtime.core.observation import DeviceSample, DeviceSeen, Observation, ReplicaSeen, TrainerSeen
from runtime.core.solved import SolvedPlan
from runtime.core.state import ClusterState, DeviceBelief, OpenProposal, Unit
from runtime.core.unit_belief import seen_units
from runtime.rl.types import FlowStatus


def fleet_usd_per_h(state: ClusterState, kinds: Mapping[str, DeviceKind]) -> float | None:
    """What all devices that are there cost an hour, idle ones too; None unless every one of them has a price."""
    prices = [kinds[d.kind].price_usd_per_h if d.kind in kinds else None for d in state.present]
    known = [p for p in prices if p is not None]
    return sum(known) if known and len(known) == len(prices) else None


def usd_per_mtok(usd_per_h: float | None, tokens_per_s: float | None) -> float | None:
    """Dollars per million tokens at that rate; None without a price or a rate, never 0."""
    if usd_per_h is None or tokens_per_s is None or not tokens_per_s > 0:
        return None
    return usd_per_h / (tokens_per_s * 3600.0) * 1e6


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


def flow_view(f: FlowStatus, usd_per_h: float | None, groups_per_batch: int) -> FlowView:
    """Flow's figures and what they cost. `groups_per_batch`: G."""
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
        trainer_wait_share=f.trainer_wait_share,
        admission_wait_share=f.admission_wait_share,
        waits=f.waits,
        samples_by_state=f.samples_by_state,
        steps_done=f.steps_done,
        spans_two_versions_share=f.spans_two_versions_share,
        metrics=f.last_metrics,
    )


@record
class Sources:
    """What device rows are made from."""

    state: ClusterState
    obs: Observation | None
    actual: tuple[Body, ...]
    rates: Mapping[str, Rate]
    kinds: Mapping[str, DeviceKind]
    limits: Limits


def device_rows(src: Sources) -> tuple[DeviceRow, ...]:
    """A row for every device that was ever seen, by node and index."""
    devices = sorted(src.state.devices.values(), key=lambda d: (d.node, d.index, d.id))
    return tuple(_device_row(d, src) for d in devices)


def _device_row(d: DeviceBelief, src: Sources) -> DeviceRow:
    seen = next((x for x in (src.obs.devices if src.obs else ()) if x.id == d.id), None)
    sample = seen.sample if seen is not None and not d.lost else DeviceSample()
    body = _body_on(d.id, src.actual)
    unit = None if body is None else _seen(body, src.obs)
    kind = src.kinds.get(d.kind)
    role = _role(d, body, src.state)
    rate = None if body is None else src.rates.get(f"{body.unit}:{body.epoch}")
    tokens_per_s = None if rate is None or body is None else rate.tokens_per_s / len(body.devices)
    price = None if kind is None or d.lost else kind.price_usd_per_h
    pin = src.state.override(d.id, "pin")
    replica = unit if isinstance(unit, ReplicaSeen) else None
    return DeviceRow(
        id=d.id,
        display=d.display,
        kind=d.kind,
        node=d.node,
        index=d.index,
        role=role,
        status=_status(d, seen, body, src),
        paced=kind is not None and kind.paced,
        replica=None if body is None else body.unit,
        version=_version(unit, src.obs),
        digest=None if replica is None else replica.digest,
        util_share=sample.util_share,
        memory_used_bytes=sample.memory_used_bytes,
        memory_total_bytes=sample.memory_total_bytes,
        power_w=sample.power_w,
        temperature_c=sample.temperature_c,
        tokens_per_s=tokens_per_s,
        predicted_tokens_per_s=_predicted(d.id, body, src.state),
        usd_per_h=price,
        usd_per_mtok=usd_per_mtok(price, tokens_per_s),
        running=None if replica is None else replica.running,
        slots=None if replica is None else replica.slots,
        pid=None if unit is None else unit.pid,
        cordoned=src.state.override(d.id, "cordon", "drain") is not None,
        pinned=None if pin is None else pin.role,
        age_s=None if seen is None else seen.age_s,
        note=_note(d, sample, body, src.state),
    )


def _body_on(device: str, actual: Iterable[Body]) -> Body | None:
    """The newest body on a device, a living one before a dead one."""
    here = [b for b in actual if device in b.devices]
    return max(here, key=lambda b: (b.phase != "dead", b.epoch), default=None)


def _seen(body: Body, obs: Observation | None) -> ReplicaSeen | TrainerSeen | None:
    units = () if obs is None else seen_units(obs)
    return next((u for u in units if u.id == body.unit and u.epoch == body.epoch), None)


def _version(unit: ReplicaSeen | TrainerSeen | None, obs: Observation | None) -> int | None:
    if isinstance(unit, ReplicaSeen):
        return unit.version
    if unit is not None and obs is not None and obs.flow is not None:
        return obs.flow.step
    return None


def _role(d: DeviceBelief, body: Body | None, state: ClusterState) -> Literal["train", "rollout", "idle"]:
    if body is not None:
        return body.role
    return "idle" if d.lost or state.plan is None else state.plan.plan.role_of(d.id)


def _unit(body: Body | None, state: ClusterState) -> Unit | None:
    unit = None if body is None else state.units.get(body.unit)
    return unit if unit is not None and body is not None and unit.epoch == body.epoch else None


def _status(d: DeviceBelief, seen: DeviceSeen | None, body: Body | None, src: Sources) -> str:
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
    if src.state.override(d.id, "cordon", "drain") is not None:
        return "cordoned"
    if d.host_bound:
        return "HOST-BOUND"
    return "throttled" if seen is not None and seen.sample.throttled else "ok"


def _predicted(device: str, body: Body | None, state: ClusterState) -> float | None:
    """The plan's rate of the device, where it does what the plan has it do."""
    if state.plan is None:
        return None
    for p in state.plan.plan.placements:
        if device in p.devices and p.rate_tokens_per_s is not None and body is not None and body.role == p.role:
            return p.rate_tokens_per_s / len(p.devices)
    return None


def _note(d: DeviceBelief, sample: DeviceSample, body: Body | None, state: ClusterState) -> str:
    unit = _unit(body, state)
    dead = unit.reason if unit is not None and unit.status == "dead" else ""
    return d.lost or d.quarantined or sample.note or dead
