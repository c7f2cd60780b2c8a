"""What a scheduler is handed: a problem's costs, a budget, and the place where plans are offered."""

from collections.abc import Callable
from typing import Protocol

from planner.cost.host import within_host_memory
from planner.cost.model import CostModel, Scored
from planner.plan import Plan
from planner.problem import Budget, Problem
from planner.resolve import changed

_TIE = 1e-9


class Search:
    """Keeps the incumbent and the count of evaluations. One instance a call of `solve`."""

    def __init__(
        self,
        cost: CostModel,
        budget: Budget,
        *,
        should_stop: Callable[[], bool] = lambda: False,
        on_improved: Callable[[Scored], None] = lambda _: None,
    ) -> None:
        self.cost, self.budget = cost, budget
        self._should_stop, self._on_improved = should_stop, on_improved
        self.best: Scored | None = None
        self._seen: dict[tuple[str, ...], Scored] = {}  # the best of each way to train, by the kinds it trains on
        self.evaluations = 0
        self.stopped = False
        # Devices whose replica may not be left out where host memory is short.
        self._kept = frozenset(
            o.device
            for o in cost.problem.overrides
            if o.kind == "freeze" or (o.kind in ("pin", "keep") and o.role == "rollout")
        )

    @property
    def problem(self) -> Problem:
        """The problem being solved."""
        return self.cost.problem

    def halted(self) -> bool:
        """Whether to return what there is. Never before there is an incumbent: a stop still gets an answer."""
        if (self._should_stop() or self.evaluations >= self.budget.evaluations) and self.best is not None:
            self.stopped = True
        return self.stopped

    def pressed(self) -> bool:
        """Whether to be content with the first that fits: to be asked where finding an incumbent takes long."""
        return self._should_stop()

    def offer(self, plan: Plan) -> Scored | None:
        """Score a valid plan and keep it if it is the best so far; None when it does not fit."""
        self.evaluations += 1
        if self.problem.cluster.host_memory_bytes:
            plan = within_host_memory(self.cost.context, plan, kept=self._kept)
        scored = self.cost.evaluate(plan)
        if scored is not None:
            kinds = trained_on(self.cost, scored.plan)
            if kinds not in self._seen or self.better(scored, self._seen[kinds]):
                self._seen[kinds] = scored
        if scored is not None and (self.best is None or self.better(scored, self.best)):
            self.best = scored
            self._on_improved(scored)
        return scored

    def runner_up(self) -> Scored | None:
        """The best plan that trains on other devices than the incumbent does, as far as the search has seen."""
        if self.best is None:
            return None
        mine = trained_on(self.cost, self.best.plan)
        others = [s for kinds, s in self._seen.items() if kinds != mine]
        return min(others, key=lambda s: s.prediction.step_s, default=None)

    def better(self, new: Scored, old: Scored) -> bool:
        """Shorter step, net of what switching costs; among equals fewer devices that change role, C_T <= C_I, then the
        shorter rollout."""
        a, b = new.prediction, old.prediction
        if self.problem.switch_s > 0 and self.problem.in_force is not None:
            net, other = self.net_tokens_per_s(new), self.net_tokens_per_s(old)
            if abs(net - other) > _TIE * other:
                return net > other
        if abs(a.step_s - b.step_s) > _TIE * b.step_s:
            return a.step_s < b.step_s
        left = (self.moved(new.plan), a.train_s > a.rollout_s * (1 + _TIE))
        right = (self.moved(old.plan), b.train_s > b.rollout_s * (1 + _TIE))
        if left != right:
            return left < right
        return a.rollout_s < b.rollout_s * (1 - _TIE)

    def net_tokens_per_s(self, scored: Scored) -> float:
        """Tokens/s over the switch horizon, less the production that devices lose when they change placement."""
        p = self.problem
        rate = scored.prediction.tokens_per_s
        if p.in_force is None or p.switch_s == 0 or not p.cluster.devices:
            return rate
        lost_s = len(changed(scored.plan, p.in_force, p)) * p.switch_s
        return rate * max(0.0, 1 - lost_s / (len(p.cluster.devices) * p.switch_horizon_s))

    def to_beat_s(self) -> float:
        """No plan with a longer step than this is better than the incumbent; infinite before there is one. With a cost of
        switching that is more than the incumbent's own step: a slower plan nearer to the one in force may be worth more."""
        if self.best is None:
            return float("inf")
        net = self.net_tokens_per_s(self.best)
        return self.best.prediction.step_s * self.best.prediction.tokens_per_s / net if net > 0 else float("inf")

    def moved(self, plan: Plan) -> int:
        """Devices whose role is not that of the plan in force."""
        force = self.problem.in_force
        if force is None:
            return 0
        ids = (d.id for d in self.problem.cluster.devices)
        return sum(plan.role_of(d) != force.role_of(d) for d in ids)


def trained_on(cost: CostModel, plan: Plan) -> tuple[str, ...]:
    """Kinds of the devices that train, one entry a device."""
    train = plan.train
    return tuple(sorted(cost.places[d].kind for d in train.devices)) if train is not None else ()


class Scheduler(Protocol):
    """Offers plans to the search until it is done or halted."""

    def __call__(self, search: Search) -> None: ...
