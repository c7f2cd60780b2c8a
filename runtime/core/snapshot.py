"""The one door out: a Snapshot from what the loop knows. Pure."""

from collections.abc import Mapping

from planner.cluster import DeviceKind, fleet_usd_per_h
from planner.record import record, replace
from runtime.api.wire import EventRow, MigrationView, RunState, RunView, Snapshot
from runtime.core.action import describe
from runtime.core.calibrating import Calibrating
from runtime.core.limits import Limits, Memory
from runtime.core.observation import Observation
from runtime.core.reconcile import Blocked, Next, Steps
from runtime.core.state import ClusterState
from runtime.core.view import (
    calibration_rows,
    device_rows,
    fleet_power_w,
    flow_view,
    plan_view,
    proposal_view,
    sources,
)

SHOWN_EVENTS = 200


@record
class Facts:
    """What does not change while the daemon lives."""

    run: RunView
    kinds: Mapping[str, DeviceKind]
    groups_per_batch: int
    limits: Limits = Limits()


def snapshot(
    facts: Facts,
    state: ClusterState,
    obs: Observation | None,
    memory: Memory,
    *,
    seq: int,
    now_s: float,
    next_: Next | None,
    events: tuple[EventRow, ...],
    series: Mapping[str, tuple[float, ...]],
    progress: tuple[str, ...] = (),
    failed: bool = False,
    calibrating: Calibrating | None = None,
) -> Snapshot:
    """Everything a reader may know now. `progress`: what the start-up is doing, in words; shown as problems are."""
    usd_per_h = fleet_usd_per_h(facts.kinds, (d.kind for d in state.present))
    flow = None
    if obs is not None and obs.flow is not None:
        flow = flow_view(obs.flow, usd_per_h, fleet_power_w(obs.devices), facts.groups_per_batch)
    calibrating = calibrating or Calibrating()
    looked_up = sources(state, obs, memory.rates, facts.kinds, facts.limits, calibrating=calibrating)
    return Snapshot(
        seq=seq,
        at_s=now_s,
        run=replace(facts.run, state=_run_state(state, failed)),
        flow=flow,
        flow_age_s=None if obs is None else obs.flow_age_s,
        devices=device_rows(looked_up),
        plan=None if state.plan is None else plan_view(state.plan),
        proposal=proposal_view(state.proposal),
        infeasible=state.infeasible,
        migration=_migration(next_),
        events=events[-SHOWN_EVENTS:],
        series=series,
        resident_bytes=None if obs is None else obs.host.resident_bytes,
        problems=(
            *progress,
            *_planning_problem(state),
            *(() if obs is None else obs.problems),
            *_price_problem(state, facts.kinds),
        ),
        calibration=calibration_rows(state, calibrating, now_s),
    )


def _run_state(state: ClusterState, failed: bool) -> RunState:
    if failed:
        return "failed"
    if state.ended:
        return "finished"
    if state.ending:
        return "stopping"
    return "running" if "in service" in state.milestones else "starting"


def _migration(next_: Next | None) -> MigrationView:
    if isinstance(next_, Steps):
        running = tuple(dict.fromkeys((*(describe(s) for s in next_.now), *next_.running)))
        waiting = (*next_.waiting, *((next_.waived,) if next_.waived else ()))
        return MigrationView(running=running, waiting=waiting)
    if isinstance(next_, Blocked):
        options = f" (options: {'; '.join(next_.options)})" if next_.options else ""
        return MigrationView(running=(), waiting=(), blocked=next_.reason + options)
    return MigrationView(running=(), waiting=())


def _planning_problem(state: ClusterState) -> tuple[str, ...]:
    """The newest planning broke and is tried again."""
    if state.planning_failed_at_s is None or state.need is None:
        return ()
    return ("planning failed, it is tried again: " + ", ".join(dict.fromkeys(state.need.reasons)),)


def _price_problem(state: ClusterState, kinds: Mapping[str, DeviceKind]) -> tuple[str, ...]:
    """Some kinds have a price and some do not: then no sum is shown, and this says why."""
    priced = {d.kind for d in state.present if d.kind in kinds and kinds[d.kind].price_usd_per_h is not None}
    unpriced = {d.kind for d in state.present} - priced
    if not priced or not unpriced:
        return ()
    return (f"no price for kind {', '.join(sorted(unpriced))}: dollars are not shown",)
