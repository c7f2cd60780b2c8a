"""Small stand-ins for the workload, run inside real actors: they speak to flow, decode numbers, and can be told to fail."""

import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from planner.record import replace
from runtime.backends.ray.actors.identity import Identity
from runtime.backends.ray.actors.ports import RayFlowClient, RayTrainerFlow
from runtime.config.schema import Config
from runtime.errors import ConfigError, RefusedError, UnreachableError
from runtime.paths import RunPaths
from runtime.rl.counter import TokenCounter
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.types import (
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    FlowStatus,
    NextBatch,
    ReplicaStatus,
    TrainerHello,
    TrainerWelcome,
)


class FlowDouble:
    """Keeps orders and token counts in one JSON file, so that a restarted flow goes on from it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._state: dict[str, Any] = {"daemon": 0, "tokens": {}, "redone": 0, "orders": {}, "trainer_order": "wait"}
        if path.exists():
            self._state = json.loads(path.read_text())
        self._rows: dict[tuple[str, int], ExchangeRequest] = {}
        self._trainer: int | None = None

    def _save(self) -> None:
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(self._state))
        new.replace(self._path)

    def _fence(self, epoch: int) -> None:
        if epoch < self._state["daemon"]:
            raise RefusedError("an older daemon", got=epoch, expected=f">= {self._state['daemon']}")
        self._state["daemon"] = epoch

    def exchange(self, r: ExchangeRequest) -> ExchangeReply:
        self._rows[r.replica, r.epoch] = r
        self._state["tokens"][f"{r.replica}/{r.epoch}"] = r.stats.decoded_tokens
        self._save()
        order = self._state["orders"].get(f"{r.replica}/{r.epoch}", "serve")
        return ExchangeReply(ack_seq=r.seq, order=order)

    def hello(self, h: TrainerHello) -> TrainerWelcome:
        self._trainer = h.epoch
        return TrainerWelcome(load_step=None, lineage=0, published=None)

    def next_batch(self, trainer: str, epoch: int, *, ahead: bool = False) -> NextBatch:
        return NextBatch(order=self._state["trainer_order"], waits_for="nothing")

    def set_order(self, daemon: int, replica: str, epoch: int, order: str) -> None:
        self._fence(daemon)
        self._state["orders"][f"{replica}/{epoch}"] = order
        self._save()

    def set_trainer_order(self, daemon: int, epoch: int, order: str) -> None:
        self._fence(daemon)
        self._state["trainer_order"] = order
        self._save()

    def expect_replica(self, daemon: int, replica: str, epoch: int) -> None:
        self._fence(daemon)
        self._save()

    def forget_replica(self, daemon: int, replica: str, epoch: int, decoded: int) -> None:
        self._fence(daemon)
        received = self._state["tokens"].pop(f"{replica}/{epoch}", 0)
        self._state["redone"] += decoded - received
        self._rows.pop((replica, epoch), None)
        self._save()

    def forget_trainer(self, daemon: int, epoch: int) -> None:
        self._fence(daemon)
        self._trainer = None

    def finish(self, daemon: int) -> None:
        self._fence(daemon)
        self._state["orders"] = {f"{r}/{e}": "drain" for r, e in self._rows}
        self._state["trainer_order"] = "stop"
        self._save()

    def tick(self) -> None:
        return

    def close(self) -> None:
        self._save()

    def status(self) -> FlowStatus:
        known = [k.split("/") for k in self._state["tokens"]]
        rows = [self._rows.get((r, int(e)), ExchangeRequest(replica=r, epoch=int(e), seq=0)) for r, e in known]
        told = {"quiesce": "quiesced", "stop": "absent"}.get(self._state["trainer_order"], "waiting")
        state = "absent" if self._trainer is None else told
        return FlowStatus(
            step=0,
            lineage=0,
            weights=None,
            eta=0,
            generated_tokens=sum(self._state["tokens"].values()),
            trained_tokens=0,
            masked_tokens=0,
            in_flight_tokens=sum(self._state["tokens"].values()),
            wasted_tokens={},
            redone_tokens=self._state["redone"],
            samples_by_state={},
            queue_groups=0,
            admitted_groups=0,
            staleness_mean=None,
            staleness_p95=None,
            staleness_max=None,
            spans_two_versions_share=None,
            reward_mean=None,
            generated_tokens_per_s=0.0,
            trained_tokens_per_s=0.0,
            trainer_wait_share=0.0,
            admission_wait_share=0.0,
            waits="",
            replicas=tuple(self._row(r) for r in rows),
            trainer_epoch=self._trainer,
            trainer_state=state,
            trainer_age_s=0.0,
            finished=False,
            last_metrics={},
        )

    def _row(self, r: ExchangeRequest) -> ReplicaStatus:
        order = self._state["orders"].get(f"{r.replica}/{r.epoch}", "serve")
        return ReplicaStatus(
            replica=r.replica,
            epoch=r.epoch,
            order=order,
            version=0,
            digest="d",
            verified=True,
            leased=0 if order != "serve" else 1,
            stats=r.stats,
            last_exchange_age_s=0.0,
            unflushed_tokens=0,
            pid=r.pid,
        )


class PoolDouble:
    """Scores by length, at once."""

    def __init__(self, on_results: Callable[[Sequence[RewardResult]], None]) -> None:
        self._on_results = on_results

    def submit(self, items: Sequence[RewardItem]) -> None:
        for item in items:
            self._on_results([RewardResult(sample=item.sample, reward=float(len(item.response)))])


def flow(me: Identity, config: Config, paths: RunPaths, *_: Any) -> FlowDouble:
    """Factory of the flow actor."""
    return FlowDouble(paths.folder / "flow-double.json")


def gated(me: Identity, config: Config, paths: RunPaths, *_: Any) -> FlowDouble:
    """A flow that is built once the file "gate" is there, and fails with what is written in it."""
    gate, pause = paths.folder / "gate", threading.Event()
    while not gate.exists():
        pause.wait(0.05)
    if why := gate.read_text():
        raise ConfigError(why)
    return FlowDouble(paths.folder / "flow-double.json")


def rewards(
    me: Identity, config: Config, paths: RunPaths, on_results: Callable[[Sequence[RewardResult]], None]
) -> PoolDouble:
    """Factory of the rewards actor."""
    return PoolDouble(on_results)


def replica(me: Identity, config: Config, paths: RunPaths, ready: Callable[[], None]) -> str:
    """Counts tokens until told to stop; one more token is counted than flow ever hears of."""
    client, counter = RayFlowClient(me.run), TokenCounter(paths.counters / f"{me.id}-{me.epoch}")
    pause, decoded, seq = threading.Event(), 0, 0
    ready()
    while True:
        decoded += 1
        counter.set(decoded + 1)
        seq += 1
        request = ExchangeRequest(
            replica=me.id, epoch=me.epoch, seq=seq, stats=EngineStats(decoded_tokens=decoded, slots=4), pid=os.getpid()
        )
        reply = None
        while reply is None:  # it decodes no further until flow has heard of what there is
            try:
                reply = client.send(request).result(5.0)
            except (UnreachableError, TimeoutError):
                pause.wait(0.1)
        if reply.order == "stop":
            return "told to stop"
        pause.wait(0.05)


def failing(me: Identity, config: Config, paths: RunPaths, ready: Callable[[], None]) -> str:
    """A replica whose engine does not like its model."""
    ready()
    raise ValueError("the engine rejects this model")


def trainer(me: Identity, config: Config, paths: RunPaths, ready: Callable[[], None]) -> str:
    """Asks for work until told to stop or quiesce."""
    port, pause = RayTrainerFlow(me.run), threading.Event()
    port.hello(TrainerHello(trainer=me.id, epoch=me.epoch, pid=os.getpid(), complete=()))
    ready()
    while True:
        batch = port.next_batch(me.id, me.epoch)
        if batch.order in ("stop", "quiesce"):
            return f"told to {batch.order}"
        pause.wait(0.05)


__all__ = ["FlowDouble", "failing", "flow", "gated", "replace", "replica", "rewards", "trainer"]
