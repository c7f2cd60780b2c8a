"""A whole run: a plan carried out in virtual time while machines come, go and slow down. Always labelled simulated.

What becomes of a change of the fleet is one of three policies. `static`: what lost a device waits until the device is back.
`checkpoint-restart`: any change ends everything; after a while the run goes on from its last checkpoint, planned anew.
`elastic`: as hexctl does it: losses are repaired at once (`planner.repair`), joins coalesced by the runtime's own trigger
rule, and the full plan follows; samples go on elsewhere, the trainer moves at a step boundary.
"""

import heapq
from collections.abc import Callable

from planner.cluster import Device
from planner.plan import Plan, Prediction
from planner.problem import Problem
from planner.record import replace
from planner.repair import repair
from planner.solution import Infeasible
from runtime.core.needing import Need
from runtime.core.solved import PlanCause, shape
from runtime.core.trigger import trigger_words
from runtime.sim.churn import Change
from runtime.sim.flow import SimulatedFlow
from runtime.sim.options import Options
from runtime.sim.physics import flow_rules
from runtime.sim.plans import Plans
from runtime.sim.standing import Standing
from runtime.sim.timeline import Timeline
from runtime.sim.turns import Turns
from runtime.sim.watching import Watch

INF = float("inf")


class Run:
    """`go` carries it out. `flow` and `plans` say how it went."""

    def __init__(self, problem: Problem, plan: Plan | None, options: Options, timeline: Timeline | None = None) -> None:
        self.problem, self.options, self.timeline = problem, options, timeline
        self.rules = flow_rules(
            problem,
            stale=options.stale,
            prompt=options.prompt,
            response=options.response,
            windows=options.windows,
            steps=options.steps,
        )
        self.flow = SimulatedFlow(self.rules, options.seed, timeline)
        self.flow.on_step = self._stepped
        self.standing = Standing(problem, options.costs, self.flow, self.at, timeline)
        self.plan: Plan | None = plan
        self.plans: list[tuple[float, str]] = []
        self.predicted: Prediction | None = None
        self.usd = 0.0
        self.usd_known = True
        self.blocked = ""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = 0
        drift = options.drift if options.churn_policy == "elastic" else None
        self.watch = None if drift is None else Watch(problem, drift)
        self._plans = Plans(options, self.watch)
        self._turns = Turns(self.watch)
        self._down = False  # checkpoint-restart: between stop and start
        for change in options.changes:
            self.at(change.at_s, lambda c=change: self._change(c))  # type: ignore[misc]

    def at(self, when_s: float, what: Callable[[], None]) -> None:
        """Do something at a time."""
        self._numbers += 1
        heapq.heappush(self._events, (when_s, self._numbers, what))

    def go(
        self, should_stop: Callable[[], bool] = lambda: False, on_progress: Callable[[int, float], None] | None = None
    ) -> str:
        """Run to the end; answers with why it ended. `on_progress` is told steps and virtual seconds now and then."""
        self._due(0.0, first=True)
        until = self.options.until_s or INF
        while True:
            next_s = min(self._events[0][0] if self._events else INF, until)
            began = self.flow.now_s
            why = self.flow.advance(min(next_s, began + self._stride()), should_stop)
            if why == "waits" and next_s < INF:
                self.flow.idle_until(next_s)
                why = ""
            self._pay(self.flow.now_s - began)
            if on_progress is not None:
                on_progress(self.flow.version, self.flow.now_s)
            if why:
                return f"waits: {self._why_waiting()}" if why == "waits" else why
            if self.flow.now_s >= until:
                return "time"
            self._due(self.flow.now_s)

    def _stride(self) -> float:
        """Seconds between two reports of progress."""
        return max(1.0, 2 * self.predicted.step_s) if self.predicted is not None else INF

    def _due(self, now_s: float, *, first: bool = False) -> None:
        while self._events and self._events[0][0] <= now_s + 1e-9:
            heapq.heappop(self._events)[2]()
        if first:
            self._begin()

    def _pay(self, seconds: float) -> None:
        if seconds > 0:
            prices = [self.problem.cluster.kinds[d.kind].price_usd_per_h for d in self.standing.present.values()]
            self.usd_known = self.usd_known and all(p is not None for p in prices)
            self.usd += seconds / 3600 * sum(p for p in prices if p is not None)

    def _why_waiting(self) -> str:
        if self.blocked:
            return self.blocked
        if self.flow.training.speed is None:
            return "there is no trainer"
        if not self.standing.serving:
            return "no replica serves"
        return self.flow.training.waits_for or "no sample may begin"

    # Plans

    def problem_now(self) -> Problem:
        """The problem of the devices that are there."""
        cluster = replace(self.problem.cluster, devices=tuple(self.standing.present.values()))
        costs = self.options.costs
        return replace(self.problem, cluster=cluster, in_force=self.plan, switch_s=costs.start_s)

    def _solve(self, problem: Problem) -> Plan | None:
        plan, self.blocked = self._plans.solve(self._plans.asked(problem))
        return plan

    def _begin(self) -> None:
        """The first plan stands at once: what starting costs is not a change."""
        plan = self.plan
        static = self.options.churn_policy == "static"
        if plan is None:
            plan = self._solve(self.problem if static else self.problem_now())
        if plan is None:
            return
        whole = static or self.standing.there(plan)
        if not whole:
            plan = self._solve(self.problem_now())
        if plan is not None:
            self._put(plan, "start", at_once=True)

    def _put(self, plan: Plan, why: str, *, at_once: bool = False) -> None:
        """A plan comes in force."""
        self.plan, now = plan, self.flow.now_s
        physics = self.standing.physics(plan)
        scored = physics.cost.evaluate(plan)
        if scored is None:
            self.blocked = "the plan does not fit its devices"
            return
        self.plan = plan = scored.plan
        if self.predicted is None:
            self.predicted = scored.prediction
        if self.watch is not None:
            self.watch.plan_in_force(plan, scored.prediction)
        self.plans.append((now, why))
        if self.timeline is not None:
            self.timeline.mark(f"plan: {why}", now)
        self.standing.put(plan, physics, at_once=at_once)

    def _stepped(self) -> None:
        """A step boundary: measures are taken, and a trainer that is to move moves now."""
        self._look_at_speeds()
        self.standing.step_ended()

    # Changes

    def _change(self, change: Change) -> None:
        if self.timeline is not None:
            self.timeline.mark(f"{change.event} {', '.join(change.nodes[:4])}", self.flow.now_s)
        mine = [d for d in self.problem.cluster.devices if d.node in change.nodes]
        if change.event == "slow":
            self.standing.slow_down(mine, change.factor)
            return
        gone, came = self.standing.change(mine, remove=change.event == "remove")
        if self.plan is None and not self.plans:
            if came and self.flow.now_s > 0:
                self._begin()
            return
        match self.options.churn_policy:
            case "static":
                self.standing.lose(gone)
                if self.plan is not None:
                    self.standing.restore(self.plan)
            case "checkpoint-restart":
                self._restart(gone, came)
            case "elastic":
                hit = self.standing.lose(gone)
                if hit:
                    self.at(self.flow.now_s + self.options.costs.detect_s, lambda: self._needs("loss", hit))
                if came:
                    self._needs("join", f"{len(came)} device{'' if len(came) == 1 else 's'} came")

    def _look_at_speeds(self) -> None:
        if self.watch is None or self.standing.train is None:
            return
        self.watch.step_ended(self.flow.books.steps[-1], self.standing.train, self.standing.slow)
        why = self.watch.look(self.flow, self.standing.placed)
        if why:
            self._needs("drift", why)
        self._look()  # nobody may be in doubt any more

    def _restart(self, gone: set[str], came: list[Device]) -> None:
        """checkpoint-restart: everything ends, and begins again from the last checkpoint."""
        costs = self.options.costs
        if not self._down and (self.standing.wants(gone) or (came and costs.restart_on_join)):
            version = self.flow.version - self.flow.version % costs.checkpoint_steps
            self.standing.stop()
            self.flow.roll_back(version)
            self._down = True
            self.at(self.flow.now_s + costs.restart_s, self._come_back)
        elif not self._down and self.standing.wanted is None and came:
            self._come_back()

    def _come_back(self) -> None:
        self._down, self.plan = False, None
        plan = self._solve(self.problem_now())
        if plan is not None:
            self._put(plan, "restart", at_once=True)

    def _needs(self, cause: PlanCause, reason: str) -> None:
        """elastic: a plan is needed; the runtime's rule says when it is worked on."""
        for t in self._turns.needs(cause, reason, self.flow.now_s):
            self.at(t, self._look)

    def _look(self) -> None:
        need = self._turns.begin(self.flow.now_s)
        if need is None:
            return
        costs, problem, why = self.options.costs, self.problem_now(), trigger_words(need)
        if "loss" in need.causes and self.plan is not None and problem.cluster.devices:
            found = repair(problem, self.plan)
            if isinstance(found, Infeasible):
                self.blocked = f"no plan: {found.message}"
            else:
                self.blocked, repaired = "", found.plan
                self.at(self.flow.now_s + costs.repair_s, lambda: self._adopt(repaired, f"repair: {why}", need))
        asked = self._plans.asked(problem, drift=need.causes == {"drift"})
        self.at(self.flow.now_s + costs.solve_s, lambda: self._full_plan(asked, why, need))

    def _full_plan(self, asked: Problem, why: str, need: Need) -> None:
        """The good plan, for the fleet as it was when it was asked for `solve_s` ago. Where devices only became slow it must be
        worth its move."""
        if not self._turns.stands(need):
            return
        asked = replace(asked, in_force=self.plan)  # repaired meanwhile
        plan, self.blocked = self._plans.solve(asked)
        if plan is not None and (need.causes != {"drift"} or self._plans.pays(asked, self.plan, plan)):
            self._adopt(plan, why, need)
        self._turns.end(need)
        self._look()

    def _adopt(self, plan: Plan, why: str, need: Need) -> None:
        if not self._turns.stands(need) or not self.standing.there(plan):
            return
        now = self.plan
        if now is not None and shape(plan) == shape(now) and self.standing.there(now) and self.standing.has(plan):
            return
        self._put(plan, why)
