"""What flow says of itself: one consistent reading, and which wait is blocking now."""

from collections.abc import Mapping

from planner.record import record
from runtime.rl.flow.figures import STEPS_WINDOW, Staleness, decode_figures, staleness, sum_ages
from runtime.rl.flow.granting import Granting
from runtime.rl.flow.rewarding import RewardDesk
from runtime.rl.flow.state import FlowState
from runtime.rl.flow.trainer_desk import TrainerDesk, mean
from runtime.rl.ledger.rows import STATES
from runtime.rl.types import FlowStatus

SLOW_REWARD_S = 5.0  # verifiers silent for longer are named as a wait


@record
class _Window:
    """What the last steps say."""

    age: Staleness
    reward_mean: float | None
    last_metrics: Mapping[str, float]


class StatusReader:
    """Reads state and ledger; keeps only the wait levels up to date."""

    def __init__(self, state: FlowState, granting: Granting, trainer: TrainerDesk, rewards: RewardDesk) -> None:
        self._state, self._granting, self._trainer, self._rewards = state, granting, trainer, rewards
        self._recent: tuple[tuple[int, int], _Window] | None = None  # of (lineage, steps applied)

    def observe(self, now_s: float) -> None:
        """Bring the share of rollout slots that stand idle for want of admission up to date."""
        self._state.admission_waits.set(now_s, self._idle_share())

    def read(self, now_s: float, problems: tuple[str, ...]) -> FlowStatus:
        """One reading."""
        state, book = self._state, self._state.ledger.book
        window = self._window()
        most = book.meta.get("staleness_max")
        trained_samples = book.counters["trained_samples"]
        self.observe(now_s)
        return FlowStatus(
            step=state.step,
            lineage=state.ledger.lineage,
            weights=state.published,
            eta=state.policy.eta,
            generated_tokens=book.counters["generated"],
            trained_tokens=book.trained,
            masked_tokens=book.masked,
            in_flight_tokens=book.in_flight,
            wasted_tokens={reason: n for reason, n in sorted(book.wasted.items()) if n},
            redone_tokens=book.counters["redone"],
            samples_by_state={s: book.states[s] for s in STATES},
            queue_groups=len(book.complete),
            admitted_groups=book.frontier,
            staleness_mean=window.age.mean,
            staleness_p95=window.age.p95,
            staleness_max=None if most is None else int(most),
            spans_two_versions_share=book.counters["two_versions"] / trained_samples if trained_samples else None,
            reward_mean=window.reward_mean,
            generated_tokens_per_s=state.generated.per_s(now_s),
            trained_tokens_per_s=state.trained.per_s(now_s),
            trainer_wait_share=state.trainer_waits.mean(now_s),
            admission_wait_share=state.admission_waits.mean(now_s),
            waits=self._waits(now_s, problems),
            replicas=tuple(r.status(self._granting.holds(r), now_s) for r in state.replicas),
            trainer_epoch=self._trainer.epoch,
            trainer_state=self._trainer.doing,
            trainer_age_s=None if self._trainer.seen_s is None else now_s - self._trainer.seen_s,
            finished=self._finished(),
            last_metrics=window.last_metrics,
            steps_done=state.step,
        )

    def _window(self) -> _Window:
        """What the last steps say; read from the ledger once a step."""
        key = (self._state.ledger.lineage, self._state.step)
        if self._recent is None or self._recent[0] != key:
            figures, metrics = self._state.ledger.last_steps(STEPS_WINDOW)
            rows = [decode_figures(f) for f in figures]
            window = _Window(
                age=staleness(sum_ages(rows)),
                reward_mean=mean([f.reward_mean for f in rows]) if rows else None,
                last_metrics={k: float(v) for k, v in metrics.items() if isinstance(v, int | float)},
            )
            self._recent = (key, window)
        return self._recent[1]

    def _finished(self) -> bool:
        """The step limit is reached and everything is settled, or the run was ended and nobody works any more."""
        state = self._state
        if state.limit_reached:
            return not state.ledger.book.reserved and state.stored is not None and state.stored.version == state.step
        return state.closing and not state.ledger.book.held and self._trainer.doing != "training"

    def _serving(self) -> list[int]:
        """Free slots of each replica that may be given work."""
        state = self._state
        return [
            max(0, r.slots - self._granting.holds(r)) for r in state.replicas
            if r.order == "serve" and r.verified and r.slots
        ]  # fmt: skip

    def _idle_share(self) -> float:
        state = self._state
        free = self._serving()
        slots = sum(r.slots for r in state.replicas if r.order == "serve" and r.verified)
        if not free or state.ledger.book.leasable or state.admissible_groups() or state.closing:
            return 0.0
        return sum(free) / slots

    def _waits(self, now_s: float, problems: tuple[str, ...]) -> str:
        """The wait that blocks now, in words, the one to look at first."""
        state = self._state
        if problems:
            return "; ".join(problems)
        if state.closing:
            held = sum(len(h) for h in state.ledger.book.held.values())
            return f"ending: {held} samples still leased" if held else ""
        silent = self._rewards.silent_s(now_s)
        if silent is not None and silent > SLOW_REWARD_S:
            return f"rewards: verifiers have owed {len(self._rewards)} answers for {silent:.0f} s"
        if state.published is None:
            return "rollout waits for the first weights" if self._trainer.doing != "absent" else "no trainer"
        if self._trainer.doing == "absent":
            return "" if state.limit_reached else "no trainer"
        if not any(r.verified and r.order == "serve" for r in state.replicas):
            return f"no replica serves verified weights (version {state.version})"
        if self._trainer.doing == "waiting" and self._trainer.waits_for:
            return f"trainer waits for {self._trainer.waits_for}"
        if self._idle_share() > 0:
            return f"rollout waits for admission until step {state.step} is trained"
        return ""
