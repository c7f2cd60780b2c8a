"""The two-phase scheduler of AReaL-Hex (arXiv 2511.00796): partition, constrained training search, rollout MILP.

    min over (sigma, tau, D_T, D_I) of max(C_T, C_I)

A binary search on gamma, the share of compute given to training, cuts the graph; each side is planned on its own; where
training is the faster side it gets less, else more. Costs are means over a window of steps that grows from eta + 1 until
the plan's step time is stable. A round is free when its cut has been seen.
"""

from planner.columns import Columns
from planner.cost.model import Scored
from planner.judge import violations
from planner.placing import materialise
from planner.schedulers.areal_hex.partition import Counts, Partitioner
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.schedulers.areal_hex.training import best_trainer
from planner.search import Search
from planner.space import device_classes

_STABLE_ROUNDS = 20  # K: rounds without change that end the alternation
_FEW = 64  # partitions that are simply all visited
_WINDOWS = 8


def areal_hex(search: Search) -> None:
    """Offer plans until the alternation is stable, every partition has been visited or the search is halted."""
    problem = search.problem
    classes = device_classes(problem)
    partitioner = Partitioner(
        problem.cluster,
        classes,
        max_train=problem.capabilities.train_max_devices,
        in_force=problem.in_force,
    )
    rounds = _Rounds(search, partitioner)
    rounds.warm_start()
    if len(partitioner.grid) <= _FEW:
        rounds.visit_all()
        return
    rounds.alternate()
    rounds.climb()
    if search.best is None:
        rounds.visit_all()


class _Rounds:
    """One run of the alternation; remembers what each cut gave."""

    def __init__(self, search: Search, partitioner: Partitioner) -> None:
        self.search, self.partitioner = search, partitioner
        self.columns = Columns(search.cost)
        self.seen: dict[Counts, Scored | None] = {}
        self.no_training: set[Counts] = set()

    def warm_start(self) -> None:
        """The plan in force, if it still stands, is the first incumbent."""
        force = self.search.problem.in_force
        if force is not None and not violations(force, self.search.problem):
            self.search.offer(force)

    def visit(self, counts: Counts) -> Scored | None:
        """Plan both sides of a cut."""
        if counts in self.seen:
            return self.seen[counts]
        self.seen[counts] = found = self._plan(counts)
        return found

    def _plan(self, counts: Counts) -> Scored | None:
        cost, classes = self.search.cost, self.partitioner.classes
        given = self.partitioner.allot(counts)
        trainer = best_trainer(self.columns, classes, given, should_stop=self.search.pressed)
        if trainer is None:
            self.no_training.add(counts)
            self.search.evaluations += 1
            return None
        rest = self._rest(given, trainer.used)
        places = tuple(classes[i].place for i, n in enumerate(trainer.used) if n)
        rollout = best_rollout(
            cost,
            classes,
            rest,
            trainer=places,
            train_s=trainer.cost.train_s,
            mip_seconds=self.search.budget.mip_seconds,
        )
        if rollout is None:
            self.search.evaluations += 1
            return None
        plan = materialise(classes, trainer.stages, rollout.replicas, self.search.problem.in_force)
        return self.search.offer(plan)

    def _rest(self, given: tuple[int, ...], used: tuple[int, ...]) -> list[int]:
        """D_I, with what the trainer leaves of D_T where the cut has some of its kind roll out too. A kind that the cut
        gave to training alone stays there."""
        classes = self.partitioner.classes
        rolls = {c.place.kind for c, n in zip(classes, given, strict=True) if n < c.size}
        return [c.size - (u if c.place.kind in rolls else n) for c, n, u in zip(classes, given, used, strict=True)]

    def alternate(self) -> None:
        """Binary searches on gamma over growing windows."""
        window, before = self.search.problem.workload.eta + 1, float("inf")
        for _ in range(_WINDOWS):
            best = self._gamma_search(window)
            if best is None or self.search.halted():
                return
            mean = self._mean_step_s(best, window)
            if abs(mean - before) <= 0.01 * mean:
                return
            before, window = mean, window * 2

    def _gamma_search(self, window: int) -> Scored | None:
        low, high, gamma = 0.0, 1.0, 1.0
        best: Scored | None = None
        unchanged = 0
        while unchanged < _STABLE_ROUNDS and not self.search.halted():
            counts = self.partitioner.cut(gamma)
            if counts is None:
                return None
            found = self.visit(counts)
            # Where no trainer fits it needs more; where no replica does, training must give.
            more = counts in self.no_training
            if found is not None:
                more = found.prediction.train_s > found.prediction.rollout_s
            if more:
                low = gamma
            else:
                high = gamma
            gamma = (low + high) / 2
            unchanged += 1
            if found is not None and (
                best is None or self._mean_step_s(found, window) < self._mean_step_s(best, window) * (1 - 1e-9)
            ):
                best, unchanged = found, 0
        return best

    def _mean_step_s(self, scored: Scored, window: int) -> float:
        """Mean step over `window` steps from a cold start: the first batch has to be generated before any is trained."""
        p = scored.prediction
        return p.step_s + min(p.rollout_s, p.step_s) / window

    def climb(self) -> None:
        """Move single devices and whole machines across the cut while that helps."""
        best = self.search.best
        at = next((c for c, s in self.seen.items() if s is best), None)
        while at is not None and not self.search.halted():
            here = at
            at = None
            for counts in self.partitioner.neighbours(here):
                if self.search.halted():
                    return
                fresh = counts not in self.seen
                found = self.visit(counts)
                if fresh and found is not None and found is self.search.best:
                    at = counts

    def visit_all(self) -> None:
        """Every partition, most valuable first: the answer is the best over them all."""
        for counts in self.partitioner.all():
            if self.search.halted():
                return
            self.visit(counts)
