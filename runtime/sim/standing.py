"""What stands where in a simulated run: devices that are there, replicas and the trainer on them, and how a plan comes to stand.

Starting, loading and moving take the times of `Costs`; a trainer moves at a step boundary, and replicas on devices that it held
start when they are free. What is to stand, and what a change of the fleet asks for, `runtime.sim.run` says.
"""

from collections.abc import Callable, Sequence

from planner.cluster import Device
from planner.cost.decode import ReplicaShape
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.record import replace
from runtime.sim.flow import SimulatedFlow
from runtime.sim.options import Costs
from runtime.sim.physics import Physics
from runtime.sim.speed import ReplicaSpeed
from runtime.sim.timeline import Timeline

At = Callable[[float, Callable[[], None]], None]  # do something at a time


class Standing:
    """`present`: devices by id. `slow`: how many times as long as they should some of them take."""

    def __init__(self, problem: Problem, costs: Costs, flow: SimulatedFlow, at: At, timeline: Timeline | None) -> None:
        self.present: dict[str, Device] = {d.id: d for d in problem.cluster.devices}
        self.slow: dict[str, float] = {}
        self.placed: dict[str, Placement] = {}  # replicas that serve or start, by name
        self.serving: set[str] = set()
        self.train: Placement | None = None  # of the trainer that is there
        self.wanted: Plan | None = None  # what is to stand; its trainer from the next step boundary on
        self._moving = 0  # epoch of trainer moves
        self._problem, self._costs, self._flow = problem, costs, flow
        self._at, self._timeline = at, timeline
        self._tables: dict[tuple[ReplicaShape, int], ReplicaSpeed] = {}

    # Devices

    def change(self, devices: Sequence[Device], *, remove: bool) -> tuple[set[str], list[Device]]:
        """Devices go, or else come; answers with the ids of those that did go, and with those that did come."""
        gone = {d.id for d in devices} if remove else set()
        came = [d for d in devices if d.id not in self.present and d.id not in gone]
        gone &= self.present.keys()
        self.present = {
            d.id: d for d in self._problem.cluster.devices if (d.id in self.present or d in came) and d.id not in gone
        }
        return gone, came

    def slow_down(self, devices: Sequence[Device], factor: float) -> None:
        """From now on everything takes `factor` times as long on them."""
        for d in devices:
            self.slow[d.id] = max(factor, 1e-3)
        for name, p in self.placed.items():
            self._flow.slow_replica(name, self._factor(p))
        if self.train is not None:
            self._flow.slow_trainer(self._factor(self.train))

    def _factor(self, p: Placement) -> float:
        return max((self.slow.get(d, 1.0) for d in p.devices), default=1.0)

    def there(self, plan: Plan) -> bool:
        """Whether all devices of a plan are."""
        return all(d in self.present for p in plan.placements for d in p.devices)

    def physics(self, plan: Plan) -> Physics:
        """Of a cluster that has the plan's devices, whether they are there or not."""
        wanted = {d for p in plan.placements for d in p.devices} | self.present.keys()
        cluster = replace(
            self._problem.cluster, devices=tuple(d for d in self._problem.cluster.devices if d.id in wanted)
        )
        return Physics(replace(self._problem, cluster=cluster), self._tables)

    # A plan comes to stand

    def put(self, plan: Plan, physics: Physics, *, at_once: bool) -> None:
        """Replicas that the plan does not have stop, new ones start, the trainer moves between steps. `at_once`: it takes no
        time."""
        wanted = {_name(p): p for p in plan.rollouts}
        for name, p in list(self.placed.items()):
            if name not in wanted or _shape(wanted[name]) != _shape(p):
                self._stop(name, lost=False)
        self.wanted = plan
        if self._trains(plan):
            self._finish_move(physics)
        elif at_once or self._flow.between_steps:
            self._move_trainer(plan, at_once=at_once)
        for name, p in wanted.items():
            if name not in self.placed and not self._held_by_trainer(p, plan):
                self._start(p, physics, at_once=at_once)

    def step_ended(self) -> None:
        """A trainer that is to move moves now."""
        plan = self.wanted
        if plan is not None and plan.train is not None and not self._trains(plan):
            self._move_trainer(plan, at_once=False)

    def restore(self, plan: Plan) -> None:
        """Of a plan that stood, what was lost starts anew where its devices are all there again."""
        physics = self.physics(plan)
        self._start_missing(plan, physics)
        train = plan.train
        if self.train is None and train is not None and all(d in self.present for d in train.devices):
            self._moving += 1
            self._reform(lambda: self._finish_move(physics))

    def has(self, plan: Plan) -> bool:
        """Whether all replicas of a plan serve or start, and a trainer trains or moves."""
        replicas = all(_name(p) in self.placed for p in plan.rollouts)
        return self.wanted is not None and replicas and (self.train is not None or self._moving > 0)

    def wants(self, devices: set[str]) -> bool:
        """Whether the plan that is to stand has some of the devices."""
        return self.wanted is not None and any(devices & set(p.devices) for p in self.wanted.placements)

    def _trains(self, plan: Plan) -> bool:
        """Whether the trainer that is there is the plan's."""
        return self.train is not None and plan.train is not None and _shape(self.train) == _shape(plan.train)

    def _held_by_trainer(self, p: Placement, plan: Plan) -> bool:
        """Whether the replica's devices are still the old trainer's; it starts when they are free."""
        return self.train is not None and not self._trains(plan) and bool(set(p.devices) & set(self.train.devices))

    def _start_missing(self, plan: Plan, physics: Physics) -> None:
        for p in plan.rollouts:
            if _name(p) not in self.placed:
                self._start(p, physics, at_once=False)

    def _start(self, p: Placement, physics: Physics, *, at_once: bool) -> None:
        if not all(d in self.present for d in p.devices) or self.wanted is None:
            return
        name = _name(p)
        self.placed[name] = p
        path = physics.path(p, self.wanted)

        def serve() -> None:
            if self.placed.get(name) is p and name not in self.serving:
                self.serving.add(name)
                self._flow.add_replica(name, physics.replica(p), path)
                self._flow.slow_replica(name, self._factor(p))

        if at_once:
            serve()
            return
        load_s = path.fixed_s + path.size_bytes / path.bytes_per_s
        now_s, start_s = self._flow.now_s, self._costs.start_s
        if self._timeline is not None:
            self._timeline.span("replicas", name, "start", now_s, now_s + start_s)
        self._at(now_s + start_s + load_s, serve)

    def _move_trainer(self, plan: Plan, *, at_once: bool) -> None:
        self._moving += 1
        self.train = None
        if self._flow.training.speed is not None:
            self._flow.set_trainer(None)
        if at_once:
            self._finish_move(self.physics(plan))
            return
        self._start_missing(plan, self.physics(plan))  # on devices that the old trainer held
        self._reform(lambda: None if self.wanted is None else self._finish_move(self.physics(self.wanted)))

    def _reform(self, formed: Callable[[], None]) -> None:
        """`formed` when a trainer has formed, unless it moves anew or is lost before."""
        epoch = self._moving
        self._at(self._flow.now_s + self._costs.reform_s, lambda: formed() if epoch == self._moving else None)

    def _finish_move(self, physics: Physics) -> None:
        """The trainer of the plan in force is there, or its speed is another beside other replicas."""
        plan = self.wanted
        if plan is None or plan.train is None or not all(d in self.present for d in plan.train.devices):
            return
        if self.train is None:
            self.train = plan.train
            self._flow.set_trainer(physics.trainer(plan), slow=self._factor(plan.train))
        for p in plan.rollouts:  # a replica that stays may have another relay now
            if _name(p) in self.serving:
                self._flow.weights.join(_name(p), physics.path(p, plan))

    # What stands ends

    def lose(self, gone: set[str]) -> str:
        """What runs on devices that are gone ends; answers with what it was, in words."""
        hit = [name for name, p in self.placed.items() if gone & set(p.devices)]
        for name in hit:
            self._stop(name, lost=True)
        trainer = self.train is not None and bool(gone & set(self.train.devices))
        if trainer:
            self._moving += 1
            self.train = None
            self._flow.set_trainer(None)
        replicas = [f"{len(hit)} replica{'' if len(hit) == 1 else 's'}"] if hit else []
        parts = replicas + (["the trainer"] if trainer else [])
        return f"lost {' and '.join(parts)}" if parts else "lost devices of the plan" if self.wants(gone) else ""

    def stop(self) -> None:
        """Nothing is to stand any more."""
        for name in list(self.placed):
            self._stop(name, lost=False)
        self.train, self.wanted = None, None

    def _stop(self, name: str, *, lost: bool) -> None:
        self.placed.pop(name, None)
        if name in self.serving:
            self.serving.discard(name)
            self._flow.remove_replica(name, lost=lost)


def _name(p: Placement) -> str:
    return f"replica {p.devices[0]}"


def _shape(p: Placement) -> object:
    return (p.role, p.devices, p.tp, p.pp, p.dp, tuple((s.devices, s.tp, s.dp, s.layers) for s in p.stages))
