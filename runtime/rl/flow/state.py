"""What the desks of flow share: settings, the ledger, the policy, the clock and what is known of the replicas."""

import json
from collections.abc import Callable
from pathlib import Path

from planner.record import record
from runtime.errors import RefusedError
from runtime.policy.staleness import GroupView, StalenessPolicy
from runtime.rl.flow.figures import Level, Rate, StepRate
from runtime.rl.flow.progress import Progress
from runtime.rl.flow.replicas import Replica, Replicas
from runtime.rl.flow.spent import Spent
from runtime.rl.ledger import Ledger
from runtime.rl.tasks.task import Task
from runtime.rl.tokenizer import Tokenizer
from runtime.rl.types import ChannelOffer, RunLimits, SampleId, WeightsRef

EPOCHS_PER_OPENING = 1_000_000  # lease epochs of evaluation samples, which no ledger remembers


@record
class FlowSettings:
    """The part of the configuration that flow acts on. Times in seconds."""

    policy: StalenessPolicy
    responses_per_prompt: int
    max_new_tokens: int
    normalise_advantage: bool = True
    limits: RunLimits = RunLimits()
    # A sample without a new token for longer loses its lease, though its replica speaks. Never before a lease would end.
    stall_s: float = 60.0
    reward_deadline_s: float = 60.0  # without any answer from the verifiers
    eval_every_steps: int = 0
    eval_prompts: int = 64
    eval_share: float = 0.125  # most of a replica's slots that evaluation may hold


@record
class FlowFiles:
    """Where flow writes what people read."""

    metrics: Path
    samples: Path
    evaluations: Path


class FlowState:
    """Shared by the desks; owned by `Flow`. Mutable, one thread."""

    def __init__(
        self,
        *,
        settings: FlowSettings,
        ledger: Ledger,
        task: Task,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
        wall: Callable[[], float],
        on_change: Callable[[], None],
    ) -> None:
        self.settings, self.ledger, self.task, self.tokenizer = settings, ledger, task, tokenizer
        self.clock, self.wall, self.on_change = clock, wall, on_change
        now = clock()
        self.replicas = Replicas(ledger, now)
        self.limits = settings.limits
        self.closing = False
        self.spent = Spent(ledger, clock)
        self.generated = Rate()
        self.trained = StepRate()
        self.trainer_waits = Level(now)
        self.admission_waits = Level(now)
        self.expected_tokens = settings.max_new_tokens / 2  # of one response
        self.lease_versions: dict[SampleId, int] = {}  # lowest version that may still add tokens to a leased sample
        self.progress = Progress((s for held in ledger.book.held.values() for s in held), now)
        self.usd_per_h: float | None = None
        with ledger.transaction():
            ledger.count("opened", 1)
        self.opening = ledger.book.counters["opened"]

    @property
    def policy(self) -> StalenessPolicy:
        """The staleness rule."""
        return self.settings.policy

    @property
    def published(self) -> WeightsRef | None:
        """The generation to serve."""
        return self.ledger.published

    @property
    def stored(self) -> WeightsRef | None:
        """The newest generation on disk: what joiners load, and everybody to whom a newer one did not come directly."""
        return self.ledger.stored

    @property
    def channel(self) -> ChannelOffer | None:
        """Where the trainer serves its weights directly, as it said in its hello."""
        text = self.ledger.book.meta.get("channel")
        return None if not text else ChannelOffer(**json.loads(text))

    @property
    def version(self) -> int:
        """Newest published version; 0 before the first."""
        ref = self.ledger.published
        return 0 if ref is None else ref.version

    @property
    def step(self) -> int:
        """The next step to train."""
        return self.ledger.book.applied

    @property
    def limit_reached(self) -> bool:
        """Whether every step of the run is applied."""
        return self.limits.steps is not None and self.step >= self.limits.steps

    @property
    def stall_s(self) -> float:
        """The stall limit in force."""
        return max(self.settings.stall_s, self.limits.lease_s)

    def admissible_groups(self) -> int:
        """How many more groups may be admitted now."""
        if self.closing or self.published is None:
            return 0
        capacity = self.policy.capacity(self.version)
        if self.limits.steps is not None:
            capacity = min(capacity, self.limits.steps * self.policy.prompts_per_step)
        return max(0, capacity - self.ledger.book.next_slot)

    def held(self, replica: Replica) -> set[SampleId]:
        """Samples leased to a replica, evaluation not counted."""
        return self.ledger.book.held.get(replica.key, set())

    def view(self, ordinal: int) -> GroupView:
        """A live group as the staleness rule sees it."""
        book = self.ledger.book
        started = book.started(ordinal)
        if self.policy.stale == "wait":
            bounds = [self._bound(m) for m in book.members[ordinal] if book.samples[m].state == "LEASED"]
            started = min([*bounds, *([] if started is None else [started])], default=None)
        return GroupView(
            ordinal=ordinal, slot=book.groups[ordinal].slot, complete=book.is_complete(ordinal), started=started
        )

    def extend_leases(self, seconds: float) -> None:
        """Nobody was heard for that long because nobody listened."""
        for replica in self.replicas:
            replica.seen_s += seconds
        self.progress.give_back(seconds)

    def end_lease(self, sample: SampleId) -> None:
        """Forget what is remembered of a lease."""
        self.lease_versions.pop(sample, None)
        self.progress.forget(sample)

    def give_up(self, ordinal: int, reason: str) -> None:
        """Give a group up; whoever still decodes for it is told to stop. Inside a transaction."""
        for row in self.ledger.book.alive(ordinal):
            self.end_lease(row.id)
            holder = self.replicas.get(row.replica, row.replica_epoch) if row.state == "LEASED" else None
            if holder is not None:
                holder.revoked.add(row.id)
        self.ledger.give_up(ordinal, reason)

    def check_daemon(self, epoch: int) -> None:
        """Refuse a daemon older than the newest that spoke; remember a newer one."""
        known = int(self.ledger.book.meta.get("daemon_epoch", "0"))
        if epoch < known:
            raise RefusedError(
                "a newer daemon has taken over this run", got=f"epoch {epoch}", expected=f"epoch {known} or later"
            )
        if epoch > known:
            with self.ledger.transaction():
                self.ledger.set_meta("daemon_epoch", str(epoch))

    def _bound(self, sample: SampleId) -> int:
        slot = self.ledger.book.groups[sample.group].slot
        return self.lease_versions.get(sample, self.policy.min_version(slot))
