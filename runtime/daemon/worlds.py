"""Where the fleet comes from: Ray, or a simulation where the configuration says so. Tests hand in their own."""

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
        """Start or join Ray and find or make the run's flow, which may still be building when this returns."""
        from runtime.backends.ray.open import open_backend

        return open_backend(config, paths, run, cluster, epoch, limits, wait=False)


class SimulatedWorld:
    """The devices that the configuration declares, in virtual time: nothing is run. It lives and dies with its daemon."""

    def discover(self, config: Config, run_id: str) -> Found:
        """The declared fleet."""
        from runtime.config.problem import cluster_from_config

        speed = f"simulated: no work is done; {config.simulation.speed:g} virtual seconds pass in a second"
        return Found(cluster=cluster_from_config(config), label="simulated", notes=(speed,))

    def open(
        self, config: Config, paths: RunPaths, run: RunInfo, *, cluster: Cluster, epoch: int, limits: RunLimits
    ) -> Backend:
        """A simulated run that begins now."""
        from planner.model import load_model_spec
        from runtime.backends.simulated.running import SimulatedRun
        from runtime.config.problem import problem_from_config

        problem = problem_from_config(config, cluster, load_model_spec(config.model.path))
        return SimulatedRun(problem, speed=config.simulation.speed, seed=config.run.seed, steps=limits.steps)


def world_of(config: Config) -> World:
    """The world that the configuration asks for."""
    return SimulatedWorld() if config.fleet.source == "simulated" else RayWorld()
