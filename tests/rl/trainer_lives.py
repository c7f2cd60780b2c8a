"""Lives of a trainer, one after another: the real loop, trainer and flow in one thread, and a fate that ends some of them.

Time is counted in calls: a life may end before or after any call of the trainer or of flow, and a checkpoint that is written beside
the training is written after so many looks at it, or when somebody waits for it.
"""

import contextlib
import errno
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from planner.record import record
from runtime.config.schema import AlgorithmSection
from runtime.rl.model import DecoderConfig, build_seeded
from runtime.rl.train import checkpoint
from runtime.rl.train.checkpoint import list_complete
from runtime.rl.train.client import RetryTiming
from runtime.rl.train.loop import TrainerLoop
from runtime.rl.train.schedule import most_unsaved
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import (
    Applied,
    Lease,
    NextBatch,
    RunLimits,
    StepMetrics,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    WeightsRef,
)
from runtime.rl.weights.sealed import TensorEntry
from tests.rl.flow_desk import Desk, whole

QUICK = RetryTiming(first_s=0.001, most_s=0.002)
SHAPES = {
    "model_type": "qwen3",
    "vocab_size": 24,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "head_dim": 8,
}


class Killed(BaseException):
    """kill -9: nothing of this life runs after it."""


@record
class Fate:
    """`deaths`: calls that each life lasts, the last life for ever. `writes`: looks until a checkpoint is written, in turn; 0: its
    disk is full. `quiesce_at`: steps applied when the trainer is told to wait. `flow_too`: flow ends with each life."""

    every: int
    deaths: tuple[int, ...]
    writes: tuple[int, ...]
    quiesce_at: int
    flow_too: bool


class Lives:
    """A run of `steps` steps under a fate. It asserts on its way what must hold at every moment."""

    def __init__(self, folder: Path, fate: Fate, *, steps: int) -> None:
        self.folder, self.fate, self.steps = folder, fate, steps
        self.desk = Desk(folder, checkpoint_every=fate.every, limits=RunLimits(steps=steps))
        self.batches: dict[int, list[TrainBatch]] = {}
        self.lost: list[int] = []  # applied steps made again after each death
        self.held: list[Lease] = []  # by the one replica, which outlives them all
        self.quiesced = 0
        self._deaths = list(fate.deaths)
        self._begun = 0  # checkpoints
        self._left = -1  # calls of this life, if it ends
        self._quiesce = False

    def run(self) -> None:
        """Life after life until one comes to the end of the run."""
        for epoch in range(1, 1000):
            self._left = self._deaths.pop(0) if self._deaths else -1
            disk = Disk()
            work = Mortal(self, a_trainer(self.folder, disk), disk)
            try:
                TrainerLoop(
                    work, Line(self, epoch), name="t", epoch=epoch, checkpoint_every=self.fate.every, timing=QUICK
                ).run()
                return
            except Killed:
                disk.end()
            except OSError:
                assert list((self.folder / "checkpoints").glob(".new-*")) == [], "nothing half-written remains"
            if self.fate.flow_too:
                self.desk.reopen()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A call with the moment before it and the moment after it."""
        self._moment()
        yield
        self._moment()

    def looks(self) -> int:
        """How many the checkpoint takes that is begun now; 0: it fails."""
        found = self.fate.writes[self._begun % len(self.fate.writes)] if self.fate.writes else 1
        self._begun += 1
        return found if found or self._begun < 2 * len(self.fate.writes) else 1

    def newest(self) -> int:
        """Step of the newest complete checkpoint of the steps that are applied; -1: none."""
        ledger = self.desk.flow._state.ledger
        known = {(s.lineage, s.step, s.ids_hash) for s in ledger.step_rows(10 * self.steps)}
        marks = list_complete(self.folder / "checkpoints")
        return max((m.step for m in marks if (m.lineage, m.step, m.ids_hash) in known), default=-1)

    def order(self, epoch: int) -> None:
        """The trainer is told to wait once, and to go on when it does."""
        status = self.desk.flow.status()
        if self._quiesce and status.trainer_state == "quiesced":
            assert self.newest() == status.steps_done - 1, "what is in no checkpoint is saved before it waits"
            self.quiesced += 1
            self.desk.flow.set_trainer_order(1, epoch, "train")
            self._quiesce = False
        elif not self.quiesced and status.steps_done >= self.fate.quiesce_at:
            self.desk.flow.set_trainer_order(1, epoch, "quiesce")
            self._quiesce = True

    def _moment(self) -> None:
        if self._left == 0:
            raise Killed
        self._left -= 1


class Disk:
    """Of one life. A checkpoint beside the training is half there until it may be written; at the end of a life it stays so."""

    def __init__(self) -> None:
        self._may, self._full = threading.Semaphore(0), False
        self._begun, self._writer = threading.Event(), threading.current_thread()

    def __call__(self, path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
        if threading.current_thread().name == "checkpoint":
            self._writer = threading.current_thread()
            self._begun.set()
            with contextlib.suppress(FileNotFoundError):  # its life, and another's sweep, were quicker
                path.write_bytes(b"half of it")
            assert self._may.acquire(timeout=60)
            if self._full:
                raise OSError(errno.ENOSPC, "no space left on device")
        return checkpoint.write(path, tensors)

    def go_on(self) -> None:
        """What was begun is written; returns when it is."""
        assert self._begun.wait(60)
        self._begun.clear()
        self._may.release()
        self._writer.join(60)
        assert not self._writer.is_alive()

    def end(self) -> None:
        self._full = True
        self._may.release()


class Mortal:
    """A trainer whose every call may be the last."""

    def __init__(self, lives: Lives, real: TorchTrainer, disk: Disk) -> None:
        self._lives, self._real, self._disk = lives, real, disk
        self._looks: int | None = None  # until what was begun is written; None: nothing is being written
        self._dead = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)

    def restore(self, step: int | None, *, lineage: int, load_lineage: int | None = None) -> None:
        with self._call():
            self._real.restore(step, lineage=lineage, load_lineage=load_lineage)

    def train_step(self, batch: TrainBatch) -> StepMetrics:
        with self._call():
            self._lives.batches.setdefault(batch.step, []).append(batch)
            return self._real.train_step(batch)

    def save_checkpoint(self, ids_hash: str) -> str:
        with self._call():
            return self._real.save_checkpoint(ids_hash)

    def begin_checkpoint(self, ids_hash: str) -> bool:
        with self._call():
            self._looks = self._lives.looks()
            begun = self._real.begin_checkpoint(ids_hash)
            if self._looks == 0:
                self._disk.end()
                self._looks = None
            return begun

    @property
    def checkpoint_written(self) -> bool:
        if self._looks is not None:
            self._looks -= 1
            if self._looks <= 0:
                self._write()
        return self._real.checkpoint_written

    def seal_checkpoint(self) -> float:
        with self._call():
            if self._looks is not None:
                self._write()
            return self._real.seal_checkpoint()

    def drop_checkpoint(self) -> None:
        if not self._dead:
            self._real.drop_checkpoint()

    def publish(self) -> WeightsRef:
        with self._call():
            return self._real.publish()

    @contextlib.contextmanager
    def _call(self) -> Iterator[None]:
        try:
            with self._lives.call():
                yield
        except Killed:
            self._dead = True
            raise

    def _write(self) -> None:
        self._looks = None
        self._disk.go_on()


class Line:
    """Flow, as the trainer of an epoch reaches it; samples are there as soon as it asks for a batch."""

    def __init__(self, lives: Lives, epoch: int) -> None:
        self._lives, self._epoch = lives, epoch

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        with self._lives.call():
            before = self._lives.desk.flow.status().steps_done
            welcome = self._lives.desk.flow.hello(hello)
            lost = before - (0 if welcome.load_step is None else welcome.load_step + 1)
            self._lives.lost.append(max(0, lost))
            return welcome

    def next_batch(self, trainer: str, epoch: int) -> NextBatch:
        with self._lives.call():
            desk = self._lives.desk
            self._lives.order(epoch)
            answer = desk.ask(epoch)
            for _ in range(20):
                if answer.order != "wait":
                    return answer
                self._generate()
                answer = desk.ask(epoch)
            raise AssertionError(answer.waits_for, desk.flow.status().waits)

    def applied(self, applied: Applied) -> None:
        with self._lives.call():
            self._lives.desk.flow.applied(applied)
            newest = self._lives.newest()
            assert applied.checkpointed == (newest == applied.step)
            assert applied.step - newest <= most_unsaved(self._lives.fate.every)

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        with self._lives.call():
            self._lives.desk.flow.published(ref, epoch, stored)

    def _generate(self) -> None:
        lives, desk = self._lives, self._lives.desk
        lives.held += desk.serve()
        held, lives.held = lives.held, []
        version = desk.weights["a"].version
        lives.held += desk.exchange(appends=tuple(whole(x, version) for x in held)).leases
        desk.answer()


def a_trainer(folder: Path, disk: Disk | None = None) -> TorchTrainer:
    """At version 0; without a disk that of a life that nothing ends."""
    return TorchTrainer(
        build_seeded(DecoderConfig.from_hf(SHAPES), 0, torch.float64),
        algorithm=AlgorithmSection(learning_rate=1e-2),
        temperature=1.0,
        checkpoints=folder / "checkpoints",
        weights=folder / "weights",
        write=checkpoint.write if disk is None else disk,
    )
