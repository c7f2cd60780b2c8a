"""Where the fleet comes from. The Ray one is what `python -m runtime.daemon` uses; tests hand in a simulated one."""

from typing import Protocol

from planner.cluster import Cluster
from planner.record import record
from runtime.backends.protocol import Backend
from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits
from runtime.runs import RunInfo


@record
class Found:
    """A fleet, its label for every screen, and what was left out or assumed, in words."""

    cluster: Cluster
    label: str
    notes: tuple[str, ...] = ()


class World(Protocol):
    """Finds the fleet and opens a backend on it. Both may block for seconds; both run outside the event loop."""

    def discover(self, config: Config, run_id: str) -> Found: ...

    def open(
        self, config: Config, paths: RunPaths, run: RunInfo, *, cluster: Cluster, epoch: int, limits: RunLimits
    ) -> Backend: ...


class RayWorld:
    """GPUs, paced devices or the host's CPU, worked by Ray actors."""

    def discover(self, config: Config, run_id: str) -> Found:
        """The fleet of the configuration; FleetError when it is not here."""
        from runtime.backends.fleet import discover

        found = discover(config, own_run=run_id)
        return Found(cluster=found.cluster, label=found.label, notes=found.notes)

    def open(
        self, config: Config, paths: RunPaths, run: RunInfo, *, cluster: Cluster, epoch: int, limits: RunLimits
    ) -> Backend:
        """Start or join Ray and find or make the run's flow."""
        from runtime.backends.ray.open import open_backend

        return open_backend(config, paths, run, cluster, epoch, limits)
