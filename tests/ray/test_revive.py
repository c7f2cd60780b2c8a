"""Ray itself dies under a run that started it: the backend starts it again and finds its files, not its actors."""

import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
from test_backend import CLUSTER, CONFIG, PARTS, phase, until

from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray.open import open_backend
from runtime.backends.ray.procs import session_members
from runtime.core.action import StartReplica
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits
from runtime.runs import RunInfo, alive, read_run, write_run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.accept]


def test_a_run_outlives_its_raylet() -> None:
    """Kill -9 the raylet: bodies are unknown while Ray starts again, then gone; what they had decoded is settled; at the end
    no process of either cluster is left."""
    ray_cluster.disconnect()
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory(prefix="hx-") as folder:
        paths = RunPaths(folder=Path(folder) / "run", short=Path(folder) / "s")
        for f in (paths.folder, paths.short, paths.logs, paths.counters):
            f.mkdir()
        run = RunInfo(
            id="own-1", name="own", folder=str(paths.folder), short=str(paths.short), config_path="", config_sha256="",
            created_at_s=0.0, hexctl_version="test", label="paced", state="live",
        )  # fmt: skip
        write_run(run)
        backend = open_backend(
            CONFIG, paths, run, CLUSTER, 1, RunLimits(), parts=PARTS, extra_env={"PYTHONPATH": str(here)}
        )
        try:
            assert read_run(paths.folder).ray_processes == backend.head.processes
            backend.apply(StartReplica(replica="r0", epoch=1, devices=("dev0",)))
            before = until(backend, lambda o: phase(o, "r0") == "serving")
            assert before.flow is not None
            first = backend.head
            os.kill(first.processes[1].pid, signal.SIGKILL)
            until(backend, lambda o: phase(o, "r0") == "unknown" and "Ray has ended" in o.problems[0], 5.0)
            # At least a token was counted by the dead replica and never received; the settling follows its going.
            until(
                backend,
                lambda o: not o.replicas and not o.problems and o.flow is not None and o.flow.redone_tokens >= 1,
                60.0,
            )
            assert not any(alive(m) for m in first.processes)
            backend.apply(StartReplica(replica="r0", epoch=2, devices=("dev0",)))
            until(backend, lambda o: phase(o, "r0") == "serving" and o.replicas[0].epoch == 2)
        finally:
            session = backend.head.session
            began = time.monotonic()
            backend.finish(10.0)
        assert time.monotonic() - began < 25
        assert session is not None
        assert session_members(session) == ()
