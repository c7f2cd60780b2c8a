"""The rewards actor in a Ray cluster of its own: processor time at so many samples a second, as flow sends them.

Answers of 900 characters (256 tokens or so) that end in a number, to `math_verify` with four workers. `actor`: its own process,
which passes items and results on; `verifiers`: its children, which judge them. Shares of one core; `wait`: from a sample's
submission to its reward, median.
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.timing import cpu_s
from planner.cluster import Cluster, Link
from runtime.backends.ray import cluster as ray_cluster
from runtime.backends.ray.actors.verifiers import RewardDispatch
from runtime.backends.ray.world import World, start_rewards
from runtime.config.load import load_config
from runtime.paths import RunPaths
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.types import RunLimits, SampleId

CONFIG = Path(__file__).resolve().parents[1] / "configs/local.toml"
RATES_PER_S = (0, 50, 134)  # 0: what it costs to be there
WARM_S, MEASURED_S, TICK_S = 5.0, 20.0, 0.02
WORKERS = 4
PROSE = "So there are 48 / 2 = 24 of them in May, and 48 + 24 altogether. " * 14


def run() -> dict[str, float]:
    """Figures at each rate, one after the other on one actor."""
    figures: dict[str, float] = {}
    with _world() as world:
        handle = start_rewards(world)
        world.ray.get(handle.ready.remote(), timeout=120)
        pid = world.ray.get(handle.ping.remote(), timeout=30).pid
        for rate in RATES_PER_S:
            figures |= {
                f"{rate}_per_s_{k}": v for k, v in asyncio.run(_Sender(world.run_id).measured(rate, pid)).items()
            }
    return figures


@contextmanager
def _world() -> Iterator[World]:
    """A cluster and a run of this benchmark's own."""
    config = load_config(CONFIG).config
    assert config.task is not None
    task = config.task.model_copy(update={"reward": "math_verify", "reward_workers": WORKERS})
    config = config.model_copy(update={"task": task})
    with tempfile.TemporaryDirectory(prefix="hx-") as folder:
        paths = RunPaths(folder=Path(folder) / "run", short=Path(folder) / "s")
        paths.logs.mkdir(parents=True)
        link = Link(latency_s=1e-5, bytes_per_s=1e9)
        head = ray_cluster.start_head(paths, {}, num_gpus=0)
        try:
            yield World(
                ray=ray_cluster.connect(head.address, "hexctl-bench", token=paths.ray_token),
                run_id="bench",
                hexctl_version="",
                daemon_epoch=1,
                config=config,
                paths=paths,
                cluster=Cluster(kinds={}, devices=(), same_kind=link, cross_kind=link),
                limits=RunLimits(),
            )
        finally:
            ray_cluster.disconnect()
            ray_cluster.stop_head(head.processes)


class _Sender:
    """Flow's side: samples end one by one, evenly."""

    def __init__(self, run_id: str) -> None:
        self._dispatch = RewardDispatch(run_id, self._take)
        self._sent_s: dict[SampleId, float] = {}
        self._waits_s: list[float] = []
        self._number = 0

    async def measured(self, rate_per_s: float, pid: int) -> dict[str, float]:
        """After the warm-up."""
        self._dispatch.start()
        await self._send(rate_per_s, WARM_S)
        self._waits_s.clear()
        before, began = _spent(pid), time.monotonic()
        await self._send(rate_per_s, MEASURED_S)
        after, seconds = _spent(pid), time.monotonic() - began
        figures = {f"{k}_share": (after[k] - before[k]) / seconds for k in after}
        while self._sent_s:
            await asyncio.sleep(TICK_S)
        return figures | ({"wait_s": statistics.median(self._waits_s)} if self._waits_s else {})

    async def _send(self, rate_per_s: float, seconds: float) -> None:
        began, sent = time.monotonic(), 0
        while (past := time.monotonic() - began) < seconds:
            due = int(rate_per_s * past) - sent
            if due:
                self._dispatch.submit([self._item() for _ in range(due)])
            sent += due
            await asyncio.sleep(TICK_S)

    def _item(self) -> RewardItem:
        n = self._number = self._number + 1
        sample = SampleId(n, 0)
        self._sent_s[sample] = time.monotonic()
        return RewardItem(sample=sample, prompt="How many?", response=f"{PROSE}\n#### {n % 97}", answer=str(n % 89))

    def _take(self, results: tuple[RewardResult, ...]) -> None:
        now = time.monotonic()
        assert not any(r.error for r in results), results
        self._waits_s += [now - self._sent_s.pop(r.sample) for r in results]


def _spent(pid: int) -> dict[str, float]:
    """Processor seconds so far. A child that ended meanwhile is left out: none does before its 5,000th item."""
    actor: Any = psutil.Process(pid)
    return {"actor": cpu_s(actor), "verifiers": sum(cpu_s(c) for c in actor.children(recursive=True))}
