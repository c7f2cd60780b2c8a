"""Flow alone, without Ray: what one step costs it in each call, and what its batch costs on the way to the trainer.

One caller is replica, verifiers and trainer at once. Milliseconds of processor time a step; `pack` and `unpack` are of one
batch, in flow and in the trainer. `commit_wall` is how long the ledger's commits took, on the disk of the temporary folder.
`tick` is the look for what has stalled, made before every call, with that many samples leased.
"""

import pickle
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from planner.record import record
from runtime.policy.staleness import StalenessPolicy
from runtime.rl.flow import Flow, FlowFiles, FlowSettings
from runtime.rl.ledger import Ledger
from runtime.rl.rewards.items import RewardItem, RewardResult
from runtime.rl.tasks import CopyTask
from runtime.rl.tokenizer import CharTokenizer
from runtime.rl.types import Append, Applied, EngineStats, ExchangeRequest, Lease, TrainerHello, WeightsRef

FLUSH_TOKENS = 32
GROUP = 8
STEPS, WARM_STEPS = 12, 3
SHAPES = ((64, 128), (256, 512))  # samples a step, tokens a sample
LEASES = (64, 2048)
TICKS = 2000


@record
class _Shape:
    samples: int
    tokens: int


class _Kept:
    """Verifiers that keep what they are given."""

    def __init__(self) -> None:
        self.items: list[RewardItem] = []

    def submit(self, items: Sequence[RewardItem]) -> None:
        self.items += items


class _Callers:
    """Everybody who calls flow."""

    def __init__(self, folder: Path, shape: _Shape) -> None:
        self.shape, self.kept, self.folder = shape, _Kept(), folder
        tokenizer = CharTokenizer()
        self.ledger = Ledger(folder / "ledger.db")
        self.flow = Flow(
            settings=FlowSettings(
                policy=StalenessPolicy(eta=1, prompts_per_step=shape.samples // GROUP, stale="mask"),
                responses_per_prompt=GROUP,
                max_new_tokens=shape.tokens,
            ),
            ledger=self.ledger,
            task=CopyTask(tokenizer, seed=1, min_length=9, max_length=9),
            tokenizer=tokenizer,
            rewards=self.kept,
            files=FlowFiles(metrics=folder / "m", samples=folder / "s", evaluations=folder / "e"),
        )
        self.flow.hello(TrainerHello(trainer="t", epoch=1, pid=1, complete=()))
        self.ref = self._publish(0)
        self.seq = 0
        self.spent: dict[str, list[float]] = {}

    def _publish(self, version: int) -> WeightsRef:
        ref = WeightsRef(lineage=0, version=version, path=str(version), digest=f"d{version}")
        self.flow.published(ref, 1)
        return ref

    def exchange(self, appends: tuple[Append, ...] = ()) -> tuple[Lease, ...]:
        """One exchange of a replica with room for a step."""
        self.seq += 1
        stats = EngineStats(slots=4 * self.shape.samples, decode_tokens_per_s=1e3, decode_running=self.shape.samples)
        request = ExchangeRequest(
            replica="r", epoch=1, seq=self.seq, appends=appends, version=self.ref.version, digest=self.ref.digest,
            stats=stats,
        )  # fmt: skip
        return self.flow.exchange(request).leases

    def lease(self) -> list[Lease]:
        """A step's samples."""
        held: list[Lease] = []
        while len(held) < self.shape.samples:
            held += self.exchange()
        return held

    def tick_us(self) -> float:
        """Of processor time, on average, with a step's samples leased."""
        self.lease()
        began = time.process_time()
        for _ in range(TICKS):
            self.flow.tick()
        return (time.process_time() - began) / TICKS * 1e6

    def step(self, step: int) -> None:
        """Everything of one optimiser step."""
        began, before = time.process_time(), self.ledger.commit_s
        held = self.lease()
        for start in range(0, self.shape.tokens, FLUSH_TOKENS):
            n = min(FLUSH_TOKENS, self.shape.tokens - start)
            self.exchange(tuple(self._append(lease, start, n) for lease in held))
        exchanged = self._mark("exchange", began)
        items, self.kept.items = self.kept.items, []
        self.flow.rewarded([RewardResult(sample=i.sample, reward=i.sample.member % 2) for i in items])
        rewarded = self._mark("reward", exchanged)
        answer = self.flow.next_batch("t", 1)
        assert answer.batch is not None
        built = self._mark("batch", rewarded)
        packed = pickle.dumps(answer, protocol=5)
        sent = self._mark("pack", built)
        pickle.loads(packed)
        self.spent.setdefault("batch_kb", []).append(len(packed) / 1e3)
        taken = self._mark("unpack", sent)
        self.flow.applied(Applied(step=step, ids_hash=answer.batch.ids_hash, trainer_epoch=1, metrics={}))
        applied = self._mark("applied", taken)
        self.ref = self._publish(step + 1)
        self._mark("published", applied)
        self.spent.setdefault("commit_wall_ms", []).append((self.ledger.commit_s - before) * 1e3)

    def _append(self, lease: Lease, start: int, n: int) -> Append:
        return Append(
            sample=lease.sample, epoch=lease.epoch, start=start, tokens=(5,) * n, logprobs=(-0.25,) * n,
            version=self.ref.version, finished="length" if start + n == self.shape.tokens else None,
        )  # fmt: skip

    def _mark(self, name: str, since: float) -> float:
        now = time.process_time()
        self.spent.setdefault(f"{name}_ms", []).append((now - since) * 1e3)
        return now


def run() -> dict[str, float]:
    """Medians over the steps after the first few."""
    figures: dict[str, float] = {}
    for samples, tokens in SHAPES:
        with TemporaryDirectory() as folder:
            callers = _Callers(Path(folder), _Shape(samples=samples, tokens=tokens))
            for step in range(STEPS):
                callers.step(step)
            callers.flow.close()
            for name, values in callers.spent.items():
                kept = sorted(values[WARM_STEPS:])
                figures[f"{samples}x{tokens}_{name}"] = kept[len(kept) // 2]
    for samples in LEASES:
        with TemporaryDirectory() as folder:
            callers = _Callers(Path(folder), _Shape(samples=samples, tokens=128))
            figures[f"{samples}_leases_tick_us"] = callers.tick_us()
            callers.flow.close()
    return figures
