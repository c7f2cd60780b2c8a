"""Flow's side of a replica's exchange: journal what came, end leases, answer with new ones."""

import math
from collections.abc import Sequence

from planner.record import record, replace
from runtime.errors import LedgerError
from runtime.rl.flow.evaluation import Evaluation, response_text
from runtime.rl.flow.granting import Granting
from runtime.rl.flow.replicas import Replica
from runtime.rl.flow.state import FlowState
from runtime.rl.rewards.items import RewardItem
from runtime.rl.types import Append, ExchangeReply, ExchangeRequest, FinishReason, Lease, SampleId

FORGET_LENGTH = 0.02  # weight of a new sample in the expected response length


@record
class Exchange:
    """The answer, and what has to happen once it is durable."""

    reply: ExchangeReply
    finished: tuple[RewardItem, ...] = ()
    changed: bool = False  # whether the trainer's turn may have come


class RolloutDesk:
    """Exchanges, lease expiry and departures. All changes of one call are one transaction."""

    def __init__(self, state: FlowState, evaluation: Evaluation, granting: Granting) -> None:
        self._state, self._evaluation, self._granting = state, evaluation, granting

    def exchange(self, request: ExchangeRequest, now_s: float) -> Exchange:
        """Handle one call. LedgerError: nothing was applied, the replica will repeat it."""
        state = self._state
        replica, replaced = state.replicas.meet(request.replica, request.epoch, now_s)
        if replica is None:
            return self._turn_away(request)
        if replaced is not None:
            with state.ledger.transaction():
                self.end_leases(replaced, counts=True)
                state.ledger.set_replica(state.replicas.forgotten_row(replaced.name, replaced.epoch))
        replica.seen_s = now_s
        if request.seq <= replica.seq:
            return self._again(replica, request)
        if replica.synced and request.seq > replica.seq + 1:
            return Exchange(reply=self._reply(replica, request, (), ack=replica.seq))
        if replica.synced:  # what it did before this flow saw it belongs to no step of ours
            state.spent.engine(replica.stats, request.stats)
        replica.observe(request, now_s)
        self._verify(replica)
        tokens = sum(len(a.tokens) for a in request.appends)
        revoked, probes = set(replica.revoked), self._evaluation.state()
        try:
            finished, leases = self._transact(replica, request, tokens, now_s)
        except LedgerError:
            replica.revoked = revoked
            self._evaluation.restore(probes)
            raise
        replica.seq, replica.received = request.seq, replica.received + tokens
        state.generated.add(now_s, tokens)
        changed = bool(request.appends or request.released)
        return Exchange(reply=self._reply(replica, request, leases), finished=tuple(finished), changed=changed)

    def _transact(
        self, replica: Replica, request: ExchangeRequest, tokens: int, now_s: float
    ) -> tuple[list[RewardItem], tuple[Lease, ...]]:
        """All changes of an exchange as one."""
        state, held = self._state, self._granting.holds(replica)  # before this flush ended some
        with state.ledger.transaction():
            finished = self._receive(replica, request)
            for sample in request.released:
                self._release(replica, sample)
            if not self._serves_known_weights(replica):
                self.end_leases(replica, counts=False)
            replica.warm(held, progressed=tokens > 0)
            leases = self._granting.grant(replica, request.seq, now_s)
            if tokens or request.appends or request.released or any(x.sample.group >= 0 for x in leases):
                row = state.replicas.row(replica)
                state.ledger.set_replica(replace(row, seq=request.seq, received=row.received + tokens))
        return finished, leases

    def expire(self, now_s: float) -> tuple[str, ...]:
        """End the leases of replicas silent for too long, and of incarnations nobody knows any more. Returns their names."""
        state, ledger = self._state, self._state.ledger
        silent = [
            r for r in state.replicas
            if now_s - r.seen_s > state.limits.lease_s and (state.held(r) or self._evaluation.holds(r.key))
        ]  # fmt: skip
        unknown = [key for key in ledger.book.held if state.replicas.get(*key) is None]
        if silent or unknown:
            with ledger.transaction():
                for replica in silent:
                    self.end_leases(replica, counts=True)
                for key in unknown:
                    self.end_leases(Replica(*key, now_s), counts=True)
        return (*(r.name for r in silent), *(name for name, _ in unknown))

    def expire_stalled(self, now_s: float) -> tuple[SampleId, ...]:
        """End the leases of samples that get no token though their replica speaks: whatever the reason, somebody else is
        to try. Returns them."""
        state = self._state
        self._evaluation.release_stalled(now_s)
        stalled = state.progress.stalled(now_s, state.stall_s)
        if stalled:
            with state.ledger.transaction():
                for sample in sorted(stalled):
                    row = state.ledger.book.samples.get(sample)
                    replica = None if row is None else state.replicas.get(row.replica, row.replica_epoch)
                    if row is not None and row.state == "LEASED" and replica is not None:
                        self._suspend(replica, sample, counts=True)
                    state.end_lease(sample)
        return stalled

    def end_leases(self, replica: Replica, *, counts: bool) -> None:
        """Suspend everything a replica holds. Inside a transaction."""
        for sample in sorted(self._state.held(replica)):
            if sample in self._state.held(replica):  # a group given up meanwhile takes its other samples along
                self._suspend(replica, sample, counts=counts)
        self._evaluation.release(replica.key)

    def settle_group(self, ordinal: int) -> None:
        """Give a group up when fewer than two of its samples can still be trained: a group of one teaches nothing. One of
        which nobody is left was given up before."""
        ledger = self._state.ledger
        alive = ledger.book.alive(ordinal)
        if 0 < len(alive) < 2 and all(r.state not in ("RESERVED", "APPLIED") for r in alive):
            self._state.give_up(ordinal, "group_lost")

    # Receiving

    def _receive(self, replica: Replica, request: ExchangeRequest) -> list[RewardItem]:
        finished: list[RewardItem] = []
        for append in request.appends:
            if append.sample.group < 0:
                ok, item = self._evaluation.append(append, replica.key)
                finished += [item] if item is not None else []
                if not ok:
                    self._evaluation.release(replica.key, (append.sample,))
                    replica.revoked.add(append.sample)
                continue
            item = self._journal(replica, request, append)
            finished += [item] if item is not None else []
        return finished

    def _journal(self, replica: Replica, request: ExchangeRequest, append: Append) -> RewardItem | None:
        ledger = self._state.ledger
        if why := self._distrust(request, append):
            ledger.refuse(why, len(append.tokens))
            if append.sample in self._state.held(replica):
                self._suspend(replica, append.sample, counts=True)
            replica.revoked.add(append.sample)
            return None
        finish = self._finish(append)
        outcome = ledger.append(append, replica=replica.name, replica_epoch=replica.epoch, finish=finish)
        if outcome == "ok":
            self._state.lease_versions[append.sample] = append.version
            self._state.progress.mark(append.sample, replica.seen_s)
            if finish is None:
                return None
            return self._finished(append.sample)
        if outcome == "gap":
            self._suspend(replica, append.sample, counts=True)
        elif outcome == "zombie" and append.sample not in self._state.held(replica):
            replica.revoked.add(append.sample)
        return None

    def _finish(self, append: Append) -> FinishReason | None:
        """Whether the response ends with this append, by the engine's word or by its tokens: a stream that was cut right
        after its last token must not be continued elsewhere."""
        if append.finished is not None or not append.tokens:
            return append.finished
        if append.tokens[-1] in self._state.tokenizer.eos_ids:
            return "eos"
        return "length" if append.start + len(append.tokens) >= self._state.settings.max_new_tokens else None

    def _finished(self, sample: SampleId) -> RewardItem:
        state = self._state
        state.end_lease(sample)
        length = state.ledger.book.samples[sample].length
        state.expected_tokens += FORGET_LENGTH * (length - state.expected_tokens)
        return self.reward_item(sample)

    def reward_item(self, sample: SampleId) -> RewardItem:
        """What the verifiers need of a DONE sample."""
        state = self._state
        row, group = state.ledger.book.samples[sample], state.ledger.book.groups[sample.group]
        return RewardItem(
            sample=sample,
            prompt=group.prompt,
            response=response_text(state, state.ledger.tokens(sample)),
            answer=group.answer,
            finish=row.finish or "length",
        )

    def _serves_known_weights(self, replica: Replica) -> bool:
        """Whether what it reports was ever published. If not (an update failed), its samples go on elsewhere."""
        version = -1 if replica.version is None else replica.version
        return replica.digest in self._state.ledger.book.digests.get(version, set())

    def _verify(self, replica: Replica) -> None:
        """Whether it serves a published generation of this lineage: only then it is given work."""
        book, lineage = self._state.ledger.book, self._state.ledger.lineage
        ref = None if replica.version is None else book.generations.get((lineage, replica.version))
        replica.verified = ref is not None and ref.digest == replica.digest

    def _distrust(self, request: ExchangeRequest, append: Append) -> str:
        """Why tokens may not be journalled, "" when they may: their version was published, if it is the one reported now with the
        right hash (any lineage's), and every logprob is a number: one that is not would take a whole step's gradient along."""
        published = self._state.ledger.book.digests.get(append.version, set())
        if not (request.digest in published if append.version == request.version else published):
            return "unverified"
        return "" if all(map(math.isfinite, append.logprobs)) else "not_finite"

    def _release(self, replica: Replica, sample: SampleId) -> None:
        if sample.group < 0:
            self._evaluation.release(replica.key, (sample,))
        elif sample in self._state.held(replica):
            # Given back in good order on a drain: no failed attempt. While it should serve, it is one.
            self._suspend(replica, sample, counts=replica.order == "serve")
            replica.revoked.discard(sample)

    def _suspend(self, replica: Replica, sample: SampleId, *, counts: bool) -> None:
        row = self._state.ledger.suspend(sample, counts=counts)
        self._state.end_lease(sample)
        replica.revoked.add(sample)
        if row.state == "DEAD_LETTER":
            self.settle_group(sample.group)

    # Answers

    def _reply(
        self, replica: Replica, request: ExchangeRequest, leases: Sequence[Lease], ack: int | None = None
    ) -> ExchangeReply:
        cancel = tuple(sorted(replica.revoked))
        replica.revoked = set()
        published, stored = self._state.published, self._state.stored
        return ExchangeReply(
            ack_seq=request.seq if ack is None else ack,
            order="drain" if self._state.closing and replica.order == "serve" else replica.order,
            leases=tuple(leases),
            cancel=cancel,
            weights=stored,
            direct=None if published == stored else published,
            channel=self._state.channel,
            slots=replica.allotted,
        )

    def _again(self, replica: Replica, request: ExchangeRequest) -> Exchange:
        """A flush that was applied, whose answer got lost: the same leases again, where they still stand."""
        return Exchange(reply=self._reply(replica, request, self._granting.granted_at(replica, request.seq)))

    def _turn_away(self, request: ExchangeRequest) -> Exchange:
        """A superseded or forgotten incarnation: its tokens are counted and refused, it is told to stop."""
        ledger = self._state.ledger
        appends = [a for a in request.appends if a.sample.group >= 0]
        if appends:
            with ledger.transaction():
                for append in appends:
                    ledger.append(append, replica=request.replica, replica_epoch=request.epoch)
        reply = ExchangeReply(ack_seq=0, order="stop", cancel=tuple(sorted({a.sample for a in request.appends})))
        return Exchange(reply=reply)
