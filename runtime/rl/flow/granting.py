"""Which samples a replica is given: admission, the staleness rule and dispatch over the ledger's book, and evaluation's share."""

import math

from planner.record import replace
from runtime.policy import dispatch
from runtime.policy.dispatch import Home
from runtime.policy.staleness import GroupView
from runtime.rl.flow.evaluation import Evaluation
from runtime.rl.flow.homes import Homes
from runtime.rl.flow.replicas import Replica
from runtime.rl.flow.state import FlowState
from runtime.rl.ledger import GroupRow
from runtime.rl.types import Lease, SampleId

REFILL_S = 0.3  # from one exchange of a replica to the answer of the next, until it has told how long that takes
FRESH = 1 / 3  # of a lease period: a replica silent for longer is not counted on


class Granting:
    """Gives leases, of training and evaluation."""

    def __init__(self, state: FlowState, evaluation: Evaluation) -> None:
        self._state, self._evaluation = state, evaluation
        self._groups: dict[int, GroupView] = {}
        self._verdicts: dict[int, bool] = {}

    def grant(self, replica: Replica, seq: int, now_s: float) -> tuple[Lease, ...]:
        """Leases that answer flush `seq` of a replica; none for one that is not to be given work. Inside a transaction."""
        if not self._routable(replica):
            return ()
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

    def granted_at(self, replica: Replica, seq: int) -> tuple[Lease, ...]:
        """Leases that answered flush `seq` and still stand: for a replica that did not get the answer."""
        book = self._state.ledger.book
        mine = sorted(s for s in self._state.held(replica) if book.samples[s].lease_seq == seq)
        leases = (self._lease_of(s, book.samples[s].epoch) for s in mine)
        return (*leases, *self._evaluation.granted_at(replica.key, seq))

    def holds(self, replica: Replica) -> int:
        """Samples it holds, for training and evaluation."""
        return len(self._state.held(replica)) + self._evaluation.holds(replica.key)

    def _routable(self, replica: Replica) -> bool:
        return replica.order == "serve" and replica.verified and not self._state.closing

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
