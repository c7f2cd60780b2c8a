"""What flow's answers cost a trainer's turn: a real flow with its ledger on the run's disk, and samples made up at once.

Counted are the seconds in `next_batch`, `applied` and `published` of a whole batch, and of packing and unpacking the batch as it
goes from process to process. Not counted is what the trainer waits behind the replicas' calls.
"""

import pickle
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from runtime.config.schema import Config
from runtime.paths import RunPaths
from runtime.rl.flow import Flow
from runtime.rl.flow.open import open_flow
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.tokenizer import load_tokenizer
from runtime.rl.types import (
    Append,
    Applied,
    EngineStats,
    ExchangeRequest,
    Lease,
    NextBatch,
    RunLimits,
    TrainBatch,
    TrainerHello,
    WeightsRef,
)
from runtime.scratch import scratch

STEPS = 5  # counted, after one that is not
FLUSH_TOKENS = 32  # a replica's flush of one sample, as `LoopTiming` has it
FIRST_TOKEN = 4
METRICS = dict.fromkeys((f"figure_{i}" for i in range(30)), 0.5)  # as many as a trainer tells


class _Instant:
    """Verifiers that answer when they are asked to."""

    def __init__(self) -> None:
        self._items: list[RewardItem] = []

    def submit(self, items: Sequence[RewardItem]) -> None:
        self._items += items

    def results(self) -> list[RewardResult]:
        done, self._items = self._items, []
        return [RewardResult(sample=i.sample, reward=float(n % 2)) for n, i in enumerate(done)]


class _Fed:
    """A flow, and a replica that has everything it leases ready at once."""

    def __init__(self, config: Config, folder: Path) -> None:
        quiet = config.evaluation.model_copy(update={"every_steps": 0})
        config = config.model_copy(update={"evaluation": quiet})
        paths = RunPaths(folder=folder, short=folder)
        self._rewards = _Instant()
        tokenizer = load_tokenizer(config.model.tokenizer, config.model.path.parent)
        self._vocab = tokenizer.vocab_size
        self.flow: Flow = open_flow(config, paths, tokenizer, self._rewards, limits=RunLimits(steps=None))
        self._response = max(1, min(round(config.lengths.response_mean), config.sampling.max_new_tokens))
        self._slots = config.sampling.max_running
        self._random, self._seq = random.Random(0), 0
        self._ready: tuple[Append, ...] = ()
        self.version = -1
        self.flow.hello(TrainerHello(trainer="profile", epoch=1, pid=1, complete=()))
        self.publish()

    def publish(self) -> None:
        """The next version is served from now on."""
        self.version += 1
        ref = WeightsRef(lineage=0, version=self.version, path=f"w{self.version}", digest=f"digest-{self.version}")
        self.flow.published(ref, 1)
        self._digest = ref.digest

    def feed(self) -> None:
        """One call of the replica with what it has, and the rewards of what ended."""
        self._seq += 1
        request = ExchangeRequest(
            replica="profile",
            epoch=1,
            seq=self._seq,
            appends=self._ready,
            version=self.version,
            digest=self._digest,
            stats=EngineStats(slots=self._slots, decode_tokens_per_s=1e4, decode_running=float(self._slots)),
        )
        reply = self.flow.exchange(request)
        self._ready = tuple(a for lease in reply.leases for a in self._made(lease))
        if results := self._rewards.results():
            self.flow.rewarded(results)

    def _made(self, lease: Lease) -> list[Append]:
        length = max(1, min(self._response, lease.max_new_tokens))
        draw = self._random.randrange
        return [
            Append(
                sample=lease.sample,
                epoch=lease.epoch,
                start=at,
                tokens=tuple(draw(FIRST_TOKEN, self._vocab) for _ in range(min(FLUSH_TOKENS, length - at))),
                logprobs=(-1.0,) * min(FLUSH_TOKENS, length - at),
                version=self.version,
                finished="length" if at + FLUSH_TOKENS >= length else None,
            )
            for at in range(0, length, FLUSH_TOKENS)
        ]


def flow_turn_s(config: Config, folder: Path, *, seconds: float, stop: Callable[[], bool]) -> float:
    """Median seconds that flow adds to a turn of the run; 0 for one without a task, or when too few steps came in time."""
    if config.task is None:
        return 0.0
    spent: list[float] = []
    with scratch(folder) as made:
        fed = _Fed(config, made)
        until = time.monotonic() + seconds  # reading a task's data is no part of it
        try:
            while len(spent) <= STEPS and time.monotonic() < until and not stop():
                fed.feed()
                began = time.perf_counter()
                answer = fed.flow.next_batch("profile", 1)
                if answer.order == "train" and answer.batch is not None:
                    spent.append(_turn(fed, answer, answer.batch, began))
        finally:
            fed.flow.close()
    return statistics.median(spent[1:]) if len(spent) > 1 else 0.0


def _turn(fed: _Fed, answer: NextBatch, batch: TrainBatch, began: float) -> float:
    pickle.loads(pickle.dumps(answer))  # our own words, there and back
    done = Applied(step=batch.step, ids_hash=batch.ids_hash, trainer_epoch=1, metrics=METRICS)
    fed.flow.applied(done)
    fed.publish()
    return time.perf_counter() - began
