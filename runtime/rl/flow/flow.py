"""Flow: the data plane's only writer. It owns ledger, admission, staleness, dispatch and the queue to the trainer.

Synchronous and without any transport: every method is one call of a replica, the trainer, the verifiers or the daemon,
answers at once and never waits. The clock is given. Whoever hosts it makes calls one at a time, long-polls `next_batch` by
waiting for `on_change`, and calls `tick` about once a second.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from planner.errors import InvalidInput
from planner.record import replace
from runtime.rl.flow.evaluation import Evaluation
from runtime.rl.flow.granting import Granting
from runtime.rl.flow.records import JsonLines
from runtime.rl.flow.replicas import Replica
from runtime.rl.flow.report import metrics_row, sample_rows
from runtime.rl.flow.rewarding import RewardDesk
from runtime.rl.flow.rollout_desk import RolloutDesk
from runtime.rl.flow.state import FlowFiles, FlowSettings, FlowState
from runtime.rl.flow.status import StatusReader
from runtime.rl.flow.trainer_desk import TrainerDesk
from runtime.rl.ledger import Ledger
from runtime.rl.rewards.items import RewardClient, RewardItem, RewardResult
from runtime.rl.tasks.task import Task
from runtime.rl.tokenizer import Tokenizer
from runtime.rl.types import (
    Applied,
    ExchangeReply,
    ExchangeRequest,
    FlowStatus,
    NextBatch,
    ReplicaOrder,
    RunLimits,
    SampleId,
    TrainerHello,
    TrainerWelcome,
    TrainOrder,
    WeightsRef,
)

GHOST = 4  # lease periods after which a replica that only the ledger remembers is no longer shown
AWAY = 1 / 3  # of a lease period without a call: it was flow that stood still, not the replicas
_log = logging.getLogger(__name__)


class Flow:
    """One run's flow. Not thread-safe."""

    def __init__(
        self,
        *,
        settings: FlowSettings,
        ledger: Ledger,
        task: Task,
        tokenizer: Tokenizer,
        rewards: RewardClient,
        files: FlowFiles,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """From what the ledger holds. `clock` is monotonic seconds, `wall` unix seconds. `on_change` is called whenever
        the trainer's next answer may differ."""
        self._state = FlowState(
            settings=settings,
            ledger=ledger,
            task=task,
            tokenizer=tokenizer,
            clock=clock,
            wall=wall,
            on_change=on_change,
        )
        self._metrics, self._samples = JsonLines(files.metrics), JsonLines(files.samples)
        self._evaluation = Evaluation(self._state, JsonLines(files.evaluations))
        granting = Granting(self._state, self._evaluation)
        self._rollout = RolloutDesk(self._state, self._evaluation, granting)
        self._trainer = TrainerDesk(self._state)
        self._rewards = RewardDesk(rewards, deadline_s=settings.reward_deadline_s)
        self._status = StatusReader(self._state, granting, self._trainer, self._rewards)
        self._ticked_s = clock()
        self._catch_up()

    # Replicas

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        """One call of a replica. When it returns, everything up to `ack_seq` is on disk. LedgerError: nothing was
        acknowledged or leased; the replica keeps its flush and repeats it."""
        now = self.tick()
        with self._state.spent.part("exchange"):
            done = self._rollout.exchange(request, now)
            if done.finished:
                self._rewards.submit(done.finished, now)
            self._status.observe(now)
        if done.changed:
            self._state.on_change()
        return done.reply

    # Rewards

    def rewarded(self, results: Sequence[RewardResult]) -> None:
        """Answers of the verifiers. Second answers and answers for samples that are gone are ignored. LedgerError: none was
        taken, and they are asked for again."""
        now, ledger = self._state.clock(), self._state.ledger
        wanted = list({r.sample: r for r in reversed(results) if self._rewards.awaits(r.sample)}.values())
        with self._state.spent.part("reward"), ledger.transaction():
            for result in wanted:
                if result.sample.group < 0:
                    continue
                ledger.reward(result.sample, result.reward)
                if result.error:
                    ledger.count("reward_errors", 1)
                    _log.warning("verifier failed on sample %s: %s", result.sample, result.error)
        for result in results:
            waited_s = self._rewards.settle(result.sample, now)
            if waited_s is not None:
                self._state.spent.reward(waited_s)
        for result in wanted:
            if result.sample.group < 0:
                self._evaluation.rewarded(result)
        if wanted:
            self._state.on_change()

    # Trainer

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """A trainer's first call. RefusedError for an older epoch, LedgerError when its checkpoints are of no use."""
        before = self._state.step
        welcome = self._trainer.hello(hello)
        if self._state.step > before:
            self._catch_up()
        return welcome

    def next_batch(self, trainer: str, epoch: int, *, ahead: bool = False) -> NextBatch:
        """What the trainer does now; "wait" at once rather than after a while. `ahead`: it is publishing yet, and only a
        batch is of use to it."""
        del trainer
        self.tick()
        with self._state.spent.part("batch"):
            answer = self._trainer.next_batch(epoch, ahead=ahead)
        if answer.order == "stop":
            self._evaluation.abandon()
        return answer

    def applied(self, applied: Applied) -> None:
        """The step is made; `applied` says whether it is in a complete checkpoint. RefusedError for another batch or an older trainer."""
        with self._state.spent.part("applied"):
            result = self._trainer.applied(applied)
        if result is not None:
            if self._metrics.failed:
                self._write_missing()  # this step's line and those a full disk refused
            else:
                self._metrics.append(metrics_row(self._state, result.row, result.batch))
            if result.first is not None:
                self._samples.append(*sample_rows(self._state, result.batch, result.first))
        if self._state.limit_reached:
            self._evaluation.abandon()

    def published(self, ref: WeightsRef, epoch: int, stored: bool = True) -> None:
        """A generation is on disk (`stored`), or at the engines that take part in direct transfers."""
        with self._state.spent.part("published"):
            self._trainer.published(ref, epoch, stored=stored)
        self._evaluation.begin_if_due()

    # Daemon

    def set_order(self, daemon_epoch: int, replica: str, epoch: int, order: ReplicaOrder) -> None:
        """What a replica is told at its next exchange. An unknown incarnation is expected from now on."""
        self._state.check_daemon(daemon_epoch)
        known = self._expect(replica, epoch)
        if known is not None and known.order != order:
            known.order = order
            with self._state.ledger.transaction():
                self._state.ledger.set_replica(self._state.replicas.row(known))

    def expect_replica(self, daemon_epoch: int, replica: str, epoch: int) -> None:
        """An incarnation is being started; older ones of that name lose their leases."""
        self._state.check_daemon(daemon_epoch)
        self._expect(replica, epoch)

    def allot(self, daemon_epoch: int, slots: Mapping[str, int]) -> None:
        """How many samples the plan in force has each replica decode at once, by name; told whole, and to replicas with their
        next answer. Those that run beyond it end where they are."""
        self._state.check_daemon(daemon_epoch)
        if any(n < 1 for n in slots.values()):
            raise InvalidInput("a replica needs a slot", got=dict(slots), expected=">= 1 each")
        self._state.replicas.allot(slots)

    def forget_replica(self, daemon_epoch: int, replica: str, epoch: int, decoded_tokens: int | None = None) -> None:
        """An incarnation is gone for good: its samples go on elsewhere, and what it had decoded beyond the journal
        (`decoded_tokens` by its counter file) is redone. Repeating it changes nothing."""
        self._state.check_daemon(daemon_epoch)
        state = self._state
        known = state.replicas.get(replica, epoch)
        row = state.replicas.forgotten_row(replica, epoch)
        count = decoded_tokens is not None and not row.counted
        if known is None and not count and (replica, epoch) in state.ledger.book.replicas:
            return
        with state.ledger.transaction():
            if known is not None:
                self._rollout.end_leases(known, counts=known.order == "serve")
            if decoded_tokens is not None and count:
                received = row.received if known is None else known.received
                state.ledger.count("redone", max(0, decoded_tokens - received))
            state.ledger.set_replica(replace(row, counted=row.counted or count))
        if known is not None:
            state.replicas.drop(replica)
        self._status.observe(state.clock())
        state.on_change()

    def set_trainer_order(self, daemon_epoch: int, epoch: int, order: TrainOrder) -> None:
        """What the trainer of that epoch is told when it next asks: quiesce and stop come at a step boundary."""
        self._state.check_daemon(daemon_epoch)
        self._trainer.order(epoch, order)
        self._state.on_change()

    def forget_trainer(self, daemon_epoch: int, epoch: int) -> None:
        """That trainer is gone; a reserved step waits for the next one."""
        self._state.check_daemon(daemon_epoch)
        self._trainer.forget(epoch)

    def set_limits(self, daemon_epoch: int, limits: RunLimits) -> None:
        """When the run ends by itself."""
        self._state.check_daemon(daemon_epoch)
        self._state.limits = limits
        self._state.on_change()

    def set_cost(self, daemon_epoch: int, usd_per_h: float | None) -> None:
        """What the fleet costs now, for metrics.jsonl; None: no price is known."""
        self._state.check_daemon(daemon_epoch)
        self._state.usd_per_h = usd_per_h

    def finish(self, daemon_epoch: int | None = None) -> None:
        """End the run: nothing new is leased, replicas are told to drain, the trainer to stop at the step boundary,
        evaluation is abandoned. Everything stays in the ledger."""
        if daemon_epoch is not None:
            self._state.check_daemon(daemon_epoch)
        self._state.closing = True
        self._evaluation.abandon()
        self._state.on_change()

    def status(self) -> FlowStatus:
        """One consistent reading."""
        now = self._state.clock()
        problems = tuple(f.failed for f in (self._metrics, self._samples) if f.failed)
        return self._status.read(now, problems)

    def tick(self) -> float:
        """End leases of silent replicas and stuck samples, ask verifiers again. Returns the time. After a pause of its own
        flow gives everybody that time back first."""
        state, now = self._state, self._state.clock()
        away_s = now - self._ticked_s
        self._ticked_s = now
        if away_s > state.limits.lease_s * AWAY:
            state.extend_leases(away_s)
        expired = self._rollout.expire(now)
        for name in expired:
            _log.warning("replica %s was silent for %g s: its samples go on elsewhere", name, state.limits.lease_s)
        state.replicas.drop_ghosts(now, state.limits.lease_s * GHOST)
        stalled = self._rollout.expire_stalled(now)
        for sample in stalled:
            _log.warning("sample %s got no token for %g s: it goes on elsewhere", sample, state.stall_s)
        overdue = self._rewards.overdue(now)
        if overdue.repeated:
            _log.warning("verifiers were silent for %g s: %d items sent again", state.settings.reward_deadline_s,
                         len(overdue.repeated))  # fmt: skip
        if overdue.lost:
            self._lose(overdue.lost)
        self._status.observe(now)
        if expired or stalled or overdue.lost:
            state.on_change()
        return now

    def close(self) -> None:
        """Close the ledger."""
        self._state.ledger.close()

    # Private

    def _expect(self, name: str, epoch: int) -> Replica | None:
        state = self._state
        replica, replaced = state.replicas.meet(name, epoch, state.clock())
        if replica is None or (replaced is None and replica.key in state.ledger.book.replicas):
            return replica
        with state.ledger.transaction():
            if replaced is not None:
                self._rollout.end_leases(replaced, counts=True)
                state.ledger.set_replica(state.replicas.forgotten_row(replaced.name, replaced.epoch))
            state.ledger.set_replica(state.replicas.row(replica))
        return replica

    def _lose(self, samples: Sequence[SampleId]) -> None:
        ledger = self._state.ledger
        with ledger.transaction():
            for sample in sorted(s for s in ledger.book.unrewarded if s in samples):
                ledger.kill(sample, "reward_timeout")  # again for one whose group is given up by now: nothing happens
                ledger.count("reward_errors", 1)
                self._rollout.settle_group(sample.group)
        for sample in samples:
            self._rewards.drop(sample)
            self._evaluation.lose(sample)

    def _catch_up(self) -> None:
        """After a restart: verify again what has no reward, and write the lines a crash kept from metrics.jsonl."""
        state = self._state
        items: list[RewardItem] = [self._rollout.reward_item(s) for s in sorted(state.ledger.book.unrewarded)]
        self._rewards.submit(items, state.clock())
        self._write_missing()

    def _write_missing(self) -> None:
        """Lines of applied steps that metrics.jsonl lacks at its end."""
        state = self._state
        last = self._metrics.last()
        written = int(str(last.get("step", -1))) if last is not None else -1
        for row in state.ledger.step_rows(max(0, min(state.step - 1 - written, 1000))):
            self._metrics.append(metrics_row(state, row, None))
