"""Which GPUs the executor uses, without Ray: it asks for their memory first, and flow only then."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ray_world import paced_cluster

from runtime.backends.ray.executor import Executor
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.world import World
from runtime.config.schema import Config, ModelSection
from runtime.core.action import StartReplica
from runtime.errors import RefusedError
from runtime.paths import RunPaths
from runtime.rl.types import RunLimits

HELD = "GPU GPU-a did not give its memory back: processes 9"


class NoActors:
    """A Ray in which no actor lives."""

    def get_actor(self, name: str, *, namespace: str) -> Any:
        raise ValueError(namespace, name)


class Bench:
    """An executor whose flow refuses everything, so that a start ends as soon as it would make something."""

    def __init__(self, folder: Path, *, lived: bool, answers: Iterable[str] = ()) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._answers = iter(answers)
        world = World(
            ray=NoActors(),
            run_id="r",
            hexctl_version="0",
            daemon_epoch=1,
            config=Config(model=ModelSection(source="seeded", path=Path("unused"))),
            paths=RunPaths(folder=folder, short=folder),
            cluster=paced_cluster("GPU-a", "dev0", paced=False),
            limits=RunLimits(),
        )
        built = threading.Event()
        built.set()
        self.executor = Executor(world, self._flow, built, self._memory_back, lived=lived)
        self._epoch = 0

    def start(self, device: str) -> str:
        """Why the start of a replica there failed."""
        self._epoch += 1
        step = StartReplica(replica="r1", epoch=self._epoch, devices=(device,))
        self.executor.apply(step)
        for thread in threading.enumerate():
            if thread.name == step.id:
                thread.join(30.0)
        return self.executor.notes()[BodyName(role="replica", id="r1", epoch=self._epoch)].reason

    def _flow(self) -> Any:
        raise RefusedError("flow was asked")

    def _memory_back(self, devices: tuple[str, ...]) -> str:
        self.asked.append(devices)
        return next(self._answers)


def test_a_run_that_begins_uses_its_gpus_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lived=False)
    assert "flow refuses" in bench.start("GPU-a")
    assert bench.asked == []


def test_a_run_that_lived_before_asks_for_each_gpu_before_its_first_use(tmp_path: Path) -> None:
    """Whoever held it was perhaps killed a moment ago, by a daemon that is no more: an end of Ray kills all engines at once."""
    bench = Bench(tmp_path, lived=True, answers=[HELD, HELD, ""])
    for _ in range(2):
        assert HELD in bench.start("GPU-a")
        assert bench.executor.problems() == (HELD,)
    assert "flow refuses" in bench.start("GPU-a")
    assert bench.asked == [("GPU-a",)] * 3
    assert HELD not in bench.executor.problems()


def test_what_is_no_gpu_has_no_memory_to_give_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, lived=True)
    assert "flow refuses" in bench.start("dev0")
    assert bench.asked == []
