"""The trainer in virtual time: its state, the step under way, and the first moment at which the rule had a batch for the next."""

import bisect

import numpy as np

from runtime.policy.staleness import Selection
from runtime.sim.decoding import INF
from runtime.sim.figures import Books, StepSeen
from runtime.sim.finishing import Finishing
from runtime.sim.granting import Granting
from runtime.sim.groups import RING, GroupTable, Ints
from runtime.sim.rules import FlowRules
from runtime.sim.speed import TrainerSpeed
from runtime.sim.windows import least_train_s


class Training:
    """`state`: training, waiting, updating or absent. `ends_s`: when the step under way ends; infinite where none is."""

    def __init__(
        self, rules: FlowRules, groups: GroupTable, granting: Granting, finishing: Finishing, books: Books
    ) -> None:
        self._rules, self._policy = rules, rules.policy
        self._groups, self._granting, self._finishing, self._books = groups, granting, finishing, books
        self.speed: TrainerSpeed | None = None
        self.slow = 1.0  # steps take so many times as long, from the next one on
        self.state, self.ends_s, self.waits_for = "absent", INF, ""
        self.began_s: float | None = None  # when the step under way began to compute; None: it does not
        self._since_s = 0.0  # when the trainer entered its state
        self._batch: list[int] | None = None  # rows reserved for the step under way
        self._tried = 0  # complete groups when the rule was last asked in vain

    def restart(self, groups: GroupTable) -> None:
        """Go on with other groups, of which none is reserved."""
        self._groups, self._batch, self._tried = groups, None, 0

    def enter(self, state: str, now_s: float) -> None:
        """From now on it does that."""
        self.state, self._since_s = state, now_s

    def set(self, speed: TrainerSpeed | None, slow: float, now_s: float) -> None:
        """A trainer is there from now on, or none. A step under way begins again with the same batch."""
        if self.began_s is not None:
            self._books.retrained_s += max(0.0, now_s - self.began_s)
            self._books.redone_steps += 1
        self.speed, self.slow, self.began_s, self.ends_s = speed, slow, None, INF
        self.enter("absent" if speed is None else "waiting", now_s)
        if speed is not None and self._batch is not None:
            self._compute(now_s, now_s)

    # The next step

    @property
    def may_start(self) -> bool:
        """Whether a step begins as soon as there is a batch."""
        return self.speed is not None and self._batch is None and self.state == "waiting"

    @property
    def needed(self) -> int:
        """Complete groups at which the rule is asked next."""
        return max(self._policy.prompts_per_step, self._tried + 1)

    def least_s(self) -> float:
        """Seconds that no step takes less than."""
        assert self.speed is not None
        return least_train_s(self.speed, self._rules, self._granting.version) * self.slow

    def try_step(self, now_s: float) -> tuple[int, ...]:
        """Begin the next step at the first moment up to now at which the rule had a batch for it; answers with the groups
        (ordinals) that it evicted then."""
        if not self.may_start:
            return ()
        self._finishing.settle()
        g, complete = self._policy.prompts_per_step, self._finishing.complete
        if len(complete) < g or complete[g - 1][0] > now_s:
            return ()
        count = self.needed
        while count <= len(complete):
            moment = max(complete[count - 1][0], self._since_s)
            if moment > now_s:
                return ()
            count = max(count, bisect.bisect_right(complete, moment, key=lambda c: c[0]))
            selection = self._selected(count)
            if selection.groups:
                self._reserve(selection.groups, moment, now_s)
            if selection.groups or selection.evicted:
                return selection.evicted
            self._tried, self.waits_for = count, selection.waits_for
            count += 1
        return ()

    def _selected(self, count: int) -> Selection:
        """The rule's answer when the first `count` groups are complete."""
        complete = self._finishing.complete[:count]
        views = [view for _, _, view in complete]
        if self._policy.stale != "mask":  # the rule for `mask` looks at complete groups only
            known = {row for _, row, _ in complete}
            g = self._groups
            others = np.flatnonzero(g.live & (g.started >= 0)).tolist()
            batch = set(self._batch or ())
            views += self._finishing.seen([r for r in others if r not in known and r not in batch], complete=False)
        return self._policy.select(views, self._granting.version)

    def _reserve(self, ordinals: tuple[int, ...], at_s: float, now_s: float) -> None:
        rows = self._finishing.take(ordinals)
        if self._policy.stale == "wait":
            self._granting.begun.subtract(self._groups.started[rows].tolist())
        self._batch, self._tried, self.waits_for = rows, 0, ""
        if at_s < now_s:
            self._books.correct(self.state, "training", now_s - at_s)
        self._compute(at_s, now_s)

    def _compute(self, at_s: float, now_s: float) -> None:
        assert self.speed is not None
        assert self._batch is not None
        g, rows = self._groups, np.array(self._batch)
        responses = g.tokens[rows].sum()
        tokens = float(responses + (g.prompt[rows] * g.members).sum())
        seconds = self.speed.seconds(tokens, float(g.sequence2[rows].sum())) * self.slow
        self.began_s, self.ends_s = at_s, max(at_s + seconds, now_s)
        self._books.late_s += max(0.0, now_s - at_s - seconds)
        self.enter("training", now_s)

    # The end of one

    def end(self) -> StepSeen:
        """The step under way is done: its figures are in the books, its groups gone."""
        assert self._batch is not None
        rows = np.array(self._batch)
        seen = self._trained(rows, self._granting.version)
        self._books.steps.append(seen)
        self._books.trained_tokens += seen.trained_tokens
        self._books.masked_tokens += seen.masked_tokens
        self._groups.release(rows)
        self._batch, self.began_s, self.ends_s = None, None, INF
        return seen

    def _trained(self, rows: Ints, step: int) -> StepSeen:
        """Weights, ages and counts of a batch, by the rule."""
        g = self._groups
        by_slot, starts = g.tokens[rows].sum(axis=0).tolist(), g.starts[rows].sum(axis=0).tolist()
        first = max(0, step - RING + 1)
        versions = [v for v in range(first, step + 1) if by_slot[v % RING]]
        weights = self._policy.token_weights(versions, step)
        ages = {step - v: by_slot[v % RING] for v, w in zip(versions, weights, strict=True) if w > 0}
        begun = step - g.started[rows]
        old = [v for v in range(first, step - self._policy.eta) if starts[v % RING]]
        assert self.began_s is not None
        return StepSeen(
            step=step,
            began_s=self.began_s,
            ended_s=self.ends_s,
            trained_tokens=sum(ages.values()),
            masked_tokens=sum(by_slot) - sum(ages.values()),
            ages=ages,
            group_age_mean=float(begun.mean()),
            group_age_max=int(begun.max()),
            samples_masked=sum(starts[v % RING] for v in old),
        )
