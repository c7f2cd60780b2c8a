"""The Ray backend with real actors and small stand-ins for the workload: start, death, drain, adoption, the end."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld, paced_cluster

from planner.record import replace
from runtime.backends.ray.actors.identity import Parts
from runtime.backends.ray.actors.marks import read_mark
from runtime.backends.ray.observer import PING_EVERY_S
from runtime.backends.ray.procs import group_members
from runtime.backends.ray.revive import RevivingBackend
from runtime.config.schema import Config, ModelSection
from runtime.core.action import (
    DrainReplica,
    QuiesceTrainer,
    StartReplica,
    StartTrainer,
    StopReplica,
    StopTrainer,
)
from runtime.core.observation import Observation
from runtime.errors import ConfigError
from runtime.paths import RunPaths
from runtime.runs import RunInfo, start_ticks

pytestmark = pytest.mark.ray
CONFIG = Config(model=ModelSection(source="seeded", path=Path("unused")))
CLUSTER = paced_cluster("dev0", "dev1", "dev2")
PARTS = Parts(
    flow="ray_doubles:flow",
    rewards="ray_doubles:rewards",
    replica="ray_doubles:replica",
    trainer="ray_doubles:trainer",
)

FINISH_S = 60.0  # to suspend and settle; no longer than it takes


def until(backend: RevivingBackend, wanted: Callable[[Observation], bool], deadline_s: float = 90.0) -> Observation:
    """The first observation that is as wanted."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        seen = backend.observe(time.time())
        if wanted(seen):
            return seen
        time.sleep(0.02)
    pytest.fail(f"not seen within {deadline_s} s; last: {backend.observe(time.time())}")


def phase(seen: Observation, replica: str) -> str:
    """Phase of a replica; "" when there is none."""
    return next((r.phase for r in seen.replicas if r.id == replica), "")


@pytest.fixture
def backend(ray_world: RayWorld) -> Iterator[RevivingBackend]:
    run, _ = ray_world.new_run()
    opened = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=PARTS)
    yield opened
    opened.finish(FINISH_S)


@pytest.mark.kill
def test_a_fleet_from_start_to_stop(backend: RevivingBackend) -> None:
    """Start two replicas and a trainer, kill one replica, clear its body, drain the other, move the trainer."""
    for step in (
        StartReplica(replica="r0", epoch=1, devices=("dev0",)),
        StartReplica(replica="r1", epoch=2, devices=("dev1",)),
        StartTrainer(trainer="t", epoch=3, devices=("dev2",)),
    ):
        backend.apply(step)
        backend.apply(step)  # the second time changes nothing
    seen = until(
        backend,
        lambda o: (
            phase(o, "r0") == phase(o, "r1") == "serving"
            and [t.phase for t in o.trainers] == ["running"]
            and o.host.resident_bytes is not None
        ),
    )
    assert [r.devices for r in seen.replicas] == [("dev0",), ("dev1",)]
    assert len(seen.replicas) == 2
    assert seen.host.processes["replica-r0-1"] == seen.replicas[0].pid
    assert {d.id for d in seen.devices if d.present} == {"dev0", "dev1", "dev2"}

    victim = seen.replicas[0].pid
    assert victim is not None
    assert os.getpgid(victim) == victim
    news = threading.Event()
    backend.on_news(news.set)
    backend.rest(True)  # bodies are asked as often as ever, and a death is told
    assert {q.every_s for q in backend._inner._observer._pings.values()} == {PING_EVERY_S}
    os.kill(victim, signal.SIGKILL)
    end, dead = time.monotonic() + 60.0, seen
    while phase(dead, "r0") != "dead":
        assert news.wait(max(0.0, end - time.monotonic()))
        news.clear()
        dead = backend.observe(time.time())
    backend.rest(False)
    assert "ended without notice" in dead.replicas[0].reason
    assert phase(dead, "r1") == "serving"

    backend.apply(StopReplica(replica="r0", epoch=1))
    gone = until(backend, lambda o: len(o.replicas) == 1 and o.flow is not None and o.flow.redone_tokens > 0)
    assert gone.flow is not None
    assert 1 <= gone.flow.redone_tokens <= 2  # the double counts one token that it never flushes

    backend.apply(DrainReplica(replica="r1", epoch=2))
    until(backend, lambda o: phase(o, "r1") == "drained")
    backend.apply(QuiesceTrainer(trainer="t", epoch=3))
    until(backend, lambda o: [t.phase for t in o.trainers] == ["quiesced"])
    backend.apply(StopTrainer(trainer="t", epoch=3))
    backend.apply(StopReplica(replica="r1", epoch=2))
    until(backend, lambda o: not o.trainers and not o.replicas)


def test_a_device_that_is_taken_is_named(backend: RevivingBackend) -> None:
    """A start on a device that another body holds fails with the holder's name, and its body can be cleared."""
    backend.apply(StartReplica(replica="first", epoch=1, devices=("dev0",)))
    until(backend, lambda o: phase(o, "first") == "serving")
    backend.apply(StartReplica(replica="second", epoch=2, devices=("dev0",)))
    seen = until(backend, lambda o: phase(o, "second") == "dead")
    reason = next(r.reason for r in seen.replicas if r.id == "second")
    assert "device dev0 is held by replica first" in reason
    backend.apply(StopReplica(replica="second", epoch=2))
    until(backend, lambda o: phase(o, "second") == "")


def test_a_loop_that_fails_is_dead_in_words(ray_world: RayWorld) -> None:
    """An exception in the workload's thread is the replica's reason, its traceback is in the actor's log."""
    run, paths = ray_world.new_run()
    backend = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=replace(PARTS, replica="ray_doubles:failing"))
    try:
        backend.apply(StartReplica(replica="r0", epoch=1, devices=("dev0",)))
        seen = until(backend, lambda o: phase(o, "r0") == "dead")
        assert seen.replicas[0].reason == "ValueError: the engine rejects this model"
        assert "Traceback" in (paths.logs / "replica-r0-1.log").read_text()
    finally:
        backend.finish(FINISH_S)


def begun_without_flow(ray_world: RayWorld) -> tuple[RevivingBackend, RunPaths, list[int]]:
    """A replica and a trainer whose processes are there while flow is being built; the processes."""
    run, paths = ray_world.new_run()
    parts = replace(PARTS, flow="ray_doubles:gated")
    backend = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=parts, wait=False)
    backend.apply(StartReplica(replica="r0", epoch=1, devices=("dev0",)))
    backend.apply(StartTrainer(trainer="t", epoch=2, devices=("dev1",)))
    names = ("replica-r0-1", "trainer-2")
    seen = until(backend, lambda o: all(read_mark(paths, n) is not None for n in names))
    assert seen.flow is None
    assert phase(seen, "r0") in ("", "starting")
    return backend, paths, [m.process.pid for n in names if (m := read_mark(paths, n)) is not None]


def open_gate(paths: RunPaths, why: str) -> None:
    """Let flow be built, or fail with `why`."""
    new = paths.folder / "gate.new"
    new.write_text(why)
    new.replace(paths.folder / "gate")


def test_bodies_start_while_flow_is_being_built(ray_world: RayWorld) -> None:
    """Nothing of a replica's or trainer's start waits for flow; they serve once it is there."""
    backend, paths, _ = begun_without_flow(ray_world)
    try:
        open_gate(paths, "")
        backend.wait_built()
        seen = until(backend, lambda o: phase(o, "r0") == "serving" and [t.phase for t in o.trainers] == ["running"])
        assert not seen.problems
    finally:
        backend.finish(FINISH_S)


@pytest.mark.kill
def test_a_flow_that_cannot_be_built_takes_what_began_beside_it(ray_world: RayWorld) -> None:
    """The run ends with flow's own error, and no actor is left."""
    backend, paths, pids = begun_without_flow(ray_world)
    open_gate(paths, "no such data")
    with pytest.raises(ConfigError, match="no such data"):
        backend.wait_built()
    assert [pid for pid in pids if start_ticks(pid) is not None] == []
    assert not list((paths.short / "actors").glob("*.json"))
    backend.apply(StartReplica(replica="r1", epoch=3, devices=("dev2",)))  # too late: nothing happens
    backend.close()
    assert read_mark(paths, "replica-r1-3") is None

    run, _ = ray_world.new_run()
    other = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=PARTS)
    try:
        other.apply(StartReplica(replica="r0", epoch=1, devices=("dev0",)))  # its device was given back
        until(other, lambda o: phase(o, "r0") == "serving")
    finally:
        other.finish(FINISH_S)


def driver(run: RunInfo, env: dict[str, str], script: str) -> subprocess.CompletedProcess[str]:
    """Run `script` in a process of its own, with `run` and the test's names at hand."""
    here = Path(__file__).resolve().parent
    text = (
        f"from test_backend import *\nfrom runtime.runs import read_run\nrun = read_run(Path({run.folder!r}))\n{script}"
    )
    env = {**env, "PYTHONPATH": f"{here.parent}{os.pathsep}{here}"}
    return subprocess.run(
        [sys.executable, "-c", text], env=env, capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.kill
def test_actors_survive_their_daemon_and_are_adopted(ray_world: RayWorld) -> None:
    """A driver starts a replica and is killed; another finds it, same pid; the first one's epoch is refused from then on."""
    run, paths = ray_world.new_run()
    first = driver(
        run,
        ray_world.env(),
        "from runtime.backends.ray.open import open_backend\nfrom runtime.rl.types import RunLimits\n"
        "b = open_backend(CONFIG, run.paths, run, CLUSTER, 1, RunLimits(), parts=PARTS)\n"
        "b.apply(StartReplica(replica='r0', epoch=1, devices=('dev0',)))\n"
        "until(b, lambda o: phase(o, 'r0') == 'serving')\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n",
    )
    assert first.returncode == -signal.SIGKILL, first.stderr
    found = read_mark(paths, "replica-r0-1")
    assert found is not None
    assert start_ticks(found.process.pid) == found.process.start_ticks

    second = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=PARTS, daemon_epoch=2)
    try:
        seen = until(second, lambda o: phase(o, "r0") == "serving")
        assert seen.replicas[0].pid == found.process.pid
        assert seen.replicas[0].devices == ("dev0",)
        second.apply(DrainReplica(replica="r0", epoch=1))  # flow now knows the second daemon
        until(second, lambda o: phase(o, "r0") == "drained")
    finally:
        second.close()

    stale = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=PARTS, daemon_epoch=1)
    try:
        stale.apply(StopReplica(replica="r0", epoch=1))
        refused = until(stale, lambda o: any("refuses this daemon" in p for p in o.problems))
        assert phase(refused, "r0") == "drained"
    finally:
        stale.close()

    third = ray_world.open(CONFIG, run, cluster=CLUSTER, parts=PARTS, daemon_epoch=3)
    until(third, lambda o: phase(o, "r0") == "drained")
    third.finish(FINISH_S)
    assert not group_members(found.group)
    assert json.loads((paths.folder / "flow-double.json").read_text())["tokens"] == {}
