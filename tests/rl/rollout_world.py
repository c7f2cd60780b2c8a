"""A replica's surroundings in virtual time: a toy engine, a flow that keeps the journal's rules, a line with a script.

Time moves when the engine works and when the loop waits, so a loop that spins never gets on.
"""

from collections.abc import Iterator, Sequence

from runtime.errors import RunError, UnreachableError, WeightsError
from runtime.rl.exchange import LoopTiming
from runtime.rl.pacing import KindPacing
from runtime.rl.protocols import EngineCapabilities
from runtime.rl.rollout import ReplicaLoop
from runtime.rl.types import (
    Append,
    EngineStats,
    ExchangeReply,
    ExchangeRequest,
    Lease,
    ReplicaOrder,
    SampleId,
    WeightsRef,
)


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        assert seconds >= 0
        self.now += seconds
        return False


def token_of(sample: SampleId, position: int) -> int:
    return (sample.group * 31 + sample.member * 7 + position * 3) % 97


def length_of(sample: SampleId) -> int:
    """The position of a sample's last token, so to say its EOS, plus one."""
    return 3 + (sample.group * 5 + sample.member * 11) % 60


class ToyEngine:
    """A rollout engine whose tokens are a formula. Each step takes `step_s`."""

    capabilities = EngineCapabilities(name="toy", max_tp=1, max_pp=1, kv_on_update=("recompute",))

    def __init__(self, clock: VirtualClock, *, step_s: float = 0.05, slots: int = 8) -> None:
        self.clock, self.step_s, self.slots = clock, step_s, slots
        self.most = slots
        self.version: int | None = None
        self.digest: str | None = None
        self.broken: set[int] = set()
        self.fails = self.ended = False
        self.decoded = self.loads = 0
        self._leases: dict[SampleId, tuple[Lease, int]] = {}  # and its length so far

    def free_slots(self) -> int:
        return max(0, self.slots - len(self._leases))

    def limit(self, slots: int | None) -> None:
        self.slots = self.most if slots is None else min(slots, self.most)

    def add(self, leases: Sequence[Lease]) -> None:
        for lease in leases:
            had = self._leases.get(lease.sample)
            if had is None or had[0].epoch < lease.epoch:
                self._leases[lease.sample] = (lease, len(lease.tokens))

    def step(self) -> tuple[Append, ...]:
        if self.fails:
            raise RunError("out of memory")
        assert self.version is not None
        self.clock.now += self.step_s
        appends = []
        for sample, (lease, at) in list(self._leases.items())[: self.slots]:
            finished = at + 1 >= length_of(sample)
            if finished:
                del self._leases[sample]
            else:
                self._leases[sample] = (lease, at + 1)
            appends.append(append(sample, at, 1, epoch=lease.epoch, version=self.version, finished=finished))
        self.decoded += len(appends)
        return tuple(appends)

    def abort(self, samples: Sequence[SampleId]) -> tuple[SampleId, ...]:
        return tuple(s for s in samples if self._leases.pop(s, None) is not None)

    def held(self) -> tuple[SampleId, ...]:
        return tuple(self._leases)

    def load_weights(self, ref: WeightsRef) -> None:
        self.loads += 1
        self.version = self.digest = None
        if ref.version in self.broken:
            raise WeightsError("hash does not match", where=ref.path)
        self.version, self.digest = ref.version, ref.digest

    def check(self) -> None:
        if self.ended:
            raise RunError("the engine's process ended")

    def stats(self) -> EngineStats:
        running = min(len(self._leases), self.slots)
        return EngineStats(
            running=running, waiting=len(self._leases) - running, slots=self.slots, decoded_tokens=self.decoded
        )


def append(sample: SampleId, start: int, n: int, *, epoch: int = 1, version: int = 0, finished: bool = False) -> Append:
    return Append(
        sample=sample,
        epoch=epoch,
        start=start,
        tokens=tuple(token_of(sample, start + i) for i in range(n)),
        logprobs=tuple(-0.1 * (start + i) for i in range(n)),
        version=version,
        finished="eos" if finished else None,
    )


class Desk:
    """Flow as far as one replica sees it: journal, leases, numbered exchanges answered again when repeated."""

    def __init__(self, *, work: int = 0, slots: int = 8) -> None:
        self.weights: WeightsRef | None = WeightsRef(lineage=0, version=0, path="v0", digest="d0")
        self.order: ReplicaOrder = "serve"
        self.pending = [SampleId(g, m) for g in range(work) for m in range(2)]
        self.slots = slots
        self.epochs: dict[SampleId, int] = {}
        self.leased: set[SampleId] = set()
        self.finished: set[SampleId] = set()
        self.journal: dict[SampleId, list[int]] = {}
        self.versions: dict[SampleId, list[int]] = {}
        self.cancel: list[SampleId] = []
        self.refused = 0
        self.requests: list[ExchangeRequest] = []  # as they arrived
        self.applied: list[ExchangeRequest] = []
        self.answers: dict[int, ExchangeReply] = {}
        self.gone = False  # this incarnation has been given up

    @property
    def tokens(self) -> int:
        return sum(map(len, self.journal.values()))

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        self.requests.append(request)
        if self.gone:
            return ExchangeReply(ack_seq=0, order="stop")
        if request.seq in self.answers:
            return self.answers[request.seq]
        if request.seq != len(self.answers) + 1:
            return ExchangeReply(ack_seq=len(self.answers), order=self.order)
        self.applied.append(request)
        for a in request.appends:
            self._receive(a)
        for sample in request.released:
            if sample in self.leased:  # else it was cancelled while the release was on its way
                self.leased.discard(sample)
                self.pending.insert(0, sample)
        cancel, self.cancel = tuple(self.cancel), []
        serves = self.order == "serve" and self.weights is not None and request.digest == self.weights.digest
        leases = tuple(self._leases()) if serves else ()
        reply = ExchangeReply(ack_seq=request.seq, order=self.order, leases=leases, cancel=cancel, weights=self.weights)
        self.answers[request.seq] = reply
        return reply

    def _receive(self, a: Append) -> None:
        journal = self.journal.setdefault(a.sample, [])
        if a.sample not in self.leased or a.epoch != self.epochs[a.sample] or a.start != len(journal):
            self.refused += len(a.tokens)
            return
        journal += a.tokens
        self.versions.setdefault(a.sample, []).extend([a.version] * len(a.tokens))
        if a.finished:
            self.finished.add(a.sample)
            self.leased.discard(a.sample)

    def _leases(self) -> Iterator[Lease]:
        while self.pending and len(self.leased) < self.slots:
            yield self.lease(self.pending.pop(0))

    def lease(self, sample: SampleId) -> Lease:
        self.epochs[sample] = self.epochs.get(sample, 0) + 1
        self.leased.add(sample)
        tokens = tuple(self.journal.get(sample, ()))
        return Lease(sample=sample, epoch=self.epochs[sample], prompt_tokens=(1, 2), tokens=tokens, max_new_tokens=99)


class Line:
    """A client whose exchanges meet the fates of a script, in virtual time; when it ends all is well.

    ok: answered after 5 ms. slow: arrives at once, answered after 0.4 s. late: arrives and is answered after 0.4 s.
    lost: never arrives. answer_lost: arrives, no answer. down: known at once not to be there. mute: no answer, ever. fails: arrives, and
    flow fails on it.
    """

    def __init__(self, desk: Desk, clock: VirtualClock, fates: Sequence[str] = (), *, then: str = "ok") -> None:
        self.desk, self.clock, self.then = desk, clock, then
        self.fates = list(fates)
        self.out: list[Pending] = []
        self.most = 0

    def send(self, request: ExchangeRequest) -> "Pending":
        fate = self.fates.pop(0) if self.fates else self.then
        if fate == "down":
            raise UnreachableError("flow is not there")
        pending = Pending(self, request, fate)
        self.out = [p for p in self.out if not p.done()] + [pending]
        self.most = max(self.most, len({p.request.seq for p in self.out}))
        return pending


class Pending:
    def __init__(self, line: Line, request: ExchangeRequest, fate: str) -> None:
        self.line, self.request, self.fate = line, request, fate
        wait = {"ok": 0.005, "slow": 0.4, "late": 0.4, "lost": 0.05, "answer_lost": 0.05, "mute": 1e9, "fails": 0.005}[
            fate
        ]
        self.at = line.clock.now + wait
        self.reply = line.desk.exchange(request) if fate in ("ok", "slow", "answer_lost") else None

    def done(self) -> bool:
        return self.line.clock.now >= self.at

    def result(self, timeout_s: float) -> ExchangeReply:
        if not self.done():
            self.line.clock.now = min(self.at, self.line.clock.now + timeout_s)
        if not self.done():
            raise TimeoutError
        if self.fate in ("lost", "answer_lost"):
            raise UnreachableError("the line broke")
        if self.fate == "fails":
            raise RunError("flow failed on an exchange", got="IndexError")
        if self.reply is None:
            self.reply = self.line.desk.exchange(self.request)
        return self.reply


class World:
    """One replica, its engine, the line and flow."""

    def __init__(
        self,
        *,
        work: int = 0,
        fates: Sequence[str] = (),
        then: str = "ok",
        slots: int = 8,
        step_s: float = 0.05,
        timing: LoopTiming | None = None,
        pacing: KindPacing | None = None,
    ) -> None:
        self.clock, self.timing = VirtualClock(), timing or LoopTiming()
        self.engine = ToyEngine(self.clock, slots=slots, step_s=step_s)
        self.desk = Desk(work=work, slots=slots)
        self.line = Line(self.desk, self.clock, fates, then=then)
        self.loop = ReplicaLoop(
            self.engine,
            self.line,
            replica="r0",
            epoch=1,
            timing=self.timing,
            pacing=pacing,
            clock=self.clock,
            wait=self.clock.wait,
        )

    def run(self, until: float, *, finished: int | None = None) -> bool:
        """Turn until virtual time `until`, or until so many samples have finished; False when the replica has ended."""
        turns, longest = 0, max(self.timing.flush_tokens, self.timing.tail_tokens)
        while self.clock.now < until and len(self.desk.finished) != finished:
            if not self.loop.tick():
                return False
            assert self.loop._unflushed.longest <= longest, "what a crash can lose is bounded, whatever the line does"
            turns += 1
            assert turns < 200 + 400 * until, "the loop spins"
        return True

    def check_journal(self) -> None:
        for sample, tokens in self.desk.journal.items():
            assert tokens == [token_of(sample, i) for i in range(len(tokens))]
        for sample in self.desk.finished:
            assert len(self.desk.journal[sample]) == length_of(sample)
