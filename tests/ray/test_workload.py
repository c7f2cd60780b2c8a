"""The real engine, trainer, flow and verifiers in their actors, on the smallest run that still trains: kills, and the ledger whole."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld, paced_cluster
from test_backend import phase, until

from hexctl.data import data_folder
from runtime.backends.ray.actors.marks import read_mark
from runtime.backends.ray.revive import RevivingBackend
from runtime.config.load import load_config
from runtime.config.schema import Config
from runtime.core.action import StartReplica, StartTrainer, StopReplica
from runtime.core.observation import Observation
from runtime.errors import ConfigError
from runtime.rl.types import FlowStatus

pytestmark = [pytest.mark.ray, pytest.mark.kill]
STEPS = 3


def small() -> Config:
    """The embedded default with a small batch and without pacing, so that a step takes a fraction of a second."""
    config = load_config(data_folder("configs") / "local.toml").config
    algorithm = config.algorithm.model_copy(update={"prompts_per_step": 4, "responses_per_prompt": 4})
    return config.model_copy(update={"algorithm": algorithm})


@pytest.fixture
def backend(ray_world: RayWorld) -> Iterator[RevivingBackend]:
    run, paths = ray_world.new_run("small")
    for folder in (paths.checkpoints, paths.weights):
        folder.mkdir()
    opened = ray_world.open(small(), run, cluster=paced_cluster("dev0", "dev1", "dev2", paced=False))
    yield opened
    opened.finish(60.0)


def whole(flow: FlowStatus) -> bool:
    """The token identity, exactly."""
    settled = flow.trained_tokens + flow.masked_tokens + flow.in_flight_tokens + sum(flow.wasted_tokens.values())
    return flow.generated_tokens == settled


def after(backend: RevivingBackend, steps: int, deadline_s: float = 90.0) -> FlowStatus:
    """Flow after at least so many optimiser steps."""

    def wanted(o: Observation) -> bool:
        dead = [t.reason for t in o.trainers if t.phase == "dead"] + [r.reason for r in o.replicas if r.phase == "dead"]
        assert not dead, dead
        return o.flow is not None and o.flow_age_s is not None and o.flow_age_s < 1.0 and o.flow.steps_done >= steps

    flow = until(backend, wanted, deadline_s).flow
    assert flow is not None
    assert whole(flow)
    return flow


def test_a_run_survives_the_death_of_each_part(backend: RevivingBackend, ray_world: RayWorld) -> None:
    """Steps go on after kill -9 of a replica, of flow and of the verifiers; nothing is lost, nothing is counted twice."""
    backend.apply(StartTrainer(trainer="t", epoch=1, devices=("dev0",)))
    backend.apply(StartReplica(replica="r0", epoch=2, devices=("dev1",)))
    backend.apply(StartReplica(replica="r1", epoch=3, devices=("dev2",)))
    first = after(backend, STEPS)

    seen = until(backend, lambda o: phase(o, "r0") == phase(o, "r1") == "serving")
    victim = next(r.pid for r in seen.replicas if r.id == "r0")
    assert victim is not None
    os.kill(victim, signal.SIGKILL)
    until(backend, lambda o: phase(o, "r0") == "dead")
    backend.apply(StopReplica(replica="r0", epoch=2))
    until(backend, lambda o: phase(o, "r0") == "")
    second = after(backend, first.steps_done + STEPS)
    assert second.redone_tokens <= 2 * 32 * 14  # at most two flushes of what it held

    for victim_name in ("flow", "rewards"):
        pid = backend.observe(time.time()).host.processes[victim_name]
        os.kill(pid, signal.SIGKILL)
        until(backend, lambda o, n=victim_name, p=pid: o.host.processes.get(n, p) != p, 90.0)  # type: ignore[misc]
        before, second = second, after(backend, second.steps_done + STEPS)
        assert second.generated_tokens >= before.generated_tokens
        assert second.trained_tokens > before.trained_tokens
    assert second.staleness_max is not None
    assert second.staleness_max <= second.eta


def test_replicas_obey_the_plans_slots_also_after_flow_is_restarted(backend: RevivingBackend) -> None:
    """Four slots are told and used, then a new flow has forgotten them and is told again, then another plan says two."""
    backend.apply(StartTrainer(trainer="t", epoch=1, devices=("dev0",)))
    backend.apply(StartReplica(replica="r0", epoch=2, devices=("dev1",)))
    running: set[int] = set()

    def slots(wanted: int) -> Callable[[Observation], bool]:
        def told(o: Observation) -> bool:
            backend.allot({"r0": wanted})
            mine = next((r for r in o.replicas if r.id == "r0"), None)
            if mine is None or mine.slots != wanted:
                return False
            running.add(mine.running)
            return o.flow is not None and [r.allotted for r in o.flow.replicas] == [wanted] and mine.running > 0

        return told

    until(backend, slots(4))
    done = after(backend, STEPS).steps_done
    pid = until(backend, slots(4)).host.processes["flow"]
    os.kill(pid, signal.SIGKILL)
    until(backend, lambda o: o.host.processes.get("flow", pid) != pid, 90.0)
    until(backend, slots(4), 90.0)
    assert max(running) <= 4
    after(backend, done + STEPS)
    until(backend, slots(2), 90.0)
    after(backend, done + 2 * STEPS)
    running.clear()
    until(backend, slots(2), 90.0)
    assert running <= {1, 2}, "those that ran beyond it have ended"


def test_data_that_does_not_fit_is_one_clear_error(ray_world: RayWorld, tmp_path: Path) -> None:
    """Flow that cannot be built ends the opening with its own error, and leaves no actor behind."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("")
    config = small()
    task = config.task
    assert task is not None
    config = config.model_copy(
        update={
            "task": task.model_copy(update={"source": "jsonl", "path": rows}),
            "evaluation": config.evaluation.model_copy(update={"every_steps": 0}),
        }
    )
    run, paths = ray_world.new_run("bad")
    with pytest.raises(ConfigError, match=r"rows\.jsonl"):
        ray_world.open(config, run, cluster=paced_cluster("dev0"))
    for actor in ("flow", "rewards"):
        assert read_mark(paths, actor) is None
