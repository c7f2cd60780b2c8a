"""A flow with a clock in hand, and the words of everybody who calls it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.policy.staleness import StalenessPolicy
from runtime.rl.flow import Flow, FlowFiles, FlowSettings
from runtime.rl.flow.open import kept_steps
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
    NextBatch,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    WeightsRef,
)

EOS = 1
SLOTS = 16


class Desk:
    """A flow with its callers' words ready to hand."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.now, self.changes = folder, 100.0, 0
        self.items: list[RewardItem] = []
        self.longest_prompt = settings.pop("longest_prompt", 2)
        self.keep_steps = kept_steps(settings.pop("checkpoint_every", 1))
        self.settings = FlowSettings(
            **{
                "policy": StalenessPolicy(eta=settings.pop("eta", 1), prompts_per_step=2, stale="mask"),
                "responses_per_prompt": 2,
                "max_new_tokens": 6,
                **settings,
            }
        )
        self.seqs: dict[tuple[str, int], int] = {}
        self.weights: dict[str, WeightsRef] = {}
        self.flow = self.open()

    def open(self) -> Flow:
        tokenizer = CharTokenizer()
        return Flow(
            settings=self.settings,
            ledger=Ledger(self.folder / "ledger.db", keep_steps=self.keep_steps),
            task=CopyTask(tokenizer, seed=3, min_length=2, max_length=self.longest_prompt),
            tokenizer=tokenizer,
            rewards=self,
            files=FlowFiles(
                metrics=self.folder / "metrics.jsonl",
                samples=self.folder / "samples.jsonl",
                evaluations=self.folder / "evaluations.jsonl",
            ),
            clock=lambda: self.now,
            wall=lambda: 1e9 + self.now,
            on_change=self.changed,
        )

    def reopen(self) -> None:
        self.flow.close()
        self.flow = self.open()

    def wait(self, seconds: float) -> None:
        """Let time pass as in a run: the host ticks about once a second."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            self.flow.tick()

    def changed(self) -> None:
        self.changes += 1

    def submit(self, items: Sequence[RewardItem]) -> None:
        self.items += items

    def hello(self, epoch: int = 1, complete: tuple[CheckpointMark, ...] = ()) -> TrainerWelcome:
        return self.flow.hello(TrainerHello(trainer="t", epoch=epoch, pid=1, complete=complete))

    def publish(self, version: int, *, digest: str = "", epoch: int = 1, lineage: int = 0) -> WeightsRef:
        ref = WeightsRef(lineage=lineage, version=version, path=f"w{version}", digest=digest or f"d{lineage}.{version}")
        self.flow.published(ref, epoch)
        return ref

    def start(self) -> None:
        self.hello()
        self.publish(0)

    def request(self, replica: str = "a", epoch: int = 1, **changes: Any) -> ExchangeRequest:
        weights = self.weights.get(replica)
        key = (replica, epoch)
        self.seqs[key] = changes.pop("seq", self.seqs.get(key, 0) + 1)
        return ExchangeRequest(
            **{
                "replica": replica,
                "epoch": epoch,
                "seq": self.seqs[key],
                "version": None if weights is None else weights.version,
                "digest": None if weights is None else weights.digest,
                "stats": EngineStats(slots=SLOTS, running=2, decode_tokens_per_s=20.0, decode_running=2.0),
                **changes,
            }
        )

    def exchange(self, replica: str = "a", epoch: int = 1, **changes: Any) -> ExchangeReply:
        reply = self.flow.exchange(self.request(replica, epoch, **changes))
        if reply.weights is not None:
            self.weights[replica] = reply.weights
        return reply

    def serve(self, replica: str = "a", epoch: int = 1) -> tuple[Lease, ...]:
        """Load the weights, then take leases."""
        return self.exchange(replica, epoch).leases + self.exchange(replica, epoch).leases

    def answer(self, reward: float = 1.0) -> None:
        """All verifiers at once."""
        items, self.items = self.items, []
        self.flow.rewarded([RewardResult(sample=i.sample, reward=reward + i.sample.member) for i in items])

    def finish_all(self, leases: Sequence[Lease], version: int, replica: str = "a") -> tuple[Lease, ...]:
        """Answer every lease with two tokens, until a step's worth of groups is complete; returns new leases."""
        reply = self.exchange(replica, appends=tuple(whole(x, version) for x in leases))
        self.answer()
        return reply.leases

    def ask(self, epoch: int = 1) -> NextBatch:
        return self.flow.next_batch("t", epoch)

    def train(self, step: int, epoch: int = 1, *, checkpointed: bool = True, lineage: int = 0) -> TrainBatch:
        answer = self.ask(epoch)
        assert answer.batch is not None, answer
        assert answer.batch.step == step
        applied = Applied(
            step=step,
            ids_hash=answer.batch.ids_hash,
            trainer_epoch=epoch,
            metrics={"loss": 2.0},
            checkpointed=checkpointed,
        )
        self.flow.applied(applied)
        self.publish(step + 1, epoch=epoch, lineage=lineage)
        return answer.batch


def piece(lease: Lease, tokens: Sequence[int], version: int, start: int | None = None, **changes: Any) -> Append:
    return Append(
        sample=lease.sample, epoch=lease.epoch, start=len(lease.tokens) if start is None else start,
        tokens=tuple(tokens), logprobs=(-0.5,) * len(tokens), version=version, **changes,
    )  # fmt: skip


def whole(lease: Lease, version: int) -> Append:
    return piece(lease, [5, EOS], version, finished="eos")
