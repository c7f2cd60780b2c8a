"""The real data plane in one process: flow, engines and trainer in threads, no Ray. What only transport adds is left out."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.engine.factory import build_engine
from runtime.rl.exchange import LoopTiming
from runtime.rl.flow.flow import Flow
from runtime.rl.flow.open import open_flow
from runtime.rl.pacing import KindPacing
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.tokenizer import load_tokenizer
from runtime.rl.train.factory import build_trainer
from runtime.rl.train.loop import TrainerLoop
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import (
    Applied,
    ExchangeReply,
    ExchangeRequest,
    NextBatch,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    WeightsRef,
)

Verify = Callable[[RewardItem], float]


class Answered:
    """A `PendingReply` over a future."""

    def __init__(self, future: "Future[ExchangeReply]") -> None:
        self._future = future

    def done(self) -> bool:
        return self._future.done()

    def result(self, timeout_s: float) -> ExchangeReply:
        return self._future.result(timeout_s)


class ThreadWorld:
    """One flow behind a lock; `run` returns when the run's step limit is reached and the trainer was told to stop."""

    def __init__(
        self, config: Config, folder: Path, *, replicas: int, verify: Verify, pacing: Sequence[KindPacing | None] = ()
    ) -> None:
        self.paths = RunPaths(folder=folder, short=folder)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._to_verify: queue.SimpleQueue[Sequence[RewardItem] | None] = queue.SimpleQueue()
        self._verify = verify
        self.batches: list[TrainBatch] = []
        tokenizer = load_tokenizer(config.model.tokenizer, config.model.path.parent)
        self.flow: Flow = open_flow(config, self.paths, tokenizer, self, on_change=self._changed.notify_all)
        self.trainer: TorchTrainer = build_trainer(config, self.paths)
        self._trainer_loop = TrainerLoop(
            self.trainer, self, name="t0", epoch=1, weights=self.paths.weights, eta=config.algorithm.bound
        )
        for i in range(replicas):
            self.flow.expect_replica(1, f"r{i}", 1)
        self._loops = [
            ReplicaLoop(
                build_engine(config),
                self,
                replica=f"r{i}",
                epoch=1,
                pacing=pacing[i] if pacing else None,
                timing=LoopTiming(flush_s=0.02, finished_flush_s=0.0, idle_s=0.01),
            )
            for i in range(replicas)
        ]

    # what the reward desk, the replicas and the trainer call

    def submit(self, items: Sequence[RewardItem]) -> None:
        self._to_verify.put(list(items))

    def send(self, request: ExchangeRequest) -> Answered:
        future: Future[ExchangeReply] = Future()
        with self._lock:
            future.set_result(self.flow.exchange(request))
        return Answered(future)

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        with self._lock:
            return self.flow.hello(hello)

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        with self._lock:
            answer = self.flow.next_batch(trainer, epoch)
            if answer.order == "wait":
                self._changed.wait(0.5)
                answer = self.flow.next_batch(trainer, epoch)
        if answer.batch is not None:
            self.batches.append(answer.batch)
        return answer

    def applied(self, applied: Applied) -> None:
        with self._lock:
            self.flow.applied(applied)

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        with self._lock:
            self.flow.published(ref, epoch, stored)

    def run(self, *, deadline_s: float) -> None:
        """Everything, until the step limit."""
        failures: list[BaseException] = []

        def guarded(work: Callable[[], Any]) -> Callable[[], None]:
            def body() -> None:
                try:
                    work()
                except BaseException as e:  # noqa: BLE001 - reported below, in the test's thread
                    failures.append(e)

            return body

        threads = [
            threading.Thread(target=guarded(w), daemon=True) for w in (self._judge, *(r.run for r in self._loops))
        ]
        trainer = threading.Thread(target=guarded(self._trainer_loop.run), daemon=True)
        for t in (*threads, trainer):
            t.start()
        trainer.join(deadline_s)
        stuck = trainer.is_alive()
        self._trainer_loop.stop()
        for loop in self._loops:
            loop.stop()
        self._to_verify.put(None)
        for t in threads:
            t.join(60)
        if failures:
            raise failures[0]
        assert not stuck, f"no end within {deadline_s} s: {self.flow.status()}"

    def _judge(self) -> None:
        while (items := self._to_verify.get()) is not None:
            results = [RewardResult(sample=i.sample, reward=self._verify(i)) for i in items]
            with self._lock:
                self.flow.rewarded(results)
