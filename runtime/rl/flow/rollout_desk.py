"""Flow's side of a replica's exchange: journal what came, end leases, answer with new ones."""

import math
from collections.abc import Sequence

from planner.record import record, replace
from runtime.errors import LedgerError
from runtime.policy import dispatch
from runtime.policy.dispatch import Home
from runtime.policy.staleness import GroupView
from runtime.rl.flow.evaluation import Evaluation, response_text
from runtime.rl.flow.homes import Homes
from runtime.rl.flow.replicas import Replica
from runtime.rl.flow.state import FlowState
from runtime.rl.ledger import GroupRow
from runtime.rl.rewards.items import RewardItem
from runtime.rl.types import Append, ExchangeReply, ExchangeRequest, FinishReason, Lease, SampleId

REFILL_S = 0.3  # from one exchange of a replica to the answer of the next, until it has told how long that takes
FRESH = 1 / 3  # of a lease period: a replica silent for longer is not counted on
FORGET_LENGTH = 0.02  # weight of a new sample in the expected response length


@record
class Exchange:
    """The answer, and what has to happen once it is durable."""

    reply: ExchangeReply
    finished: tuple[RewardItem, ...] = ()
    changed: bool = False  # whether the trainer's turn may have come


class RolloutDesk:
    """Exchanges, lease expiry and departures. All changes of one call are one transaction."""

    def __init__(self, state: FlowState, evaluation: Evaluation) -> None:
        self._state, self._evaluation = state, evaluation
        self._groups: dict[int, GroupView] = {}
        self._verdicts: dict[int, bool] = {}

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
        state, held = self._state, self.holds(replica)  # before this flush ended some
        with state.ledger.transaction():
            finished = self._receive(replica, request)
            for sample in request.released:
                self._release(replica, sample)
            if not self._serves_known_weights(replica):
                self.end_leases(replica, counts=False)
            replica.warm(held, progressed=tokens > 0)
            leases = self._grant(replica, request.seq, now_s) if self._routable(replica) else ()
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

    # Granting

    def _routable(self, replica: Replica) -> bool:
        return replica.order == "serve" and replica.verified and not self._state.closing

    def _grant(self, replica: Replica, seq: int, now_s: float) -> tuple[Lease, ...]:
        state, book = self._state, self._state.ledger.book
        admissible = state.admissible_groups()
        waiting = len(book.leasable) + admissible * state.settings.responses_per_prompt
        probes = self._grant_evaluation(replica, seq, waiting)
        load = self._load(replica)
        asking = [
            r for r in state.replicas
            if r is not replica and self._routable(r) and r.slots and r.synced
            and now_s - r.seen_s < state.limits.lease_s * FRESH
        ]  # fmt: skip
        others = [self._load(r) for r in asking]
        wanted = dispatch.grant(load, others, waiting=waiting)
        if wanted <= 0:
            return probes
        homes = Homes(book, replica.key, frozenset(r.key for r in asking))
        self._admit(wanted, admissible, homes)
        self._look_at_groups()
        found = self._candidates(replica, wanted, homes)
        strong = dispatch.is_strong(load, others)
        chosen = dispatch.choose([c for c, _ in found], wanted, strong=strong)
        leases = (self._lease(replica, found[index][1], seq) for index in chosen)
        return (*probes, *(lease for lease in leases if lease is not None))

    def _load(self, replica: Replica) -> dispatch.ReplicaLoad:
        """Its load, with work ahead of its free slots for those that end while its next exchange is answered."""
        load = replica.load(self.holds(replica))
        refill_s = REFILL_S if replica.refill_s is None else replica.refill_s
        rate = max(replica.stats.decode_tokens_per_s, load.tokens_per_s())
        return replace(load, ahead=dispatch.ahead(load.slots, rate, refill_s, self._state.expected_tokens))

    def _admit(self, wanted: int, admissible: int, homes: Homes) -> None:
        """Admit groups, lazily: as many as this grant and a choice among them need. What is left of groups that others decode
        does not count as long as a new group is due no later."""
        state, book = self._state, self._state.ledger.book
        theirs = [s for s in book.leasable if homes.of(s.group) is Home.ELSEWHERE]
        short = wanted - (len(book.leasable) - len(theirs))
        until = min((self._due(s.group) for s in theirs), default=-1)
        for _ in range(min(admissible, math.ceil(short / state.settings.responses_per_prompt))):
            if len(book.leasable) >= wanted and book.next_slot // state.policy.prompts_per_step > until:
                break
            item = state.task.prompt(book.frontier)
            group = GroupRow(
                ordinal=book.frontier,
                slot=book.next_slot,
                prompt_tokens=item.prompt_tokens,
                prompt=item.prompt,
                answer=item.answer,
            )
            state.ledger.admit(group, state.settings.responses_per_prompt)

    def _due(self, group: int) -> int:
        """Step at which a live group is due."""
        return self._state.ledger.book.groups[group].slot // self._state.policy.prompts_per_step

    def _candidates(self, replica: Replica, wanted: int, homes: Homes) -> list[tuple[dispatch.Candidate, SampleId]]:
        """Leasable samples this replica may decode, oldest first; of those left to others no more than it takes at most."""
        book = self._state.ledger.book
        found: list[tuple[dispatch.Candidate, SampleId]] = []
        theirs = 0
        for sample in book.leasable:
            if len(found) - theirs >= dispatch.WINDOW * wanted:
                break
            home = homes.of(sample.group)
            if home is Home.ELSEWHERE and theirs >= wanted:
                continue
            if sample in replica.revoked or not self._may_lease(replica, sample):
                continue
            theirs += home is Home.ELSEWHERE
            length = len(book.groups[sample.group].prompt_tokens) + book.samples[sample].length
            candidate = dispatch.Candidate(
                index=len(found), due=self._due(sample.group), length=length, group=sample.group, home=home
            )
            found.append((candidate, sample))
        return found

    def _look_at_groups(self) -> None:
        """What the staleness rule needs of all live groups, once for a grant."""
        state = self._state
        every = state.policy.stale == "wait"
        self._groups = {g: state.view(g) for g in state.ledger.book.selectable()} if every else {}
        self._verdicts = {}

    def _may_lease(self, replica: Replica, sample: SampleId) -> bool:
        """The rule's verdict on the sample's group; the same for all its samples until another lease is given."""
        state, group = self._state, sample.group
        if group not in self._verdicts:
            view = self._groups.get(group) or state.view(group)
            others = [v for g, v in self._groups.items() if g != group]
            version = -1 if replica.version is None else replica.version
            self._verdicts[group] = state.policy.may_lease(view, version, state.step, others)
        return self._verdicts[group]

    def _lease(self, replica: Replica, sample: SampleId, seq: int) -> Lease | None:
        state = self._state
        if not self._may_lease(replica, sample):  # an earlier lease of this answer may have changed that
            return None
        row = state.ledger.lease(sample, replica=replica.name, replica_epoch=replica.epoch, seq=seq)
        assert replica.version is not None
        state.lease_versions[sample] = replica.version
        state.progress.mark(sample, replica.seen_s)
        if sample.group in self._groups:
            self._groups[sample.group] = state.view(sample.group)
            self._verdicts = {}
        return self._lease_of(sample, row.epoch)

    def _lease_of(self, sample: SampleId, epoch: int) -> Lease:
        ledger = self._state.ledger
        row = ledger.book.samples[sample]
        return Lease(
            sample=sample,
            epoch=epoch,
            prompt_tokens=ledger.book.groups[sample.group].prompt_tokens,
            tokens=ledger.tokens(sample) if row.length else (),
            max_new_tokens=self._state.settings.max_new_tokens,
        )

    def _grant_evaluation(self, replica: Replica, seq: int, waiting: int) -> tuple[Lease, ...]:
        """Evaluation takes a small share of the slots, and none of a replica with a single slot while training waits."""
        self._evaluation.begin_if_due()
        load = replica.load(self.holds(replica))
        if replica.version is None or (load.slots < 2 and waiting):
            return ()
        free = max(0, load.cap() - load.leased)
        return self._evaluation.grant(replica.key, version=replica.version, slots=load.slots, free=free, seq=seq)

    def holds(self, replica: Replica) -> int:
        """Samples it holds, for training and evaluation."""
        return len(self._state.held(replica)) + self._evaluation.holds(replica.key)

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
        book = self._state.ledger.book
        mine = sorted(s for s in self._state.held(replica) if book.samples[s].lease_seq == request.seq)
        leases = [self._lease_of(s, book.samples[s].epoch) for s in mine]
        leases += self._evaluation.granted_at(replica.key, request.seq)
        return Exchange(reply=self._reply(replica, request, leases))

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
