"""A daemon whose fleet is simulated, for tests with real processes: `python simdaemon.py CONFIG ...`."""

import os
import sys

from planner.cluster import Cluster
from runtime.backends.protocol import Backend
from runtime.backends.simulated.backend import SimulatedBackend
from runtime.backends.simulated.script import Behaviour
from runtime.config.problem import cluster_from_config
from runtime.config.schema import Config
from runtime.daemon.main import main
from runtime.daemon.worlds import Found
from runtime.errors import ConfigError
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits
from runtime.runs import RunInfo


class Unbuilt(SimulatedBackend):
    """Observes and acts, but what carries the run cannot be built."""

    def wait_built(self) -> None:
        self.finish(1.0)
        raise ConfigError("no such data", where=os.environ["SIM_UNBUILT"])


class SimulatedWorld:
    """The devices the configuration declares, doing no work."""

    def discover(self, config: Config, run_id: str) -> Found:
        if hold := os.environ.get("SIM_HOLD"):  # a named pipe: say that it is reached, wait until the test has read on
            with open(hold, "w") as pipe:
                pipe.write("discovering")
            with open(hold) as pipe:
                pipe.read()
        return Found(cluster=cluster_from_config(config), label="simulated", notes=())

    def open(
        self, config: Config, paths: RunPaths, run: RunInfo, *, cluster: Cluster, epoch: int, limits: RunLimits
    ) -> Backend:
        behaviour = Behaviour(
            start_s=0.2, drain_s=0.2, quiesce_s=0.2, rollout_tokens_per_s=4000.0, train_tokens_per_s=4000.0
        )
        kind = Unbuilt if "SIM_UNBUILT" in os.environ else SimulatedBackend
        return kind(cluster, behaviour=behaviour, steps=limits.steps, eta=config.algorithm.bound)


if __name__ == "__main__":
    sys.exit(main(world=SimulatedWorld()))
