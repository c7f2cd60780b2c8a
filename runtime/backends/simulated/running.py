"""A whole simulated run behind the daemon: bodies come and go as the loop orders, what they do is the simulator's.

Always labelled simulated. Virtual time goes `speed` times as fast as the clock; where the simulation cannot keep up, a look
never takes long and virtual time lags. Steps name devices only, so when a trainer begins among devices
whose shapes are not known yet the planner is asked for them (about a second).
"""

import math
import time
from collections import deque
from collections.abc import Mapping

import planner
from planner.cluster import Device
from planner.columns import Columns
from planner.override import Override, Role
from planner.plan import Placement, Plan
from planner.problem import Budget, Problem
from planner.record import replace
from planner.refit import refitted
from planner.solution import Feasible
from runtime.backends.simulated.fleet import REPLICA_PHASES, TRAINER_PHASES, SimBody, SimFleet
from runtime.backends.simulated.script import Behaviour
from runtime.backends.simulated.status import flow_status
from runtime.core.action import Step
from runtime.core.observation import (
    Observation,
    ReplicaSeen,
    TrainerSeen,
)
from runtime.rl.types import FlowStatus
from runtime.sim.flow import SimulatedFlow
from runtime.sim.options import Costs
from runtime.sim.physics import Physics, flow_rules

BUDGET = Budget(evaluations=60, mip_seconds=1.0)  # of the shapes of a new trainer's run
LOOK_S = 0.2  # of real time that one look may simulate
RECENT = 40  # looks over which shares of time are told
_NOWHERE = Placement(role="train", kind="", devices=("",))


class SimulatedRun:
    """Implements `Backend`: the fleet of `problem` in virtual time. `steps`: the run is finished after so many."""

    def __init__(self, problem: Problem, *, speed: float, seed: int = 0, steps: int | None = None) -> None:
        costs = Costs()
        # A body takes its time in real seconds; at high speeds it is there with the next look.
        behaviour = Behaviour(start_s=costs.start_s / speed, drain_s=1.0 / speed, quiesce_s=costs.reform_s / speed)
        self.fleet = SimFleet(problem.cluster.devices, behaviour, (), seed)
        self.flow = SimulatedFlow(flow_rules(problem, steps=steps), seed)
        self.finished = False
        self._problem, self._speed, self._steps = problem, speed, steps
        self._physics = Physics(problem)
        self._places: dict[tuple[str, int], Placement | None] = {}
        self._known: dict[frozenset[str], Placement] = {}  # by devices
        self._serving: dict[tuple[str, int], str] = {}
        self._trainer: tuple[str, int] | None = None
        self._last_s: float | None = None
        self._allotted: Mapping[str, int] = {}
        self._looks: deque[tuple[float, int, float, float]] = deque(maxlen=RECENT)
        self._made: dict[str, deque[tuple[float, float]]] = {}  # replica -> (tokens decoded, busy seconds) at each look

    def observe(self, now_s: float) -> Observation:
        """Advance to `now_s` (unix seconds) and say what is there."""
        before_s = now_s if self._last_s is None else self._last_s
        self._last_s = now_s
        self.fleet.advance(now_s)
        self._settle()
        self.flow.granting.allot(
            {name: self._allotted[key[0]] for key, name in self._serving.items() if key[0] in self._allotted}
        )
        self._simulate(max(0.0, now_s - before_s) * self._speed)
        bodies = tuple(self.fleet.bodies.values())
        return Observation(
            at_s=now_s,
            devices=self.fleet.seen(now_s),
            replicas=tuple(self._replica(b) for b in bodies if not b.trains),
            trainers=tuple(self._trains(b) for b in bodies if b.trains),
            flow=self._status(bodies),
            flow_age_s=0.0,
        )

    def apply(self, step: Step) -> None:
        """Begin `step`."""
        self.fleet.begin(step)

    def allot(self, slots: Mapping[str, int]) -> None:
        """Replicas decode so many samples at once from the next look on."""
        self._allotted = slots

    def finish(self, deadline_s: float) -> None:
        """End every body."""
        self.fleet.bodies.clear()
        self._settle()
        self.finished = True

    def close(self) -> None:
        """Nothing holds on to anything here."""

    def _simulate(self, seconds: float) -> None:
        """Move the flow by virtual seconds, for no longer than a look may take."""
        until_s, deadline_s = self.flow.now_s + seconds, time.monotonic() + LOOK_S
        while self.flow.now_s < until_s:
            why = self.flow.advance(until_s, lambda: time.monotonic() > deadline_s)
            if why == "waits":
                self.flow.idle_until(until_s)
            elif why:
                break
        books = self.flow.books
        self._looks.append(
            (
                self.flow.now_s,
                books.generated_tokens + self.flow.partial_tokens(),
                books.trainer_s["waiting"],
                self._idle_s(),
            )
        )
        d = self.flow.decoding
        for name, i in self.flow.numbers.items():
            seen = (float(d.decoded[i]), float(d.spent[i, 0] + d.spent[i, 1] + d.stall[i] - d.updating[i]))
            self._made.setdefault(name, deque(maxlen=RECENT)).append(seen)
        self._made = {name: made for name, made in self._made.items() if name in self.flow.numbers}

    def _rate(self, i: int) -> float:
        """Tokens/s of a replica while it decodes or prefills new samples, as a plan counts it."""
        made = self._made.get(self.flow.decoding.lanes[i].name)
        if not made:
            return 0.0
        tokens, busy_s = (b - a for a, b in zip(made[0], made[-1], strict=True))
        return tokens / busy_s if busy_s > 0 else 0.0

    def _idle_s(self) -> float:
        d = self.flow.decoding
        return float(d.spent[:, 3].sum()) / max(1, len(d.lanes))

    # Bodies and what they do

    def _settle(self) -> None:
        """Replicas and the trainer of the flow are those whose bodies work."""
        working = {
            (b.id, b.epoch): b for b in self.fleet.bodies.values() if b.phase == "serving" and not b.hung_since_s
        }
        for key in [k for k in self._serving if k not in working]:
            body = self.fleet.bodies.get(key)
            self.flow.remove_replica(self._serving.pop(key), lost=body is not None and body.phase == "dead")
        if self._trainer is not None and self._trainer not in working:
            body = self.fleet.bodies.get(self._trainer)
            if body is None or body.phase != "draining" or self.flow.between_steps:
                self._trainer = None
                self.flow.set_trainer(None)
        for key, body in working.items():
            if body.trains and self._trainer is None:
                self._begin_training(key, body)
        trainer = None if self._trainer is None else self._place(self._trainer, self.fleet.bodies[self._trainer])
        new = [k for k, b in working.items() if not b.trains and k not in self._serving]
        if trainer is None or not new:
            return
        at = {k: p for k, b in working.items() if not b.trains and (p := self._place(k, b)) is not None}
        plan = Plan(placements=(trainer, *at.values()))
        for key, place in at.items():
            if key in new:
                self._serving[key] = f"{key[0]}:{key[1]}"
                path = self._physics.path(place, plan)
                self.flow.add_replica(self._serving[key], self._physics.replica(place), path)

    def _begin_training(self, key: tuple[str, int], body: SimBody) -> None:
        self._lay_out(body)
        place = self._place(key, body)
        rollouts = tuple(
            p for k, b in self.fleet.bodies.items() if not b.trains and (p := self._place(k, b)) is not None
        )
        if place is None or not rollouts:
            return
        speed = self._physics.trainer(Plan(placements=(place, *rollouts)))
        if speed is None:
            body.phase, body.reason = "dead", "the model does not fit these devices"
            return
        self._trainer = key
        self.flow.set_trainer(speed)

    def _lay_out(self, trainer: SimBody) -> None:
        """The planner's shapes for devices whose roles are given: the trainer's and those of what else is there."""
        there = [b for b in self.fleet.bodies.values() if b.phase != "dead"]
        known = [self._known.get(frozenset(b.devices)) for b in there]
        if all(p is not None and (p.role == "train") == b.trains for p, b in zip(known, there, strict=True)):
            return  # a trainer that begins again where it was, or among replicas laid out before
        roles: dict[str, Role] = {d: "rollout" for b in there if not b.trains for d in b.devices}
        roles |= dict.fromkeys(trainer.devices, "train")
        devices = tuple(d for d in self._problem.cluster.devices if d.id in roles)
        if not any(role == "rollout" for role in roles.values()):
            return
        pinned = replace(
            self._problem,
            cluster=replace(self._problem.cluster, devices=devices),
            overrides=tuple(Override(device=d.id, kind="pin", role=roles[d.id]) for d in devices),
            in_force=None,
        )
        found = planner.solve(pinned, budget=BUDGET)
        if isinstance(found, Feasible):
            self._known |= {frozenset(p.devices): p for p in found.plan.placements}

    def _place(self, key: tuple[str, int], body: SimBody) -> Placement | None:
        """The shape of a body: the planner's for its devices, else one made for them."""
        if key not in self._places:
            by_id = {d.id: d for d in self._problem.cluster.devices}
            devices = [by_id[d] for d in body.devices if d in by_id]
            known = self._known.get(frozenset(body.devices))
            if known is not None and (known.role == "train") == body.trains:
                self._places[key] = known
            elif body.trains:
                must = frozenset(d.id for d in devices)
                self._places[key] = refitted(Columns(self._physics.cost), _NOWHERE, devices, must=must)
            else:
                self._places[key] = _replica_on(devices)
        return self._places[key]

    # What is seen

    def _number(self, b: SimBody) -> int | None:
        name = self._serving.get((b.id, b.epoch))
        return None if name is None else self.flow.numbers.get(name)

    def _replica(self, b: SimBody) -> ReplicaSeen:
        i, d = self._number(b), self.flow.decoding
        running = 0 if i is None else int(d.n[i])
        rate, share, slots, version = 0.0, None, 0, None
        if i is not None:
            rate = self._rate(i)
            share = float(d.context[i] / d.capacity[i]) if math.isfinite(d.capacity[i]) else None
            slots, version = self.flow.granting.most(i), int(d.version[i])
        return ReplicaSeen(
            id=b.id, epoch=b.epoch, devices=b.devices, phase=REPLICA_PHASES[b.phase], version=version, digest=None,
            running=running, slots=slots, tokens_per_s=rate, kv_used_share=share, host_lag_share=None, pid=b.pid, age_s=0.0,
            leased=running, reason=b.reason,
        )  # fmt: skip

    def _trains(self, b: SimBody) -> TrainerSeen:
        books = self.flow.books
        serves = (b.id, b.epoch) == self._trainer
        last = books.steps[-1] if serves and books.steps else None
        rate = None if last is None else (last.trained_tokens + last.masked_tokens) / (last.ended_s - last.began_s)
        return TrainerSeen(
            id=b.id, epoch=b.epoch, devices=b.devices, phase=TRAINER_PHASES[b.phase],
            step=self.flow.version if b.phase == "serving" else None, tokens_per_s=rate, host_lag_share=None, pid=b.pid,
            age_s=0.0, reason=b.reason,
        )  # fmt: skip

    def _status(self, bodies: tuple[SimBody, ...]) -> FlowStatus:
        trainer = next((b for b in bodies if b.trains and b.phase != "dead"), None)
        (begin_s, tokens, waited, idle), (now_s, more, waits, idles) = self._looks[0], self._looks[-1]
        span = now_s - begin_s
        status = flow_status(
            self.flow,
            generated_tokens_per_s=(more - tokens) / span if span > 0 else 0.0,
            trainer_wait_share=min(1.0, max(0.0, (waits - waited) / span)) if span > 0 else 0.0,
            admission_wait_share=min(1.0, max(0.0, (idles - idle) / span)) if span > 0 else 0.0,
            steps=self._steps,
            orders={(b.id, b.epoch): (b, self._number(b)) for b in bodies if not b.trains},
        )
        return replace(
            status,
            trainer_epoch=None if trainer is None else trainer.epoch,
            trainer_state="absent" if trainer is None else self.flow.training.state.replace("updating", "waiting"),
        )


def _replica_on(devices: list[Device]) -> Placement | None:
    if not devices:
        return None
    machines = dict.fromkeys(d.node for d in devices)
    pp = len(machines) if len(devices) % len(machines) == 0 else len(devices)
    return Placement(
        role="rollout", kind=devices[0].kind, devices=tuple(d.id for d in devices), tp=len(devices) // pp, pp=pp
    )
