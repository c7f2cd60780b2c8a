"""How full a replica's slots stay in an asynchronous run: the real loop and the real flow, everything else simulated.

Simulated: no model, virtual time; `tokens_per_s` are of that time and say nothing of any accelerator. 256 slots, a step of
4 ms and 8 us a sample (42,667 tokens/s when full), lengths log-normal around 110 tokens up to 192, a trainer that takes 128
samples a step and a third of a second for it, and flow's answers after 10 to 300 ms.
"""

import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.record import record
from runtime.policy.staleness import StalenessPolicy
from runtime.rl.engine.held import Held
from runtime.rl.exchange import PendingReply
from runtime.rl.flow import Flow, FlowFiles, FlowSettings
from runtime.rl.ledger import Ledger
from runtime.rl.protocols import EngineCapabilities
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.tasks import CopyTask
from runtime.rl.tokenizer import CharTokenizer
from runtime.rl.types import (
    Append,
    Applied,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    SampleId,
    TrainerHello,
    WeightsRef,
)

SLOTS, GROUP, PROMPTS, ETA = 256, 8, 16, 4
STEP_S, STEP_SAMPLE_S, UPDATE_S, TRAIN_S = 0.004, 8e-6, 0.05, 0.33
MEDIAN, SIGMA, LONGEST = 110, 0.6, 192
WARM_S, SECONDS = 5.0, 8.0
ANSWERS_S = (0.01, 0.05, 0.15, 0.3)


@record
class Case:
    """What differs between runs."""

    answer_s: float  # from an exchange's sending to its answer
    median: int = MEDIAN  # tokens of a response
    slots: int = SLOTS
    train_s: float = TRAIN_S


class Time:
    """Virtual seconds, and what happens at them."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._count), do))

    def move(self, seconds: float) -> bool:
        end = self.now + seconds
        while self._due and self._due[0][0] <= end:
            self.now, _, do = heapq.heappop(self._due)
            do()
        self.now = end
        return False


class Engine:
    """Decodes nothing, in virtual time."""

    capabilities = EngineCapabilities(name="simulated", max_tp=1, max_pp=1, kv_on_update=("recompute",))

    def __init__(self, time: Time, case: Case) -> None:
        self._time, self._case = time, case
        self.version: int | None = None
        self.digest: str | None = None
        self._held: dict[SampleId, tuple[Held, int]] = {}  # and the length at which it ends
        self.decoded = self.steps = 0
        self.empty_s = 0.0  # slots' seconds without a sample, while decoding

    def free_slots(self) -> int:
        return max(0, self._case.slots - len(self._held))

    def limit(self, slots: int | None) -> None: ...

    def add(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            held = Held.of(lease, max_length=4096)
            self._held[lease.sample] = held, held.prompt_length + length_of(lease.sample, self._case.median)

    def step(self) -> tuple[Append, ...]:
        assert self.version is not None
        running = list(self._held.values())[: self._case.slots]
        self._time.move(STEP_S + STEP_SAMPLE_S * len(running))
        appends = []
        for held, end in running:
            token = 1 if len(held.tokens) + 1 >= end else 5
            append = held.take(token, -0.5, version=self.version, eos_ids=frozenset((1,)))
            if append.finished is not None:
                del self._held[append.sample]
            appends.append(append)
        self.decoded += len(appends)
        self.steps += bool(appends)
        return tuple(appends)

    def abort(self, samples: Sequence[SampleId]) -> tuple[SampleId, ...]:
        return tuple(s for s in samples if self._held.pop(s, None) is not None)

    def held(self) -> tuple[SampleId, ...]:
        return tuple(self._held)

    def load_weights(self, ref: WeightsRef) -> None:
        self._time.move(UPDATE_S)
        self.version, self.digest = ref.version, ref.digest

    def check(self) -> None: ...

    def close(self) -> None: ...

    def stats(self) -> EngineStats:
        slots = self._case.slots
        running = min(slots, len(self._held))
        return EngineStats(
            running=running,
            waiting=len(self._held) - running,
            slots=slots,
            decoded_tokens=self.decoded,
            kv_used_share=0.2,
        )


def length_of(sample: SampleId, median: int) -> int:
    """Tokens of a response, its end included."""
    draw = random.Random(f"{sample.group}/{sample.member}").gauss(math.log(median), SIGMA)
    return max(1, min(LONGEST, round(math.exp(draw))))


class _Pending:
    """Flow handles it half way."""

    def __init__(self, world: "World", request: ExchangeRequest) -> None:
        self._time = world.time
        self._reply: ExchangeReply | None = None
        self._at = world.time.now + world.case.answer_s

        def handle() -> None:
            self._reply = world.flow.exchange(request)
            world.answer_verifiers()

        world.time.after(world.case.answer_s / 2, handle)

    def done(self) -> bool:
        return self._time.now >= self._at

    def result(self, timeout_s: float) -> ExchangeReply:
        if not self.done():
            self._time.move(min(timeout_s, self._at - self._time.now))
        if not self.done() or self._reply is None:
            raise TimeoutError
        return self._reply


class World:
    """One replica, a trainer, verifiers that answer at once, and flow."""

    def __init__(self, folder: Path, case: Case) -> None:
        self.case, self.time, self.items = case, Time(), list[RewardItem]()
        tokenizer = CharTokenizer()
        self.flow = Flow(
            settings=FlowSettings(
                policy=StalenessPolicy(eta=ETA, prompts_per_step=PROMPTS, stale="mask"),
                responses_per_prompt=GROUP,
                max_new_tokens=LONGEST,
            ),
            ledger=Ledger(folder / "ledger.db"),
            task=CopyTask(tokenizer, seed=1, min_length=9, max_length=9),
            tokenizer=tokenizer,
            rewards=self,
            files=FlowFiles(metrics=folder / "m", samples=folder / "s", evaluations=folder / "e"),
            clock=self.time,
            wall=self.time,
        )
        self.flow.hello(TrainerHello(trainer="t", epoch=1, pid=1, complete=()))
        self._publish(0)
        self.engine = Engine(self.time, case)
        self.loop = ReplicaLoop(self.engine, self, replica="r", epoch=1, clock=self.time, wait=self.time.move)
        self.stale = 0  # oldest token trained, in steps
        self.time.after(0.0, self._train)

    def send(self, request: ExchangeRequest) -> PendingReply:
        return _Pending(self, request)

    def submit(self, items: Sequence[RewardItem]) -> None:
        self.items += items

    def answer_verifiers(self) -> None:
        items, self.items = self.items, []
        if items:
            self.flow.rewarded([RewardResult(sample=i.sample, reward=float(i.sample.member % 2)) for i in items])

    def _publish(self, version: int) -> None:
        self.flow.published(WeightsRef(lineage=0, version=version, path=str(version), digest=f"d{version}"), 1)

    def _train(self) -> None:
        batch = self.flow.next_batch("t", 1).batch
        if batch is None:
            self.time.after(0.01, self._train)
            return
        ages = (batch.step - v for s in batch.samples for v, w in zip(s.versions, s.weights, strict=True) if w)
        self.stale = max(self.stale, max(ages, default=0))

        def applied() -> None:
            self.flow.applied(Applied(step=batch.step, ids_hash=batch.ids_hash, trainer_epoch=1, metrics={}))
            self._publish(batch.step + 1)
            self._train()

        self.time.after(self.case.train_s, applied)

    def turn_until(self, seconds: float) -> None:
        while self.time.now < seconds:
            self.loop.tick()


def simulate(case: Case, *, warm_s: float = WARM_S, seconds: float = SECONDS) -> dict[str, float]:
    """Share of slots with a sample in a step, share of time spent decoding, tokens/s of virtual time, oldest token trained."""
    with TemporaryDirectory() as folder:
        world = World(Path(folder), case)
        world.turn_until(warm_s)
        tokens, steps, at = world.engine.decoded, world.engine.steps, world.time.now
        world.turn_until(at + seconds)
        tokens, steps, taken = world.engine.decoded - tokens, world.engine.steps - steps, world.time.now - at
        world.flow.close()
    return {
        "slots_busy_share": tokens / (steps * case.slots),
        "decoding_share": (STEP_S * steps + STEP_SAMPLE_S * tokens) / taken,
        "tokens_per_s": tokens / taken,
        "oldest_token_steps": world.stale,
    }


def run() -> dict[str, float]:
    """Simulated figures by how long flow takes to answer; short responses too, at the usual time."""
    cases = {f"answer_{1e3 * s:.0f}_ms": Case(answer_s=s) for s in ANSWERS_S}
    cases["short_responses"] = Case(answer_s=0.05, median=20, train_s=0.05)
    return {f"simulated_{name}_{k}": v for name, case in cases.items() for k, v in simulate(case).items()}
