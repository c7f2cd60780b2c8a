"""Small states and observations, written out by hand."""

from planner.plan import Placement, Plan, Prediction
from planner.record import replace
from runtime.core.actual import Body, Phase
from runtime.core.event import DaemonStarted, Event, Stored
from runtime.core.fleet_event import DeviceJoined, StepOrdered, UnitServed
from runtime.core.fold import fold
from runtime.core.observation import (
    DeviceSample,
    DeviceSeen,
    Observation,
    ReplicaPhase,
    ReplicaSeen,
    TrainerPhase,
    TrainerSeen,
)
from runtime.core.plan_event import PlanAdopted
from runtime.core.solved import SolvedPlan
from runtime.core.state import ClusterState
from runtime.rl.types import EngineStats, FlowStatus, ReplicaStatus

NOW_S = 5000.0


def stored(*events: Event, at_s: float = NOW_S) -> list[Stored]:
    return [Stored(seq=i, at_s=at_s, event=e) for i, e in enumerate(events, 1)]


def solved(train: str | None, *rollouts: str, rev: int = 1) -> SolvedPlan:
    placements = [
        Placement(role="rollout", kind="k", devices=tuple(r.split("+")), rate_tokens_per_s=100.0) for r in rollouts
    ]
    if train is not None:
        placements.insert(0, Placement(role="train", kind="k", devices=(train,), rate_tokens_per_s=400.0))
    return SolvedPlan(
        rev=rev,
        plan=Plan(placements=tuple(placements)),
        prediction=Prediction(
            step_s=1.0, train_s=1.0, rollout_s=1.0, update_s=0.0, tokens_per_s=300.0, usd_per_h=None, usd_per_mtok=None
        ),
        scheduler="toy",
        bound_tokens_per_s=310.0,
        bound_scope="toy",
        gap=0.03,
        solve_s=0.1,
        finished=True,
        headline="one trains",
        why=("because",),
        trigger="start",
        made_at_s=NOW_S,
    )


def joined(*devices: str) -> list[Event]:
    return [DeviceJoined(device=d, kind="k", node="n0", index=i) for i, d in enumerate(devices)]


def fleet(
    *devices: str, plan: SolvedPlan | None = None, more: tuple[Event, ...] = (), at_s: float = NOW_S
) -> ClusterState:
    """A state with devices and a plan in force; nothing is started."""
    events: list[Event] = [DaemonStarted(epoch=1, pid=1, adopted=False), *joined(*devices)]
    if plan is not None:
        events.append(PlanAdopted(solved=plan, need_rev=99))
    return fold(ClusterState(), stored(*events, *more, at_s=at_s))


def started(unit: str, *devices: str, epoch: int = 1, serving: bool = True) -> tuple[Event, ...]:
    kind = "trainer" if unit.startswith("t") else "replica"
    order = StepOrdered(id=f"start-{kind}:{unit}:{epoch}", unit=unit, epoch=epoch, devices=devices, plan_rev=1)
    return (order, UnitServed(unit=unit, epoch=epoch, version=0, after_s=1.0)) if serving else (order,)


def body(
    unit: str, *devices: str, phase: Phase = "serving", epoch: int = 1, leaving: bool = False, leased: int = 0
) -> Body:
    role = "train" if unit.startswith("t") else "rollout"
    return Body(unit=unit, epoch=epoch, role=role, devices=devices, phase=phase, leaving=leaving, leased=leased)


def device(id_: str, *, present: bool | None = True, age_s: float | None = 0.0, **sample: object) -> DeviceSeen:
    return DeviceSeen(
        id=id_, kind="k", node="n0", index=0, present=present, sample=replace(DeviceSample(), **sample), age_s=age_s
    )


def replica(id_: str, *devices: str, phase: ReplicaPhase = "serving", epoch: int = 1, **changes: object) -> ReplicaSeen:
    base = ReplicaSeen(
        id=id_,
        epoch=epoch,
        devices=devices,
        phase=phase,
        version=3,
        digest="9f3c",
        running=8,
        slots=16,
        tokens_per_s=100.0,
        kv_used_share=0.5,
        host_lag_share=None,
        pid=11,
        age_s=0.1,
        leased=8,
    )
    return replace(base, **changes)


def trainer(*devices: str, phase: TrainerPhase = "running", epoch: int = 1, **changes: object) -> TrainerSeen:
    base = TrainerSeen(
        id="t0",
        epoch=epoch,
        devices=devices,
        phase=phase,
        step=3,
        tokens_per_s=400.0,
        host_lag_share=None,
        pid=12,
        age_s=0.1,
    )
    return replace(base, **changes)


def status(unit: str, *, decoded: int = 0, running: int = 8, leased: int = 8) -> ReplicaStatus:
    return ReplicaStatus(
        replica=unit,
        epoch=1,
        order="serve",
        version=3,
        digest=None,
        verified=True,
        leased=leased,
        stats=EngineStats(running=running, slots=16, decoded_tokens=decoded),
        last_exchange_age_s=0.1,
        unflushed_tokens=0,
        pid=11,
    )


def flow(*replicas: ReplicaStatus, **changes: object) -> FlowStatus:
    base = FlowStatus(
        step=3,
        lineage=0,
        weights=None,
        eta=4,
        generated_tokens=100,
        trained_tokens=60,
        masked_tokens=10,
        in_flight_tokens=25,
        wasted_tokens={"cancelled": 5},
        redone_tokens=2,
        samples_by_state={"APPLIED": 9},
        queue_groups=16,
        admitted_groups=20,
        staleness_mean=1.5,
        staleness_p95=3.0,
        staleness_max=4,
        spans_two_versions_share=0.2,
        reward_mean=0.7,
        generated_tokens_per_s=210.0,
        trained_tokens_per_s=200.0,
        trainer_wait_share=0.1,
        admission_wait_share=0.0,
        waits="",
        replicas=replicas,
        trainer_epoch=1,
        trainer_state="training",
        trainer_age_s=0.5,
        finished=False,
        last_metrics={"kl": 0.01},
        steps_done=0,
    )
    return replace(base, **changes)


def observed(
    *things: DeviceSeen | ReplicaSeen | TrainerSeen, of_flow: FlowStatus | None = None, flow_age_s: float | None = 0.2
) -> Observation:
    return Observation(
        at_s=NOW_S,
        devices=tuple(x for x in things if isinstance(x, DeviceSeen)),
        replicas=tuple(x for x in things if isinstance(x, ReplicaSeen)),
        trainers=tuple(x for x in things if isinstance(x, TrainerSeen)),
        flow=of_flow,
        flow_age_s=None if of_flow is None else flow_age_s,
    )
