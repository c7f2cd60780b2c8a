"""Flow's side of the trainer: settle at hello, reserve a batch, apply it, publish its weights.

RESERVE(k, ids) -> compute -> checkpoint(k) whose manifest holds hash(ids) -> APPLIED(k) -> publish.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import compress

from planner.record import record, replace
from runtime.errors import RefusedError
from runtime.policy.staleness import GroupView, ages
from runtime.rl.flow.figures import StepFigures, decode_figures
from runtime.rl.flow.state import FlowState
from runtime.rl.ledger import GroupRow, StepRow, Trajectory
from runtime.rl.train.advantage import group_advantages
from runtime.rl.types import (
    Applied,
    ChannelOffer,
    CheckpointMark,
    NextBatch,
    SampleId,
    TrainBatch,
    TrainerHello,
    TrainerWelcome,
    TrainOrder,
    TrainSample,
    WeightsRef,
)


@record
class AppliedStep:
    """A step that became durable, with its batch and the prompt of its lowest group."""

    row: StepRow
    batch: TrainBatch
    first: GroupRow | None


class TrainerDesk:
    """One trainer at a time; a call of an older epoch is refused."""

    def __init__(self, state: FlowState) -> None:
        self._state = state
        self._batch: TrainBatch | None = None
        self._unsaved = False  # steps applied since the newest checkpoint
        self._orders = _orders_of(state.ledger.book.meta.get("trainer_order"))
        epoch = state.ledger.book.meta.get("trainer_epoch")
        self.epoch: int | None = None if epoch is None else int(epoch)
        self.doing = "absent" if epoch is None else "training" if state.ledger.book.reserved else "waiting"
        self.waits_for = ""
        self.seen_s: float | None = None

    def hello(self, hello: TrainerHello) -> TrainerWelcome:
        """Settle what the trainer's checkpoints say, and tell it where to start.

        A reserved step with a complete checkpoint of the same hash is applied. If the newest applied step's checkpoint is
        gone, the steps after the newest one that is left are reserved again, same ids, in a new lineage. Checkpoints the
        ledger does not know (it was restored from a copy) are not used, and their versions are left behind in the same
        way. LedgerError when the tokens of those steps are no longer kept.
        """
        self._check(hello.epoch)
        ledger = self._state.ledger
        channel = "" if hello.channel is None else json.dumps(plain(hello.channel))
        if hello.epoch != self.epoch or ledger.book.meta.get("channel", "") != channel:
            with ledger.transaction():
                ledger.set_meta("trainer_epoch", str(hello.epoch))
                ledger.set_meta("channel", channel)
            self.epoch = hello.epoch
        marks = set(hello.complete)
        while (row := self._reserved()) is not None and self._mark(row) in marks:
            self._apply(row, {"settled": 1.0})
        load = self._newest_known(marks)
        start = 0 if load is None else load.step + 1
        ahead = any(m.lineage == ledger.lineage and m.step >= ledger.book.applied for m in marks)
        if start < ledger.book.applied or ahead:
            self._uncount(start)
            ledger.fork(start)
        self._batch, self._unsaved = None, False
        self._enter("waiting")
        return TrainerWelcome(
            load_step=None if load is None else load.step,
            lineage=ledger.lineage,
            published=ledger.stored,  # one that never came to disk is to be published again
            load_lineage=None if load is None or load.lineage == ledger.lineage else load.lineage,
        )

    def next_batch(self, epoch: int, *, ahead: bool = False) -> NextBatch:
        """A reserved batch (the same again until it is applied), or why there is none. `ahead`: the trainer still publishes,
        so it is told nothing but a batch, and is not said to wait."""
        self._check(epoch)
        order: TrainOrder = self._orders.get(epoch, "train")
        saves, leaving = self._unsaved, self._state.closing or self._state.limit_reached or order == "stop"
        if ahead and (leaving or order == "quiesce"):
            return NextBatch(order="wait")
        if leaving or order == "quiesce":
            # What is in no checkpoint yet is saved first; then the trainer asks again, or is gone.
            self._unsaved = False
            self._enter("training" if saves else "absent" if leaving else "quiesced")
            return NextBatch(order="stop" if leaving else "quiesce")
        row = self._reserved() or self._reserve()
        if row is None:
            if not ahead:
                self._enter("waiting")
            return NextBatch(order="wait", waits_for=self.waits_for)
        if self._batch is None or self._batch.step != row.step:
            self._batch = self._build(row)
        self._enter("training")
        return NextBatch(order="train", batch=self._batch)

    def applied(self, applied: Applied) -> AppliedStep | None:
        """APPLIED(k). None when that was known already. RefusedError for another batch or an older trainer."""
        self._check(applied.trainer_epoch)
        ledger = self._state.ledger
        if applied.step < ledger.book.applied:
            known = ledger.step_rows(ledger.book.applied - applied.step)[0]
            self._same_batch(known, applied.ids_hash)
            return None
        row = self._reserved()
        if row is None or row.step != applied.step:
            raise RefusedError(f"step {applied.step} is not reserved", got=applied.step, expected=str(self._state.step))
        self._same_batch(row, applied.ids_hash)
        result = self._apply(row, applied.metrics)
        self._unsaved = not applied.checkpointed
        self._enter("training")  # publishing
        return result

    def published(self, ref: WeightsRef, epoch: int, *, stored: bool = True) -> None:
        """Replicas are to serve a generation: it is on disk (`stored`), or went straight to the engines and will be on disk
        later, which is said by a second call at any time. RefusedError unless it is the version after the last applied
        step or known; versions never go backwards in a lineage, and one version has one hash."""
        self._check(epoch)
        ledger = self._state.ledger
        expected = (ledger.lineage, ledger.book.applied)
        late = ledger.book.generations.get((ref.lineage, ref.version)) == ref and ref.lineage == ledger.lineage
        if (ref.lineage, ref.version) != expected and not (stored and late):
            raise RefusedError("these are not the weights after the last applied step", got=(ref.lineage, ref.version),
                               expected=f"(lineage, version) {expected}")  # fmt: skip
        known = ledger.book.generations.get((ref.lineage, ref.version))
        if known is not None and known.digest != ref.digest:
            raise RefusedError("this version was published with another hash", got=ref.digest, expected=known.digest)
        if known is None or ledger.published != ref or (stored and ledger.stored != ref):
            with ledger.transaction():
                ledger.publish(ref, stored=stored)

    def order(self, epoch: int, order: TrainOrder) -> None:
        """What the trainer of that epoch gets when it asks next."""
        if self._orders.get(epoch) == order:
            return
        self._orders = {e: o for e, o in self._orders.items() if e >= epoch} | {epoch: order}
        with self._state.ledger.transaction():
            self._state.ledger.set_meta("trainer_order", json.dumps(self._orders))

    def forget(self, epoch: int) -> None:
        """That trainer is gone."""
        if epoch == self.epoch:
            self._enter("absent", seen=False)

    # Private

    def _uncount(self, start: int) -> None:
        """Steps from `start` on are made again: take back what they added to the run's figures."""
        ledger = self._state.ledger
        again = [decode_figures(s.figures) for s in ledger.step_rows(ledger.keep_steps + 1) if s.step >= start]
        with ledger.transaction():
            ledger.count("trained_samples", -sum(f.samples for f in again))
            ledger.count("two_versions", -sum(f.two_versions for f in again))

    def _check(self, epoch: int) -> None:
        if self.epoch is not None and epoch < self.epoch:
            raise RefusedError(
                "a newer trainer has taken over", got=f"epoch {epoch}", expected=f"epoch {self.epoch} or later"
            )

    def _enter(self, doing: str, *, seen: bool = True) -> None:
        now = self._state.clock()
        self.doing = doing
        if doing != "waiting":
            self.waits_for = ""
        if seen:
            self.seen_s = now
        self._state.trainer_waits.set(now, 1.0 if doing == "waiting" else 0.0)

    def _same_batch(self, row: StepRow, ids_hash: str) -> None:
        if row.ids_hash != ids_hash:
            raise RefusedError(f"step {row.step} was made from another batch", got=ids_hash, expected=row.ids_hash)

    def _mark(self, row: StepRow) -> CheckpointMark:
        return CheckpointMark(step=row.step, ids_hash=row.ids_hash, lineage=self._state.ledger.lineage)

    def _newest_known(self, marks: set[CheckpointMark]) -> CheckpointMark | None:
        """The checkpoint of the newest applied step that is left, as the ledger knows it."""
        steps = self._state.ledger.step_rows(self._state.ledger.keep_steps + 1)
        known = (CheckpointMark(step=s.step, ids_hash=s.ids_hash, lineage=s.lineage) for s in reversed(steps))
        return next((m for m in known if m in marks), None)

    def _reserved(self) -> StepRow | None:
        return self._state.ledger.book.reserved.get(self._state.step)

    def _reserve(self) -> StepRow | None:
        state, ledger, policy = self._state, self._state.ledger, self._state.policy
        selection = policy.select(self._views(), state.step)
        self.waits_for = selection.waits_for
        if not selection.groups and not selection.evicted:
            return None
        ids = tuple(r.id for g in selection.groups for r in ledger.book.alive(g))
        found = ledger.trajectories(ids)
        weights = {s: policy.token_weights(t.versions, state.step) for s, t in found.items()}
        with ledger.transaction():
            for ordinal in selection.evicted:
                state.give_up(ordinal, "stale")
            if not selection.groups:
                return None
            row = ledger.reserve(state.step, ids, eta=policy.eta, weights=weights)
        self._batch = self._build(row, found)
        return row

    def _views(self) -> list[GroupView]:
        book = self._state.ledger.book
        ordinals = book.complete if self._state.policy.stale == "mask" else list(book.selectable())
        return [self._state.view(g) for g in ordinals]

    def _build(self, row: StepRow, found: Mapping[SampleId, Trajectory] | None = None) -> TrainBatch:
        """The batch of a reserved step, from the ledger alone."""
        book = self._state.ledger.book
        found = self._state.ledger.trajectories(row.ids) if found is None else found
        by_group: dict[int, list[SampleId]] = {}
        for sample in row.ids:
            by_group.setdefault(sample.group, []).append(sample)
        policy = replace(self._state.policy, eta=row.eta)  # weights are of the bound they were decided under
        samples: list[TrainSample] = []
        for ordinal, members in sorted(by_group.items()):
            rewards = [book.samples[m].reward or 0.0 for m in members]
            advantages = group_advantages(rewards, normalise=self._state.settings.normalise_advantage)
            prompt = book.groups[ordinal].prompt_tokens
            for member, reward, advantage in zip(members, rewards, advantages, strict=True):
                made = found[member]
                samples.append(
                    TrainSample(
                        sample=member,
                        prompt_tokens=prompt,
                        tokens=made.tokens,
                        logprobs=made.logprobs,
                        versions=made.versions,
                        weights=policy.token_weights(made.versions, row.step),
                        reward=reward,
                        advantage=advantage,
                        finish=book.samples[member].finish or "length",
                    )
                )
        return TrainBatch(step=row.step, ids_hash=row.ids_hash, samples=tuple(samples))

    def _apply(self, row: StepRow, metrics: Mapping[str, float]) -> AppliedStep:
        state, ledger = self._state, self._state.ledger
        batch = self._batch if self._batch is not None and self._batch.step == row.step else self._build(row)
        figures = step_figures(batch)
        first = ledger.book.groups[batch.samples[0].sample.group] if batch.samples else None
        most = max((a for a, n in figures.ages.items() if n), default=None)
        with ledger.transaction():
            done = ledger.apply(row.step, figures=figures.encode(), metrics={**metrics, "time_unix_s": state.wall()})
            ledger.count("trained_samples", figures.samples)
            ledger.count("two_versions", figures.two_versions)
            if most is not None and most > int(ledger.book.meta.get("staleness_max", "-1")):
                ledger.set_meta("staleness_max", str(most))
        state.trained.add(state.clock(), figures.trained_tokens)
        self._batch = None
        return AppliedStep(row=done, batch=batch, first=first)


def step_figures(batch: TrainBatch) -> StepFigures:
    """What a batch adds to the run's figures."""
    counts: dict[int, int] = {}
    masked = 0
    for sample in batch.samples:
        whole = sample.weights.count(1.0) == len(sample.weights)
        trained = sample.versions if whole else tuple(compress(sample.versions, sample.weights))
        masked += len(sample.tokens) - len(trained)
        for age, n in ages(trained, batch.step).items():
            counts[age] = counts.get(age, 0) + n
    return StepFigures(
        ages=counts,
        trained_tokens=sum(counts.values()),
        masked_tokens=masked,
        samples=len(batch.samples),
        two_versions=sum(len(set(s.versions)) > 1 for s in batch.samples),
        reward_mean=mean([s.reward for s in batch.samples]),
    )


def plain(offer: ChannelOffer) -> dict[str, object]:
    """As JSON values."""
    return {k: getattr(offer, k) for k in offer.__dataclass_fields__}


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; 0 of nothing."""
    return sum(values) / len(values) if values else 0.0


def _orders_of(text: str | None) -> dict[int, TrainOrder]:
    """Orders by trainer epoch, as the ledger kept them over a restart."""
    return {} if text is None else {int(epoch): order for epoch, order in json.loads(text).items()}
