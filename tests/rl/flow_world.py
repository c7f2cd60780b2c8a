"""A whole run in virtual time: the real Flow and its real ledger, with fake replicas, trainer, verifiers and daemon.

Everything is decided by a seed. Tokens are a function of (sample, position), so any copy of a sample can be checked.
Replicas speak as the real loop does: numbered exchanges, kept and repeated until they are answered.
"""

import dataclasses
import heapq
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from runtime.errors import RefusedError
from runtime.policy.staleness import StalenessPolicy, StalePolicy
from runtime.rl.flow import Flow, FlowFiles, FlowSettings
from runtime.rl.ledger import Ledger
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.tasks import CopyTask
from runtime.rl.tokenizer import CharTokenizer
from runtime.rl.types import (
    Append,
    Applied,
    CheckpointMark,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    RunLimits,
    SampleId,
    TrainBatch,
    TrainerHello,
    WeightsRef,
)

EOS = 1
POLL_S = 0.1


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder in memory where there is one: fsync costs nothing there, and it is not what is tested."""
    shm = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="hexctl-", dir=shm if os.access(shm, os.W_OK) else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def response_length(sample: SampleId, limit: int) -> int:
    """Tokens of a response, its end token included, at most `limit`."""
    return random.Random(f"length/{sample.group}/{sample.member}").randint(1, limit)


def response_token(sample: SampleId, index: int, limit: int) -> tuple[int, float]:
    """Token and logprob at a position."""
    length = response_length(sample, limit)
    draw = random.Random(f"token/{sample.group}/{sample.member}/{index}")
    return (EOS if index == length - 1 and length < limit else 2 + draw.randrange(10)), -draw.random()


def digest(lineage: int, version: int) -> str:
    """The hash of a fake generation."""
    return f"digest-{lineage}-{version}"


@dataclasses.dataclass
class Held:
    epoch: int
    length: int
    limit: int


class FakeReplica:
    """One incarnation. `step_s` seconds a decode step, whatever it holds."""

    def __init__(self, world: "World", name: str, epoch: int, *, step_s: float, slots: int) -> None:
        self.world, self.name, self.epoch, self.step_s, self.slots = world, name, epoch, step_s, slots
        self.held: dict[SampleId, Held] = {}
        self.appends: list[Append] = []
        self.released: list[SampleId] = []
        self.flight: ExchangeRequest | None = None
        self.seq = 0
        self.weights: WeightsRef | None = None
        self.decoded = 0
        self.alive = True
        self.paused_until = -1.0
        self.order = "serve"
        self.steps = self.slot_steps = 0  # decode steps, and samples in them
        self.done_at: dict[SampleId, float] = {}
        world.after(0.0, self.exchange)
        world.after(step_s, self.decode)

    def decode(self) -> None:
        if not self.alive:
            return
        self.world.after(self.step_s, self.decode)
        if self.world.now < self.paused_until or self.weights is None or self.order != "serve":
            return
        running = list(self.held.items())[: self.slots]
        self.steps, self.slot_steps = self.steps + 1, self.slot_steps + len(running)
        for sample, held in running:
            token, logprob = response_token(sample, held.length, held.limit)
            last = held.length + 1 >= min(held.limit, response_length(sample, held.limit))
            finished = None if not last else "eos" if token == EOS else "length"
            self.appends.append(
                Append(
                    sample=sample, epoch=held.epoch, start=held.length, tokens=(token,), logprobs=(logprob,),
                    version=self.weights.version, finished=finished,
                )
            )  # fmt: skip
            held.length += 1
            self.decoded += 1
            if last:
                del self.held[sample]
                self.done_at[sample] = self.world.now

    def exchange(self) -> None:
        if not self.alive:
            return
        self.world.after(POLL_S, self.exchange)
        if self.world.now < self.paused_until:
            return
        if self.flight is None:
            self.seq += 1
            self.flight = ExchangeRequest(
                replica=self.name,
                epoch=self.epoch,
                seq=self.seq,
                appends=merge(self.appends),
                released=tuple(self.released),
                version=None if self.weights is None else self.weights.version,
                digest=None if self.weights is None else self.weights.digest,
                stats=EngineStats(
                    running=min(len(self.held), self.slots),
                    slots=self.slots,
                    decoded_tokens=self.decoded,
                    decode_tokens_per_s=min(len(self.held), self.slots) / self.step_s,
                    decode_running=min(len(self.held), self.slots),
                ),
            )
            self.appends, self.released = [], []
        reply = self.world.call(self.flight)
        if reply is not None:
            self.take(self.flight, reply)

    def take(self, request: ExchangeRequest, reply: ExchangeReply) -> None:
        if reply.ack_seq >= request.seq:
            self.flight = None
        for sample in reply.cancel:
            self.held.pop(sample, None)
            self.appends = [a for a in self.appends if a.sample != sample]
        self.order = reply.order
        if reply.order != "serve":
            self.released += [*self.held, *(lease.sample for lease in reply.leases)]
            self.held = {}
            if reply.order == "stop":
                self.alive = False
            return
        if reply.weights is not None and reply.weights != self.weights:
            self.weights = reply.weights
        for lease in reply.leases:
            self.add(lease)

    def add(self, lease: Lease) -> None:
        limit = lease.max_new_tokens
        expected = tuple(response_token(lease.sample, i, limit)[0] for i in range(len(lease.tokens)))
        assert lease.tokens == expected, "a lease carries other tokens than were journalled"
        held = self.held.get(lease.sample)
        if held is None or held.epoch < lease.epoch:
            self.held[lease.sample] = Held(epoch=lease.epoch, length=len(lease.tokens), limit=limit)


def merge(appends: Sequence[Append]) -> tuple[Append, ...]:
    """One append a sample and version, as a flush has it."""
    merged: dict[tuple[SampleId, int, int], Append] = {}
    for a in appends:
        key = (a.sample, a.epoch, a.version)
        old = merged.get(key)
        merged[key] = a if old is None else old._replace(
            tokens=old.tokens + a.tokens, logprobs=old.logprobs + a.logprobs, finished=a.finished
        )  # fmt: skip
    return tuple(merged.values())


class FakeTrainer:
    """Trains for `step_s` seconds. Its checkpoints live in the world."""

    def __init__(self, world: "World", epoch: int, *, step_s: float) -> None:
        self.world, self.epoch, self.step_s = world, epoch, step_s
        self.alive = True
        self.lineage = 0
        world.after(0.0, self.hello)

    def hello(self) -> None:
        if not self.alive:
            return
        flow = self.world.flow
        welcome = flow.hello(TrainerHello(trainer="t", epoch=self.epoch, pid=1, complete=tuple(self.world.checkpoints)))
        self.lineage = welcome.lineage
        version = 0 if welcome.load_step is None else welcome.load_step + 1
        self.world.check_load(welcome)
        if welcome.published is None or welcome.published.version != version:
            self.publish(version)
        self.world.after(0.0, self.ask)

    def publish(self, version: int) -> None:
        ref = WeightsRef(
            lineage=self.lineage, version=version, path=f"w{version}", digest=digest(self.lineage, version)
        )
        self.world.flow.published(ref, self.epoch)

    def ask(self) -> None:
        if not self.alive:
            return
        try:
            answer = self.world.flow.next_batch("t", self.epoch)
        except RefusedError:
            self.alive = False
            return
        if answer.order == "train":
            assert answer.batch is not None
            batch = answer.batch
            self.world.after(self.step_s, lambda: self.trained(batch))
        elif answer.order == "stop":
            self.alive = False
        else:
            self.world.after(POLL_S, self.ask)

    def trained(self, batch: TrainBatch) -> None:
        """The four points of a step at which a trainer may die."""
        world = self.world
        if not self.alive or world.dies("trainer before checkpoint"):
            return self.world.trainer_died(self)
        world.checkpoints.append(CheckpointMark(step=batch.step, ids_hash=batch.ids_hash, lineage=self.lineage))
        world.trained.setdefault((self.lineage, batch.step), []).append(batch)
        if world.dies("trainer after checkpoint"):
            return self.world.trainer_died(self)
        done = Applied(step=batch.step, ids_hash=batch.ids_hash, trainer_epoch=self.epoch, metrics={"loss": 1.0})
        world.flow.applied(done)
        if world.dies("trainer after applied"):
            return self.world.trainer_died(self)
        self.publish(batch.step + 1)
        return self.ask()


class World:
    """Clock, event heap, faults and everybody in it."""

    def __init__(
        self,
        folder: Path,
        *,
        seed: int = 0,
        eta: int = 2,
        stale: StalePolicy = "mask",
        prompts_per_step: int = 3,
        responses: int = 2,
        limit: int = 8,
        steps: int | None = 6,
        train_s: float = 0.5,
        reward_s: float = 0.05,
        fault_rate: float = 0.0,
        eval_every: int = 0,
    ) -> None:
        self.folder, self.random, self.fault_rate, self.reward_s = folder, random.Random(seed), fault_rate, reward_s
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self.settings = FlowSettings(
            policy=StalenessPolicy(eta=eta, prompts_per_step=prompts_per_step, stale=stale),
            responses_per_prompt=responses,
            max_new_tokens=limit,
            limits=RunLimits(steps=steps, lease_s=5.0),
            eval_every_steps=eval_every,
            eval_prompts=3,
        )
        self.checkpoints: list[CheckpointMark] = []
        self.trained: dict[tuple[int, int], list[TrainBatch]] = {}
        self.replicas: dict[str, FakeReplica] = {}
        self.epochs: dict[str, int] = {}
        self.verifiers_silent = False
        self.flow = self.open()
        self.trainer = FakeTrainer(self, 1, step_s=train_s)

    def open(self) -> Flow:
        tokenizer = CharTokenizer()
        return Flow(
            settings=self.settings,
            ledger=Ledger(self.folder / "ledger.db"),
            task=CopyTask(tokenizer, seed=1, min_length=2, max_length=5),
            tokenizer=tokenizer,
            rewards=self,
            files=FlowFiles(
                metrics=self.folder / "metrics.jsonl",
                samples=self.folder / "samples.jsonl",
                evaluations=self.folder / "evaluations.jsonl",
            ),
            clock=lambda: self.now,
            wall=lambda: 1e9 + self.now,
        )

    def after(self, delay_s: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, call))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; True when `until` came true."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, call = heapq.heappop(self._heap)
            call()
            if until():
                return True
        self.now = end
        return until()

    # Verifiers

    def submit(self, items: Sequence[RewardItem]) -> None:
        results = [
            RewardResult(sample=i.sample, reward=random.Random(f"reward/{i.sample}").choice((0.0, 1.0))) for i in items
        ]
        if not self.verifiers_silent:
            self.after(self.reward_s, lambda: self.flow.rewarded(results))

    # Faults

    def dies(self, where: str) -> bool:
        del where
        return self.random.random() < self.fault_rate

    def call(self, request: ExchangeRequest) -> ExchangeReply | None:
        """A replica's call; it may get lost on the way there or back."""
        if self.dies("request lost"):
            return None
        reply = self.flow.exchange(request)
        return None if self.dies("reply lost") else reply

    def add_replica(self, name: str, *, step_s: float, slots: int = 4) -> FakeReplica:
        self.epochs[name] = self.epochs.get(name, 0) + 1
        self.replicas[name] = FakeReplica(self, name, self.epochs[name], step_s=step_s, slots=slots)
        return self.replicas[name]

    def kill_replica(self, name: str, *, noticed_s: float = 1.0) -> None:
        """kill -9; the daemon notices, tells flow, and starts another."""
        old = self.replicas[name]
        old.alive = False

        def noticed() -> None:
            self.flow.forget_replica(1, name, old.epoch, old.decoded)
            if self.replicas[name] is old:
                self.add_replica(name, step_s=old.step_s, slots=old.slots)

        self.after(noticed_s, noticed)

    def pause_replica(self, name: str, seconds: float) -> None:
        """It hangs, and later wakes as a zombie."""
        self.replicas[name].paused_until = self.now + seconds

    def trainer_died(self, trainer: FakeTrainer) -> None:
        trainer.alive = False
        if trainer is self.trainer:
            self.trainer = FakeTrainer(self, trainer.epoch + 1, step_s=trainer.step_s)

    def crash_flow(self) -> None:
        """kill -9 of flow, and Ray starts it again from the ledger."""
        self.flow.close()
        self.flow = self.open()

    # Truth

    def check_load(self, welcome: object) -> None:
        """For worlds that lose checkpoints."""

    def batches(self) -> list[TrainBatch]:
        """Every applied batch, by the trainer's own record: the last attempt of each step."""
        last: dict[int, TrainBatch] = {}
        for (_, step), attempts in sorted(self.trained.items()):
            last[step] = attempts[-1]
        return [last[s] for s in sorted(last) if s < self.flow.status().steps_done]
