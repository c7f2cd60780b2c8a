"""One Ray cluster for the whole test run, whichever folders ask for it.

    from ray_world import ray_world        # in a conftest.py; a session-scoped fixture

`ray_world.open(...)` gives a backend of a run of its own on it; `ray_world.env()` lets a daemon started as a process join it.
"""

import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from planner.cluster import Cluster, Device, DeviceKind, Link
from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray import names
from runtime.backends.ray.actors.identity import Parts
from runtime.backends.ray.cluster import RayHead
from runtime.backends.ray.open import open_backend
from runtime.backends.ray.revive import RevivingBackend
from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits
from runtime.runs import RunInfo, write_run

# Every device id that a test may use; the custom resource of each is declared when the cluster starts.
DEVICES = (
    *(f"dev{i}" for i in range(8)),
    *("cpu-n0-0", "cpu-n0-1"),
    *("paced-n0-0", "paced-n0-1", "paced-n0-2", "paced-n1-0"),  # configs/local.toml
)
_KEY = pytest.StashKey["RayWorld"]()


class RayWorld:
    """A running head and the runs that tests make on it."""

    def __init__(self, extra_devices: tuple[str, ...] = ()) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="hx-"))
        self.paths = RunPaths(folder=self.folder / "head", short=self.folder / "s")
        self.paths.folder.mkdir()
        here = Path(__file__).resolve().parent
        resources = {names.resource(d): 1.0 for d in (*DEVICES, *extra_devices)}
        self.head: RayHead = ray_cluster.start_head(
            self.paths,
            resources,
            num_gpus=0,
            # Doubles are imported by the actors; where the caller looks for modules they look too, as its daemons do.
            extra_env={
                "PYTHONPATH": os.pathsep.join(
                    p for p in (str(here), str(here / "ray"), os.environ.get("PYTHONPATH", "")) if p
                )
            },
        )
        self._runs = 0

    def env(self) -> dict[str, str]:
        """Environment for a daemon process that joins this cluster instead of starting its own."""
        from runtime.backends.ray.env import client_env

        return {**os.environ, **client_env(self.paths.ray_token), ray_cluster.ADDRESS_VARIABLE: self.head.address}

    def new_run(self, name: str = "test") -> tuple[RunInfo, RunPaths]:
        """A run folder that names this cluster."""
        self._runs += 1
        folder = self.folder / f"{name}-{self._runs:04x}"
        paths = RunPaths(folder=folder, short=self.folder / f"r{self._runs}")
        for f in (paths.folder, paths.short, paths.logs, paths.counters):
            f.mkdir(mode=0o700, parents=True)
        run = RunInfo(
            id=folder.name,
            name=name,
            folder=str(folder),
            short=str(paths.short),
            config_path="",
            config_sha256="",
            created_at_s=0.0,
            hexctl_version="test",
            label="paced",
            state="live",
            ray_address=self.head.address,
        )
        write_run(run)
        return run, paths

    def open(
        self,
        config: Config,
        run: RunInfo,
        *,
        cluster: Cluster,
        parts: Parts | None = None,
        daemon_epoch: int = 1,
        limits: RunLimits | None = None,
        wait: bool = True,
    ) -> RevivingBackend:
        """A backend on this cluster. Close or finish it before the next is opened: a process holds one connection."""
        os.environ.update(self._client())
        given = limits or RunLimits()
        return open_backend(config, run.paths, run, cluster, daemon_epoch, given, parts=parts, wait=wait)

    def _client(self) -> Mapping[str, str]:
        from runtime.backends.ray.env import client_env

        return client_env(self.paths.ray_token)

    def close(self) -> None:
        """End the cluster and remove its folder."""
        ray_cluster.disconnect()
        left = ray_cluster.stop_head(self.head.processes)
        shutil.rmtree(self.folder, ignore_errors=True)
        assert not left, f"Ray left processes behind: {left}"


def paced_cluster(*devices: str, paced: bool = True) -> Cluster:
    """A cluster of devices of one kind on one node."""
    kind = DeviceKind(
        name="fast", peak_flops=1e9, hbm_bytes_per_s=1e9, memory_bytes=1e9, link_bytes_per_s=1e9, paced=paced
    )
    link = Link(latency_s=1e-5, bytes_per_s=1e9)
    return Cluster(
        kinds={"fast": kind},
        devices=tuple(Device(id=d, kind="fast", node="n0", index=i) for i, d in enumerate(devices)),
        same_kind=link,
        cross_kind=link,
    )


@pytest.fixture(scope="session")
def ray_world(request: pytest.FixtureRequest) -> RayWorld:
    """The one cluster. Kept on pytest's own configuration, so that several conftest files share it."""
    config = request.config
    if _KEY not in config.stash:
        world = RayWorld()
        config.stash[_KEY] = world
        config.add_cleanup(world.close)
    return config.stash[_KEY]
