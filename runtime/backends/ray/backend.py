"""The real backend: a Ray cluster, detached actors, one placement group a body. After a restart it finds all of them again."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping

from planner.cluster import fleet_usd_per_h
from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray.actors.identity import ActorLevel
from runtime.backends.ray.calls import age
from runtime.backends.ray.cluster import RayHead
from runtime.backends.ray.devices import DeviceView, memory_back
from runtime.backends.ray.executor import Executor
from runtime.backends.ray.finishing import Ending
from runtime.backends.ray.level import BodySeen, replica_level, trainer_level
from runtime.backends.ray.observer import Observer
from runtime.backends.ray.placement import groups
from runtime.backends.ray.world import World
from runtime.core.action import Step
from runtime.core.observation import DeviceSeen, HostSeen, Observation
from runtime.rl.types import FlowStatus, RunLimits
from runtime.runs import RunInfo
from runtime.telemetry.client import TelemetryAgent
from runtime.telemetry.reading import Watch

STALE_S = 3.0
HUSH_S = 3.0
ALLOT_S = 2.0  # for flow's status to show what it was told
ABORT_S = 5.0  # for the end of a run that did not come to life
logger = logging.getLogger(__name__)


class RayBackend:
    """`runtime.backends.protocol.Backend`. Made by `runtime.backends.ray.open.open_backend`."""

    def __init__(
        self, world: World, run: RunInfo, head: RayHead, telemetry: TelemetryAgent, *, lived: bool = False
    ) -> None:
        """`lived`: the run had a Ray before this backend."""
        self._world, self._run, self._head, self._telemetry = world, run, head, telemetry
        self._new = not groups(world)  # nothing of the run is at work yet
        self._session = head.session if head.owned else None
        self._devices = DeviceView(world.cluster)
        self._observer = Observer(world)
        self._executor = Executor(
            world, lambda: self._observer.flow, self._observer.flow_built, self._memory_back, lived=lived
        )
        self._finished = threading.Lock()
        self._allotted_s = float("-inf")  # when flow was last told
        self._told: tuple[int, float | None] | None = None  # flow's pid and the price of the fleet it was told

    def start(self) -> None:
        """Begin to observe. Steps may be applied from now on, though flow and rewards are still being built."""
        self._observer.start()
        self._watch({})

    def wait_built(self, deadline_s: float) -> None:
        """Wait until flow and rewards are built, and settle replicas that left no body.

        Raises what kept them from being built, after nothing is left of a run that was only beginning; of one that lived
        before, everything."""
        try:
            self._observer.wait_ready(deadline_s)
            self._executor.settle_lost()
        except BaseException:
            self.finish(ABORT_S) if self._new else self.close()
            raise

    @property
    def run(self) -> RunInfo:
        """The run with Ray's address and processes filled in; already written to `run.json`."""
        return self._run

    @property
    def head(self) -> RayHead:
        """The cluster."""
        return self._head

    def on_news(self, tell: Callable[[], None]) -> None:
        """`tell` is called, from any thread, when a body came, went or died, or is in another phase."""
        self._observer.on_news(tell)

    def rest(self, calm: bool) -> None:
        """While it is calm figures are asked for once a second."""
        self._observer.rest(calm)

    def observe(self, now_s: float) -> Observation:
        """The newest level of every source, without waiting. `now_s` is unix seconds."""
        mono = time.monotonic()
        answer = self._observer.status()
        flow = answer.value if isinstance(answer.value, FlowStatus) else None
        flow_age = age(answer, mono)
        bodies = self._observer.bodies(self._executor.notes())
        replicas = tuple(replica_level(b, flow, flow_age, mono) for b in bodies if b.body.role == "replica")
        trainers = tuple(
            trainer_level(b, flow, flow_age, mono, quiescing=self._executor.quiescing(b.body.epoch))
            for b in bodies
            if b.body.role == "trainer"
        )
        processes = self._processes(bodies)
        self._watch(processes)
        report, report_age = self._telemetry.newest()
        devices = self._devices.seen(report, report_age, replicas, trainers)
        flow_pid = self._flow_pid()
        self._tell_flow(flow_pid, devices)
        return Observation(
            at_s=now_s,
            devices=devices,
            replicas=replicas,
            trainers=trainers,
            flow=flow,
            flow_age_s=flow_age if flow is not None else None,
            flow_pid=flow_pid,
            host=self._host(processes),
            problems=self._problems(flow_age, report_age, report.message if report is not None else ""),
        )

    def _flow_pid(self) -> int | None:
        level = self._observer.services()["flow"].value
        return level.pid if isinstance(level, ActorLevel) else None

    def _tell_flow(self, pid: int | None, devices: tuple[DeviceSeen, ...]) -> None:
        """What is the daemon's to say: the limits of the run and the fleet's price. A new flow is told again."""
        kinds = self._world.cluster.kinds
        told = (pid, fleet_usd_per_h(kinds, (d.kind for d in devices if d.present is not False))) if pid else None
        if told is None or told == self._told:
            return
        if (self._told is None or self._told[0] != pid) and self._world.limits != RunLimits():
            self._executor.tell("set_limits", self._world.limits)
        if told[1] != (self._told[1] if self._told is not None and self._told[0] == pid else None):
            self._executor.tell("set_cost", told[1])
        self._told = told

    def allot(self, slots: Mapping[str, int]) -> None:
        """Told to flow, and again as long as its status shows something else: it may have been restarted."""
        status, now = self._observer.status().value, time.monotonic()
        if not isinstance(status, FlowStatus) or now - self._allotted_s < ALLOT_S:
            return
        if any(r.allotted != slots.get(r.replica) for r in status.replicas):
            self._allotted_s = now
            self._executor.tell("allot", dict(slots))

    def apply(self, step: Step) -> None:
        """Begin a step in a thread of its own unless it is under way."""
        self._executor.apply(step)

    def finish(self, deadline_s: float) -> None:
        """Suspend samples to the ledger, stop actors, stop Ray if this run started it. Blocks at most about `deadline_s`."""
        if not self._finished.acquire(blocking=False):
            return
        self._observer.stop()
        self._executor.end(HUSH_S)
        Ending(self._world, self._head, self._observer.flow, deadline_s).run()
        self._telemetry.close()

    def close(self) -> None:
        """Let go of the run: the control plane ends, the actors live on."""
        if not self._finished.acquire(blocking=False):
            return
        self._observer.stop()
        self._executor.hush(HUSH_S)
        self._telemetry.close()
        ray_cluster.disconnect()

    def _processes(self, bodies: tuple[BodySeen, ...]) -> dict[str, int]:
        """Name of each process of the run -> pid."""
        found = {a.name: a.pid for b in bodies if b.dead() is None for a in b.levels if a is not None}
        for name, answer in self._observer.services().items():
            if isinstance(answer.value, ActorLevel) and answer.state == "answered":
                found[name] = answer.value.pid
        for m, name in zip(self._head.processes, ("ray-gcs", "raylet"), strict=False):
            found[name] = m.pid
        if (agent := self._telemetry.pid) is not None:
            found["telemetry"] = agent
        return found

    def _watch(self, processes: dict[str, int]) -> None:
        self._telemetry.watch(
            Watch(
                folder=str(self._world.paths.folder),
                pids=tuple(sorted({os.getpid(), *processes.values()})),
                sessions=(self._session,) if self._session is not None else (),
            )
        )

    def _host(self, processes: dict[str, int]) -> HostSeen:
        report, _ = self._telemetry.newest()
        if report is None:
            return HostSeen(processes=processes)
        host = report.host
        return HostSeen(
            cpu_share=host.cpu_share,
            memory_used_bytes=host.memory_used_bytes,
            memory_total_bytes=host.memory_total_bytes,
            disk_free_bytes=host.disk_free_bytes,
            processes=processes,
            resident_bytes=sum(p.resident_bytes for p in host.processes) or None,
        )

    def _problems(self, flow_age: float | None, report_age: float | None, library: str) -> tuple[str, ...]:
        """Sources that do not answer, in words."""
        found = list(self._executor.problems())
        if self._head.owned and not ray_cluster.is_up(self._head):
            found.append("Ray is gone: its gcs_server or raylet has ended")
        if (why := self._observer.table_problem()) != "":
            found.append(why)
        for name, answer in self._observer.services().items():
            if answer.state == "dead" or (isinstance(answer.value, ActorLevel) and answer.value.phase == "failed"):
                found.append(f"{name} is gone: {answer.reason or answer.value.reason}")
        status = self._observer.status()
        if status.state == "dead":
            pass  # said above
        elif status.state == "failed":
            found.append(f"flow cannot say its status: {status.reason}")
        elif flow_age is not None and flow_age > STALE_S:
            found.append(f"flow has not answered for {flow_age:.0f} s")
        if report_age is None or report_age > STALE_S:
            found.append(
                "the node agent does not answer" + (f" for {report_age:.0f} s" if report_age is not None else " yet")
            )
        if library and any(self._world.uses_gpu(d.id) for d in self._world.cluster.devices):
            found.append(library)
        return tuple(found)

    def _memory_back(self, devices: tuple[str, ...]) -> str:
        return memory_back(self._telemetry.newest, devices)
