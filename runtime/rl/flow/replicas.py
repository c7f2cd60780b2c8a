"""The replicas flow knows: incarnations, orders, reported weights, measured speed."""

from collections.abc import Iterator, Mapping

from planner.record import replace
from runtime.policy.dispatch import ReplicaLoad, SpeedModel, first_ramp, next_ramp
from runtime.rl.ledger import Ledger, ReplicaRow
from runtime.rl.types import EngineStats, ExchangeRequest, ReplicaOrder, ReplicaStatus, SampleId


class Replica:
    """One incarnation of a replica. Levels only; what must survive is in the ledger's ReplicaRow."""

    def __init__(self, name: str, epoch: int, seen_s: float) -> None:
        self.name, self.epoch = name, epoch
        self.order: ReplicaOrder = "serve"
        self.seq = 0  # last flush applied
        self.synced = False  # whether it has exchanged since this flow opened the ledger
        self.seen_s = seen_s
        self.version: int | None = None
        self.digest: str | None = None
        self.verified = False  # reports a published generation of this lineage with its hash
        self.stats = EngineStats()
        self.speed = SpeedModel()
        self.ramp = 0
        self.allotted: int | None = None  # slots that the plan gives it
        self.pid = 0
        self.refill_s: float | None = None  # from one of its exchanges to the answer of the next
        self.received = 0  # tokens that arrived from it
        self.revoked: set[SampleId] = set()  # leases taken away that it has not been told of

    @property
    def key(self) -> tuple[str, int]:
        """Name and incarnation, as in the ledger."""
        return self.name, self.epoch

    @property
    def slots(self) -> int:
        """Samples it may decode at once; 0 until it told its limit. What it was just allotted counts before it knows."""
        return self.stats.slots if self.allotted is None else min(self.stats.slots, self.allotted)

    def observe(self, request: ExchangeRequest, now_s: float) -> None:
        """Take over the levels of an exchange."""
        self.seen_s, self.synced = now_s, True
        self.version, self.digest, self.stats, self.pid = request.version, request.digest, request.stats, request.pid
        self.refill_s = request.refill_s
        self.speed = self.speed.observe(request.stats.decode_running, request.stats.decode_tokens_per_s)
        if self.ramp == 0 and self.slots:
            self.ramp = first_ramp(self.slots)

    def load(self, leased: int) -> ReplicaLoad:
        """What dispatch needs to know."""
        return ReplicaLoad(
            slots=self.slots,
            leased=leased,
            kv_used_share=self.stats.kv_used_share,
            speed=self.speed,
            ramp=self.ramp,
        )

    def warm(self, leased: int, *, progressed: bool) -> None:
        """Let it hold more after an exchange with measured progress."""
        self.ramp = next_ramp(self.load(leased), progressed=progressed)

    def status(self, leased: int, now_s: float) -> ReplicaStatus:
        """For the screen."""
        return ReplicaStatus(
            replica=self.name,
            epoch=self.epoch,
            order=self.order,
            version=self.version,
            digest=self.digest,
            verified=self.verified,
            leased=leased,
            stats=self.stats,
            last_exchange_age_s=now_s - self.seen_s,
            unflushed_tokens=max(0, self.stats.decoded_tokens - self.received),
            pid=self.pid,
            allotted=self.allotted,
        )


class Replicas:
    """The newest living incarnation of every replica name."""

    def __init__(self, ledger: Ledger, now_s: float) -> None:
        """From the ledger: each is given a whole lease period to show up again."""
        self._ledger = ledger
        self._current: dict[str, Replica] = {}
        self._allotted: Mapping[str, int] = {}
        for row in sorted(ledger.book.replicas.values(), key=lambda r: r.epoch):
            self._current.pop(
                row.replica, None
            )  # a newer incarnation supersedes the older, even when it is gone itself
            if not row.forgotten:
                self._current[row.replica] = _restored(row, now_s)

    def __iter__(self) -> Iterator[Replica]:
        return iter(list(self._current.values()))

    def __len__(self) -> int:
        return len(self._current)

    def get(self, name: str, epoch: int) -> Replica | None:
        """The incarnation, if it is the newest and not forgotten."""
        replica = self._current.get(name)
        return replica if replica is not None and replica.epoch == epoch else None

    def meet(self, name: str, epoch: int, now_s: float) -> tuple[Replica | None, Replica | None]:
        """The replica of an incarnation, made when it is new, and the older one it replaces. (None, None) when the
        incarnation is superseded or forgotten."""
        known = self._current.get(name)
        if known is not None and known.epoch == epoch:
            return known, None
        row = self._ledger.book.replicas.get((name, epoch))
        last = max((e for n, e in self._ledger.book.replicas if n == name), default=-1)
        if epoch < max(last, -1 if known is None else known.epoch) or (row is not None and row.forgotten):
            return None, None
        replica = Replica(name, epoch, now_s) if row is None else _restored(row, now_s)
        replica.allotted = self._allotted.get(name)
        self._current[name] = replica
        return replica, known

    def allot(self, slots: Mapping[str, int]) -> None:
        """Slots by the replica's name, in place of all that was said before; those not named have their own limit."""
        self._allotted = dict(slots)
        for replica in self:
            replica.allotted = self._allotted.get(replica.name)

    def drop_ghosts(self, now_s: float, after_s: float) -> None:
        """Forget, in memory only, those known from the ledger alone that never spoke since it was opened: they ended with
        whoever ran them. One that does speak after all is taken up again."""
        for replica in self:
            if not replica.synced and now_s - replica.seen_s > after_s and replica.key not in self._ledger.book.held:
                self.drop(replica.name)

    def drop(self, name: str) -> None:
        """Forget the current incarnation in memory."""
        self._current.pop(name, None)

    def row(self, replica: Replica) -> ReplicaRow:
        """What the ledger should remember of it now."""
        return ReplicaRow(
            replica=replica.name, epoch=replica.epoch, seq=replica.seq, received=replica.received, order=replica.order
        )

    def forgotten_row(self, name: str, epoch: int) -> ReplicaRow:
        """The ledger's memory of an incarnation, marked as forgotten."""
        known = self.get(name, epoch)
        if known is not None:
            return replace(self.row(known), forgotten=True)
        row = self._ledger.book.replicas.get((name, epoch), ReplicaRow(replica=name, epoch=epoch))
        return replace(row, forgotten=True)


def _restored(row: ReplicaRow, now_s: float) -> Replica:
    """A replica as the ledger remembers it."""
    replica = Replica(row.replica, row.epoch, now_s)
    replica.seq, replica.received, replica.order = row.seq, row.received, _order(row.order)
    return replica


def _order(word: str) -> ReplicaOrder:
    return "drain" if word == "drain" else "stop" if word == "stop" else "serve"
