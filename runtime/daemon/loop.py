"""The control loop: observe, believe, record, fold, decide, record, act. One writer, nothing in it waits.

Time comes in as an argument (unix seconds), so that the same loop runs in virtual time in the tests.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from planner.cluster import Device
from planner.errors import HexError
from planner.override import Override
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record, replace
from planner.solution import Solution
from runtime.api.wire import Command, CommandResult, EventRow, Snapshot
from runtime.backends.protocol import Allotting, Backend
from runtime.core.action import StartReplica, StartTrainer, Step
from runtime.core.actual import bodies
from runtime.core.belief import believe
from runtime.core.calibrating import Calibrating, calibrate, without_units_gone
from runtime.core.command import handle
from runtime.core.drifting import Drifting, aside, doubtful, drift, learned, remembered, speeds
from runtime.core.event import UNSAID, DaemonStarted, Event, MilestoneReached
from runtime.core.fleet_event import DeviceJoined, DeviceLost, StepOrdered
from runtime.core.fold import fold
from runtime.core.limits import Limits, Memory, stretched
from runtime.core.modelled import CostedWork, corrected, rescored
from runtime.core.needing import Need, outdates
from runtime.core.observation import Observation
from runtime.core.plan_event import (
    FloorWaived,
    MigrationBlocked,
    MigrationUnblocked,
    PlanningFailed,
    PlanningStarted,
    PlanReached,
)
from runtime.core.reconcile import Blocked, Converged, Next, Steps, next_steps
from runtime.core.snapshot import SHOWN_EVENTS, Facts, snapshot
from runtime.core.state import ClusterState
from runtime.core.target import slots_of
from runtime.core.trigger import ConsentRule, due, judge, move_s, trigger_words, verdicts
from runtime.core.words import row
from runtime.daemon.series import Series
from runtime.policy.drift import DriftRule
from runtime.store.events import EventStore

logger = logging.getLogger("hexctl.events")
IN_SERVICE = "in service"  # milestone: a trainer and a replica are at work
REPEAT_S = 2.0  # a step that still has to be taken is applied again, in case its effect was lost
_LEVELS = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class PlanningAnswer(Protocol):
    """The end of one planning."""

    @property
    def solution(self) -> Solution | None: ...

    @property
    def error(self) -> str: ...

    @property
    def solve_s(self) -> float: ...


class Planning(Protocol):
    """Where plans are made; `runtime.planning.process.PlanningProcess` is the real one. Nothing here waits."""

    @property
    def busy(self) -> bool: ...

    def start(self, problem: Problem, scheduler: str) -> None: ...

    def poll(self) -> PlanningAnswer | None: ...

    def cancel(self) -> None: ...


MakeProblem = Callable[[tuple[Device, ...], tuple[Override, ...], Plan | None], Problem]


@record
class LoopSettings:
    """What the configuration says about the loop."""

    scheduler: str
    consent: ConsentRule = ConsentRule()
    limits: Limits = Limits()
    most_starts: int = 8
    drift: DriftRule | None = DriftRule()  # None: drift is shown, and not planned on


class Loop:
    """Holds the one current ClusterState. `backend` may come later: until then it only plans."""

    def __init__(
        self, *, settings: LoopSettings, store: EventStore, planning: Planning, problem: MakeProblem, facts: Facts
    ) -> None:
        self._settings, self._store, self._planning, self._problem = settings, store, planning, problem
        self.facts = facts
        self.backend: Backend | None = None
        self.state = ClusterState()
        self.observation: Observation | None = None
        self.next: Next | None = None
        self.progress: tuple[str, ...] = ()
        self.failed = False
        self._memory = Memory()
        self._working: Need | None = None  # what the planning under way answers
        self._asked: Problem | None = None  # and the problem it was asked
        self._calibrating, self._drifting = Calibrating(), Drifting()
        self._costed: tuple[object, CostedWork] | None = None  # and what it was made for
        self._applied: dict[str, float] = {}  # step id -> when it was last applied
        self._rows: deque[EventRow] = deque(maxlen=SHOWN_EVENTS)
        self._series = Series()
        self._seq = 0
        self._snapshot: Snapshot | None = None
        self._restore()

    def _restore(self) -> None:
        for stored in self._store.read():
            self.state = fold(self.state, (stored,))
            if not isinstance(stored.event, UNSAID):
                self._rows.append(row(stored, self.state))

    @property
    def seq(self) -> int:
        """Number of the newest snapshot; grows across restarts of the daemon too."""
        return self.state.daemon_epoch * 1_000_000_000 + self._seq

    @property
    def calm(self) -> bool:
        """Whether the run is in service as planned and nothing is on its way: no step, no planning, no question to anybody."""
        state = self.state
        settled = isinstance(self.next, Converged) and state.need is None and not self._planning.busy
        return settled and state.proposal is None and not state.ending and IN_SERVICE in state.milestones

    def begin(self, *, epoch: int, pid: int, adopted: bool, devices: Iterable[Device], now_s: float) -> None:
        """Record that this daemon took over, and the fleet as it was found."""
        self.record([DaemonStarted(epoch=epoch, pid=pid, adopted=adopted)], now_s)
        self._drifting = remembered(self.state)
        found = {d.id: d for d in devices}
        gone = [d.id for d in self.state.present if d.id not in found] if not adopted else []
        new = [d for d in found.values() if d.id not in self.state.devices or self.state.devices[d.id].lost]
        joined = [DeviceJoined(device=d.id, kind=d.kind, node=d.node, index=d.index, region=d.region) for d in new]
        self.record([*(DeviceLost(device=d, reason="not found at the start") for d in gone), *joined], now_s)

    def record(self, events: Iterable[Event], now_s: float) -> None:
        """Write events down, fold them in and say them. Raises RunError when the store cannot keep them."""
        stored = self._store.append(tuple(events), now_s)
        for s in stored:
            before = self.state
            self.state = fold(self.state, (s,))
            shown = row(s, self.state if isinstance(s.event, DeviceJoined) else before)
            if isinstance(s.event, UNSAID):
                continue
            self._rows.append(shown)
            logger.log(_LEVELS[shown.level], "%s", shown.message)
        if stored:
            self._changed()

    def _changed(self) -> None:
        self._seq += 1
        self._snapshot = None

    def tick(self, now_s: float) -> None:
        """One turn. Never waits; raises RunError only when nothing can be recorded."""
        if self.backend is not None:
            self.observation = self.backend.observe(now_s)
            plan = self.state.plan
            limits = stretched(self._settings.limits, None if plan is None else plan.prediction.train_s)
            events, self._memory = believe(self.observation, self.state, self._memory, limits, now_s)
            self.record(events, now_s)
            self._calibrate(self.observation, now_s)
            self._mark_service(now_s)
        self.record(verdicts(self.state, now_s), now_s)
        self._plan(now_s)
        if self.backend is not None and self.observation is not None and not self.state.ending:
            self._act(self.backend, self.observation, now_s)
        self._series.feed(self.observation, self.facts, self.state, now_s)
        self._changed()

    def _calibrate(self, obs: Observation, now_s: float) -> None:
        """Hold what was measured against the cost model: whole kinds, and single devices."""
        if self.state.ending:
            return
        rule = self._settings.drift
        try:
            self._calibrating = without_units_gone(self._calibrating, (d.id for d in self.state.present))
            slow = () if rule is None else aside(self.state, self._drifting)
            events, self._calibrating = calibrate(obs, self.state, self._calibrating, self._model, now_s, aside=slow)
        except HexError as e:
            logger.debug("no calibration: %s", e)
            return
        self.record(events, now_s)
        if rule is not None:
            drifted, self._drifting = drift(self._calibrating, self.state, self._drifting, rule, now_s)
            self.record((*learned(self._drifting, self.state, drifted), *drifted), now_s)

    def _model(self) -> CostedWork:
        """The cost model of the fleet as it is, without factors. Made anew when the fleet or the plan is another."""
        devices, plan = self._devices(), self.state.plan
        key = (devices, None if plan is None else plan.rev)
        if self._costed is None or self._costed[0] != key:
            in_force = None if plan is None else plan.plan
            self._costed = key, CostedWork(self._problem(devices, (), None), in_force)
        return self._costed[1]

    def _devices(self) -> tuple[Device, ...]:
        """Devices that may be planned with."""
        return tuple(
            Device(id=d.id, kind=d.kind, node=d.node, region=d.region, index=d.index)
            for d in self.state.present
            if not d.quarantined and d.kind in self.facts.kinds
        )

    def _mark_service(self, now_s: float) -> None:
        if IN_SERVICE in self.state.milestones:
            return
        serving = {u.role for u in self.state.units.values() if u.status == "serving"}
        if serving >= {"train", "rollout"}:
            self.record([MilestoneReached(name=IN_SERVICE, detail="a trainer and a replica are at work")], now_s)

    def _plan(self, now_s: float) -> None:
        if self._working is not None and outdates(self.state.need, self._working):
            self._planning.cancel()
            self._working = None
        answer = self._planning.poll()
        if answer is not None and self._working is not None:
            self._take(answer, self._working, now_s)
        need = self._due(now_s)
        if need is not None and not self._planning.busy and not self.state.ending:
            self._ask(need, now_s)

    def _due(self, now_s: float) -> Need | None:
        return due(self.state, now_s, drift=self._settings.drift, doubtful=doubtful(self._drifting))

    def _ask(self, need: Need, now_s: float) -> None:
        state = self.state
        devices = self._devices()
        ids = {d.id for d in devices}
        overrides = tuple(o for o in state.overrides if o.device in ids)  # of devices that may come back
        try:
            problem = self._problem(devices, overrides, state.plan.plan if state.plan else None)
            problem = self._as_slow_as_they_are(corrected(problem, state.calibration), need)
        except HexError as e:
            failed = PlanningFailed(trigger=trigger_words(need), message=str(e), need_rev=need.rev)
            self.record([failed], now_s)
            return
        self._working, self._asked = need, problem
        started = PlanningStarted(
            trigger=trigger_words(need),
            drift="drift" in need.causes,
            doubtful=tuple(sorted(doubtful(self._drifting))) if "drift" in need.causes else (),
        )
        self.record([started], now_s)
        self._planning.start(problem, self._settings.scheduler)

    def _as_slow_as_they_are(self, problem: Problem, need: Need) -> Problem:
        """The problem with devices that are slow; where that is all there is to it, with what a move costs."""
        rule, ids = self._settings.drift, {d.id for d in problem.cluster.devices}
        if rule is None:
            return problem
        problem = replace(problem, speeds={d: s for d, s in speeds(self.state).items() if d in ids})
        if need.causes != {"drift"}:
            return problem
        return replace(problem, switch_s=move_s(self.state), switch_horizon_s=rule.payback_s)

    def _take(self, answer: PlanningAnswer, need: Need, now_s: float) -> None:
        self._working = None
        if answer.solution is None:
            event: Event = PlanningFailed(trigger=trigger_words(need), message=answer.error, need_rev=need.rev)
        else:
            event = judge(
                self.state,
                need,
                answer.solution,
                solve_s=answer.solve_s,
                rule=self._settings.consent,
                now_s=now_s,
                now_tokens_per_s=self._in_force_now(),
                drift=self._settings.drift,
            )
        self.record([event], now_s)

    def _in_force_now(self) -> float | None:
        """What the plan in force is predicted to do under the problem that was asked; None when it cannot be said."""
        plan, problem = self.state.plan, self._asked
        return None if plan is None or problem is None else rescored(problem, plan.plan)

    def _act(self, backend: Backend, obs: Observation, now_s: float) -> None:
        if isinstance(backend, Allotting):
            backend.allot(slots_of(self.state))
        actual = bodies(obs, self.state)
        self.next = next_steps(actual, self.state, now_s, most_starts=self._settings.most_starts)
        match self.next:
            case Steps():
                self._take_steps(backend, self.next, now_s)
            case Blocked():
                planning = self.state.need is not None or self._planning.busy
                if not planning and not self.state.blocked:
                    blocked = MigrationBlocked(reason=self.next.reason, options=self.next.options)
                    self.record([blocked], now_s)
            case Converged():
                self._applied.clear()
                plan = self.state.plan
                if plan is not None and self.state.reached_rev != plan.rev:
                    self.record([PlanReached(rev=plan.rev)], now_s)

    def _take_steps(self, backend: Backend, steps: Steps, now_s: float) -> None:
        """Record what is new, then apply; what was recorded before is applied again when it seems to be lost."""
        state = self.state
        rev = state.plan.rev if state.plan is not None else 0
        events: list[Event] = [MigrationUnblocked()] if state.blocked else []
        if steps.waived and state.floor_waived_rev != rev:
            events.append(FloorWaived(rev=rev, reason=steps.waived))
        events += [_ordered(s, rev) for s in steps.now if not _is_recorded(s, state)]
        self.record(events, now_s)
        ids = {s.id for s in steps.now}
        self._applied = {i: at_s for i, at_s in self._applied.items() if i in ids}
        for s in steps.now:
            if now_s - self._applied.get(s.id, float("-inf")) >= REPEAT_S:
                self._applied[s.id] = now_s
                backend.apply(s)

    def command(self, c: Command, now_s: float) -> CommandResult:
        """Carry out a request at once: recorded and folded when this returns. RefusedError when the answer is no."""
        events, result = handle(c, self.state, now_s)
        self.record(events, now_s)
        return result

    def snapshot(self, now_s: float) -> Snapshot:
        """The newest snapshot; built when it is asked for."""
        if self._snapshot is None or self._snapshot.seq != self.seq:
            self._snapshot = snapshot(
                self.facts,
                self.state,
                self.observation,
                self._memory,
                seq=self.seq,
                now_s=now_s,
                next_=self.next,
                events=tuple(self._rows),
                series=self._series.view(),
                progress=self.progress,
                failed=self.failed,
                calibrating=self._calibrating,
            )
        return self._snapshot

    def events(self, after: int, limit: int) -> tuple[EventRow, ...]:
        """Events from the store, in words."""
        stored = self._store.read(after, limit, without=UNSAID)
        return tuple(row(s, self.state) for s in stored)


def _is_recorded(step: Step, state: ClusterState) -> bool:
    unit = state.units.get(_unit_of(step))
    return unit is not None and step.id in unit.orders


def _unit_of(step: Step) -> str:
    match step:
        case StartReplica(replica=unit) | StartTrainer(trainer=unit):
            return unit
        case _:
            return step.id.split(":")[1]


def _ordered(step: Step, plan_rev: int) -> StepOrdered:
    devices = step.devices if isinstance(step, StartReplica | StartTrainer) else ()
    return StepOrdered(id=step.id, unit=_unit_of(step), epoch=step.epoch, devices=devices, plan_rev=plan_rev)
