"""A control loop over the simulated fleet in virtual time, with a planner that answers at once."""

from collections.abc import Iterable
from pathlib import Path

from planner.cluster import Cluster, Device, DeviceKind, Link
from planner.model import ModelSpec
from planner.override import Override
from planner.plan import Placement, Plan, Prediction
from planner.problem import Capabilities, Problem
from planner.record import replace
from planner.solution import Conflict, Explanation, Feasible, Infeasible, Solution
from planner.workload import Lengths, Workload
from runtime.api.wire import Command, CommandResult, RunView
from runtime.backends.simulated.backend import SimulatedBackend
from runtime.backends.simulated.script import Behaviour, Fault
from runtime.core.action import Step
from runtime.core.limits import Limits
from runtime.core.observation import Observation
from runtime.core.reconcile import Converged
from runtime.core.snapshot import Facts
from runtime.core.trigger import ConsentRule
from runtime.daemon.loop import Loop, LoopSettings
from runtime.planning.process import PlanningResult
from runtime.store.events import EventStore, open_store

TICK_S = 0.5
KINDS = {
    "fast": DeviceKind(
        name="fast", peak_flops=4e12, hbm_bytes_per_s=1e11, memory_bytes=8e9, link_bytes_per_s=1e10, price_usd_per_h=2.0
    ),
    "wide": DeviceKind(
        name="wide", peak_flops=1e12, hbm_bytes_per_s=4e11, memory_bytes=8e9, link_bytes_per_s=1e10, price_usd_per_h=1.0
    ),
}
SHAPE = ModelSpec(name="m", hidden=64, intermediate=128, layers=2, heads=4, kv_heads=2, head_dim=16, vocab=64)
LOAD = Workload(
    prompts_per_step=8,
    responses_per_prompt=4,
    prompt=Lengths(mean_tokens=8, max_tokens=16),
    response=Lengths(mean_tokens=8, max_tokens=16),
)


def device(n: int) -> Device:
    return Device(id=f"d{n}", kind="fast" if n == 0 else "wide", node="n0", index=n)


def cluster(count: int) -> Cluster:
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    return Cluster(kinds=KINDS, devices=tuple(device(i) for i in range(count)), same_kind=link, cross_kind=link)


def toy_solve(problem: Problem) -> Solution:
    """One trainer (the device pinned to it, else the one in force, else the first that may), the rest roll out."""
    barred = {o.device for o in problem.overrides if o.kind in ("cordon", "drain") or o.role == "idle"}
    pins = {o.device: o.role for o in problem.overrides if o.kind == "pin"}
    free = sorted(d.id for d in problem.cluster.devices if d.id not in barred)
    trainers = [d for d in free if pins.get(d) == "train"] or [d for d in free if d not in pins]
    old = problem.in_force.train.devices[0] if problem.in_force and problem.in_force.train else None
    train = old if old in trainers else (trainers[0] if trainers else None)
    rollouts = [d for d in free if d != train and pins.get(d) != "train"]
    if train is None or not rollouts:
        return Infeasible(conflicts=(Conflict(limit="devices", detail="two are needed"),), scheduler="toy")
    kinds = {d.id: d.kind for d in problem.cluster.devices}
    placements = [Placement(role="train", kind=kinds[train], devices=(train,), rate_tokens_per_s=400.0)]
    placements += [Placement(role="rollout", kind=kinds[d], devices=(d,), rate_tokens_per_s=100.0) for d in rollouts]
    rate = min(400.0, 100.0 * len(rollouts))
    prediction = Prediction(
        step_s=1.0, train_s=1.0, rollout_s=1.0, update_s=0.0, tokens_per_s=rate, usd_per_h=None, usd_per_mtok=None
    )
    return Feasible(
        plan=Plan(placements=tuple(placements)),
        prediction=prediction,
        bound_tokens_per_s=rate,
        bound_scope="toy",
        explanation=Explanation(headline="toy"),
        scheduler="toy",
        evaluations=1,
    )


class ToyPlanning:
    """Answers at the next poll."""

    def __init__(self) -> None:
        self.solved = 0
        self.problems: list[Problem] = []
        self._problem: Problem | None = None

    @property
    def busy(self) -> bool:
        return self._problem is not None

    def start(self, problem: Problem, scheduler: str) -> None:
        self._problem = problem
        self.problems.append(problem)

    def poll(self) -> PlanningResult | None:
        if self._problem is None:
            return None
        problem, self._problem = self._problem, None
        strangers = {o.device for o in problem.overrides} - {d.id for d in problem.cluster.devices}
        if strangers:  # as the real planner
            return PlanningResult(solution=None, error=f"overrides of {strangers}, not in the cluster", solve_s=0.01)
        solution = toy_solve(problem)
        self.solved += 1
        return PlanningResult(solution=solution, error="", solve_s=0.01)

    def cancel(self) -> None:
        self._problem = None


class Witness:
    """A backend that passes everything on and notes what was recorded when a step came."""

    def __init__(self, backend: SimulatedBackend) -> None:
        self.backend = backend
        self.loop: Loop | None = None
        self.unrecorded: list[Step] = []
        self.applied: list[Step] = []

    def observe(self, now_s: float) -> Observation:
        return self.backend.observe(now_s)

    def apply(self, step: Step) -> None:
        assert self.loop is not None
        self.applied.append(step)
        unit = step.id.split(":")[1]
        known = self.loop.state.units.get(unit)
        if known is None or step.id not in known.orders:
            self.unrecorded.append(step)
        self.backend.apply(step)

    def finish(self, deadline_s: float) -> None:
        self.backend.finish(deadline_s)

    def close(self) -> None:
        self.backend.close()


class SimWorld:
    """A run from its first event on; `restart` throws the loop away and makes another from the store."""

    def __init__(
        self,
        count: int = 4,
        *,
        behaviour: Behaviour | None = None,
        faults: Iterable[Fault] = (),
        consent: ConsentRule | None = None,
        seed: int = 0,
        store: EventStore | None = None,
        limits: Limits | None = None,
    ) -> None:
        self.store = store or open_store(Path(":memory:"))
        self.limits = limits or Limits()
        self.now_s, self.epoch, self.keys = 1000.0, 0, 0
        self.cluster = cluster(count)
        self.sim = SimulatedBackend(self.cluster, behaviour=behaviour, faults=faults, seed=seed)
        self.sim.fleet.now_s = self.now_s
        self.witness = Witness(self.sim)
        self.consent = consent or ConsentRule()
        self.loop = self._open(adopted=False)

    def _open(self, *, adopted: bool) -> Loop:
        self.epoch += 1
        run = RunView(
            id="sim-0001",
            name="sim",
            folder="",
            state="starting",
            label="simulated",
            started_at_s=1000.0,
            consent=self.consent.mode,
            hexctl_version="0",
            daemon_pid=1,
        )
        self.planning = ToyPlanning()
        loop = Loop(
            settings=LoopSettings(scheduler="toy", consent=self.consent, limits=self.limits),
            store=self.store,
            planning=self.planning,
            problem=self._problem,
            facts=Facts(run=run, kinds=KINDS, groups_per_batch=8),
        )
        loop.begin(epoch=self.epoch, pid=self.epoch, adopted=adopted, devices=self.cluster.devices, now_s=self.now_s)
        loop.backend = self.witness
        self.witness.loop = loop
        return loop

    def _problem(self, devices: tuple[Device, ...], overrides: tuple[Override, ...], in_force: Plan | None) -> Problem:
        return Problem(
            cluster=replace(self.cluster, devices=devices),
            model=SHAPE,
            workload=LOAD,
            capabilities=Capabilities.single_device_roles(),
            overrides=overrides,
            in_force=in_force,
        )

    def restart(self, *, adopted: bool = True) -> None:
        """kill -9 and a new daemon: of the old one only what it recorded is left."""
        self.loop = self._open(adopted=adopted)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            self.loop.tick(self.now_s)

    def settle(self, seconds: float = 120.0) -> float:
        """Tick until reality is as wished and no plan is needed; returns the virtual seconds it took, or fails."""
        began_s = self.now_s
        while self.now_s - began_s < seconds:
            self.run(TICK_S)
            if isinstance(self.loop.next, Converged) and self.loop.state.need is None:
                return self.now_s - began_s
        raise AssertionError(f"not settled after {seconds} s: {self.loop.next}, need {self.loop.state.need}")

    def command(self, name: str, *, key: str | None = None, **fields: object) -> CommandResult:
        self.keys += 1
        c = Command(name=name, key=key or f"k{self.keys}", **fields)
        return self.loop.command(c, self.now_s)

    def standing(self) -> dict[str, str]:
        """device -> role of the living body on it."""
        return {
            d: "train" if b.trains else "rollout"
            for b in self.sim.fleet.bodies.values()
            if b.phase == "serving"
            for d in b.devices
        }
