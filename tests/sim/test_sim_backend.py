"""The simulated run behind the daemon's seam: what the dashboard is told is what the simulator says."""

from pathlib import Path

import pytest

import planner
from planner.model import load_model_spec
from planner.plan import Plan
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible
from runtime.backends.simulated.running import SimulatedRun
from runtime.backends.simulated.script import DeviceLeaves, UnitDies
from runtime.config.load import load_config, need_runnable
from runtime.config.problem import cluster_from_config, problem_from_config
from runtime.core.action import DrainReplica, StartReplica, StartTrainer, StopReplica, StopTrainer
from runtime.core.observation import Observation
from runtime.daemon.worlds import RayWorld, SimulatedWorld, world_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(scope="module")
def planned() -> tuple[Problem, Plan]:
    config = load_config(CONFIGS / "sim-h800-h20.toml").config
    problem = problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path))
    problem = replace(problem, workload=replace(problem.workload, prompts_per_step=64))
    found = planner.solve(problem)
    assert isinstance(found, Feasible)
    return problem, found.plan


def started(problem: Problem, plan: Plan, *, speed: float = 60.0, steps: int | None = None) -> SimulatedRun:
    """With every unit of the plan ordered at second 0."""
    backend = SimulatedRun(problem, speed=speed, steps=steps)
    assert plan.train is not None
    backend.observe(0.0)
    backend.apply(StartTrainer(trainer="t0", epoch=1, devices=plan.train.devices))
    for i, r in enumerate(plan.rollouts):
        backend.apply(StartReplica(replica=f"r{i}", epoch=1, devices=r.devices))
    return backend


def look(backend: SimulatedRun, begin: int, end: int) -> Observation:
    """Look each second; answers with the last look."""
    seen = backend.observe(float(begin))
    for s in range(begin + 1, end):
        seen = backend.observe(float(s))
    return seen


def test_a_run_trains_at_the_rate_that_the_plan_predicts(planned: tuple[Problem, Plan]) -> None:
    problem, plan = planned
    found = planner.solve(problem)
    assert isinstance(found, Feasible)
    flow = look(started(problem, plan), 1, 40).flow
    assert flow is not None
    assert flow.step > 10
    assert flow.trained_tokens_per_s == pytest.approx(found.prediction.tokens_per_s, rel=0.1)
    assert flow.staleness_max is not None
    assert flow.staleness_max <= problem.workload.eta
    wasted = sum(flow.wasted_tokens.values())
    assert flow.generated_tokens == flow.trained_tokens + flow.masked_tokens + flow.in_flight_tokens + wasted
    assert len(flow.replicas) == len(plan.rollouts)


def test_replicas_decode_as_many_samples_at_once_as_they_are_allotted(planned: tuple[Problem, Plan]) -> None:
    backend = started(*planned)
    free = look(backend, 1, 10)
    most = {r.id: r.slots for r in free.replicas}
    assert all(r.running > 3 for r in free.replicas)
    backend.allot(dict.fromkeys(most, 3))
    held = look(backend, 11, 20)
    assert [(r.slots, r.running <= 3) for r in held.replicas] == [(3, True)] * len(most)
    assert any(r.running for r in held.replicas)
    assert held.flow is not None
    assert free.flow is not None
    assert held.flow.generated_tokens > free.flow.generated_tokens
    backend.allot({})
    after = look(backend, 21, 30)
    assert {r.id: r.slots for r in after.replicas} == most
    assert any(r.running > 3 for r in after.replicas)


def test_a_replica_that_is_the_bottleneck_tells_about_the_rate_that_the_plan_gives_it() -> None:
    """What updates make it compute anew is in neither: with it the replica's would be a fifth lower here."""
    config = load_config(CONFIGS / "sim-h800-h20.toml").config
    problem = problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path))
    found = planner.solve(problem)
    assert isinstance(found, Feasible)
    assert found.prediction.rollout_s > found.prediction.train_s
    backend = started(problem, found.plan, speed=20.0)
    by_devices = {p.devices: p for p in found.plan.rollouts}
    names = {r.devices: r.id for r in look(backend, 1, 5).replicas}
    backend.allot({names[d]: p.max_running for d, p in by_devices.items() if p.max_running})
    for r in look(backend, 6, 50).replicas:
        assert r.tokens_per_s == pytest.approx(by_devices[r.devices].rate_tokens_per_s, rel=0.12), r.devices


def test_a_lost_device_ends_its_replica_and_its_samples_go_elsewhere(planned: tuple[Problem, Plan]) -> None:
    problem, plan = planned
    backend = started(problem, plan)
    look(backend, 1, 10)
    lost = plan.rollouts[0].devices[0]
    backend.fleet.inject(DeviceLeaves(at_s=10.0, device=lost))
    seen = look(backend, 10, 12)
    assert [r.phase for r in seen.replicas if lost in r.devices] == ["dead"]
    assert next(d.present for d in seen.devices if d.id == lost) is False
    before = seen.flow
    after = look(backend, 12, 30).flow
    assert before is not None
    assert after is not None
    assert after.step > before.step
    assert after.samples_by_state["SUSPENDED"] == 0


def test_a_drained_replica_loses_nothing(planned: tuple[Problem, Plan]) -> None:
    problem, plan = planned
    backend = started(problem, plan)
    look(backend, 1, 10)
    backend.apply(DrainReplica(replica="r0", epoch=1))
    backend.apply(StopReplica(replica="r0", epoch=1))
    seen = look(backend, 10, 20)
    assert "r0" not in {r.id for r in seen.replicas}
    assert seen.flow is not None
    assert seen.flow.redone_tokens == 0


def test_a_trainer_that_begins_again_where_it_was_keeps_its_shapes(planned: tuple[Problem, Plan]) -> None:
    """They are known for its devices and all replicas, so nobody is asked for them again."""
    problem, plan = planned
    backend = started(problem, plan)
    look(backend, 1, 10)
    before = dict(backend._known)
    assert plan.train is not None
    backend.fleet.inject(UnitDies(at_s=10.0, device=plan.train.devices[0]))
    assert [t.phase for t in look(backend, 10, 12).trainers] == ["dead"]
    backend.apply(StopTrainer(trainer="t0", epoch=1))
    backend.apply(StartTrainer(trainer="t0", epoch=2, devices=plan.train.devices))
    stood = look(backend, 12, 13).flow
    flow = look(backend, 13, 30).flow
    assert stood is not None
    assert flow is not None
    assert flow.step > stood.step
    assert before.keys() == backend._known.keys()
    assert all(backend._known[devices] is p for devices, p in before.items())


def test_it_is_finished_after_its_steps(planned: tuple[Problem, Plan]) -> None:
    backend = started(*planned, steps=5)
    flow = look(backend, 1, 40).flow
    assert flow is not None
    assert (flow.finished, flow.steps_done) == (True, 5)


def test_the_configuration_names_the_world() -> None:
    simulated = load_config(CONFIGS / "sim-h800-h20.toml")
    need_runnable(simulated)  # neither weights nor a task are needed
    assert isinstance(world_of(simulated.config), SimulatedWorld)
    assert isinstance(world_of(load_config(CONFIGS / "local.toml").config), RayWorld)
    found = SimulatedWorld().discover(simulated.config, "run")
    assert found.label == "simulated"
    assert len(found.cluster.devices) == 56
