"""`hetrl-ilp`: the shortest period by MILPs at fixed windows (see `milp`).

The incumbent (the plan in force, or the best of a short run of `hetrl`) is tested first: is any plan faster by more than
rounding? If not, it is the optimum over the candidates. If so, the plan found is the incumbent, and the middle between the
highest period known to be impossible and the incumbent is tested, in turn with the incumbent itself. In sync modes the
window that a better plan may take is closed from above instead.
"""

import math
from collections import Counter

from planner.cost.model import Scored
from planner.cost.network import Place
from planner.judge import violations
from planner.record import replace
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.schedulers.hetrl.columns import Candidates, Slot
from planner.schedulers.hetrl.layout import GroupLayout, Seat, SeatedReplica, plan_of
from planner.schedulers.hetrl.milp import Chosen, PeriodModel, fastest
from planner.schedulers.hetrl.replicas import replica_candidates
from planner.schedulers.hetrl.search import evolve
from planner.schedulers.hetrl.ways import Ways
from planner.search import Search
from planner.space import device_classes
from planner.workflow import phi

_STEP = 2e-7  # periods closer than this are one: rounding of the cost model's bisection and of the solver
_COARSE_STEP = 1e-3  # the same on fleets whose candidates are coarse anyway
_ROUNDS, _COARSE_ROUNDS = 200, 16
_DELUSIONS = 32  # choices that are slower than the model thinks, in one problem
_WARM = 96  # evaluations of `hetrl` that give the first incumbent


def hetrl_ilp(search: Search) -> None:
    """Offer plans until the incumbent is proven the best over all candidates, or the search is halted."""
    classes = device_classes(search.problem)
    evolve(search, min(_WARM, search.budget.evaluations))
    if not classes or search.halted():
        return
    _Periods(search, Candidates(Ways(search.cost, classes))).close_in()


class _Periods:
    """The search for the shortest period."""

    def __init__(self, search: Search, candidates: Candidates) -> None:
        self.search, self.candidates = search, candidates
        self.rules = search.cost.rules
        self.replicas = replica_candidates(candidates)
        self.step = _STEP if candidates.exact else _COARSE_STEP
        self.rounds = _ROUNDS if candidates.exact else _COARSE_ROUNDS
        self.fastest_s = fastest(candidates.found)
        rate = self._most_rate()
        self.delusions: list[Chosen] = []
        self.least_window_s = self.rules.work_tokens / rate if rate > 0 else math.inf

    def close_in(self) -> None:
        """Until nothing between the impossible and the incumbent is left, or the rounds are spent."""
        if self.fastest_s == math.inf or not self.replicas:
            return
        self._close_in_sync() if self.rules.sync else self._close_in_async()

    def _close_in_async(self) -> None:
        low, high = max(self.fastest_s, self.rules.reward_s + self.least_window_s), self._incumbent_s()
        at_top = self.candidates.exact
        for _ in range(self.rounds):
            if self.search.halted() or high <= low * (1 + self.step):
                return
            middle = high * (1 - self.step) if at_top else math.sqrt(low * high)
            period = self._endless_s() if high == math.inf else middle
            status, _, found_s = self._test(period - self.rules.reward_s, (self.fastest_s, period))
            if found_s < high * (1 - self.step / 2):
                high = found_s
            elif high == math.inf or (at_top and (status == "infeasible" or self.candidates.exact)):
                return  # proven; or the solver's rounding: nothing that the cost model calls faster
            elif not at_top:
                low = middle
            at_top = not at_top

    def _close_in_sync(self) -> None:
        """A better plan has T + reward + W below the incumbent, so W is at most what the least T leaves; the least T of that
        window bounds T from below, which shrinks the window, and so on."""
        least_s, reward_s = self.fastest_s, self.rules.reward_s
        for _ in range(self.rounds):
            if self.search.halted():
                return
            high = self._incumbent_s()
            target = self._endless_s() if high == math.inf else high * (1 - self.step)
            window = target - reward_s - least_s
            most_s = target - reward_s - self.least_window_s
            if window < self.least_window_s or most_s < least_s:
                return
            status, bound_s, found_s = self._test(window, (least_s, most_s))
            if status in ("infeasible", "unknown"):
                return
            if not (found_s < high * (1 - self.step / 2) or bound_s > least_s * (1 + self.step / 10)):
                return
            least_s = bound_s

    def _incumbent_s(self) -> float:
        return self.search.best.prediction.step_s if self.search.best is not None else math.inf

    def _most_rate(self) -> float:
        """Tokens/s if every pool ran its best replicas."""
        total = 0.0
        for p, ix in enumerate(self.candidates.pools):
            size = sum(self.candidates.classes[i].size for i in ix)
            rates = [r.offers[0].level.rate_tokens_per_s / r.shape.devices if p in r.at else 0.0 for r in self.replicas]
            each = [o.level.rate_tokens_per_s / r.shape.devices for r in self.replicas if p in r.at for o in r.offers]
            total += size * max([*rates, *each], default=0.0)
        return total

    def _endless_s(self) -> float:
        """A period that any candidates keep."""
        rules = self.rules
        offers = [o for r in self.replicas for o in r.offers]
        slowest = max(rules.work_tokens / o.level.rate_tokens_per_s + o.pause_s + o.transfer_s for o in offers)
        tail = max(max(rules.tail_group, rules.tail_batch) * o.level.tau_s for o in offers)
        groups = self.search.problem.capabilities.task_groups
        return 2 * (groups * max(c.seconds for c in self.candidates.found) + rules.reward_s + slowest + tail)

    def _test(self, window_s: float, train_s: tuple[float, float]) -> tuple[str, float, float]:
        """What the solver says of a window, the least T in it as far as proven (sync), and the period of the plan found."""
        if train_s[1] < train_s[0] * (1 - 1e-12):
            return "infeasible", train_s[0], math.inf
        while True:
            model = PeriodModel(
                self.candidates, self.replicas, self.rules, window_s=window_s, train_s=train_s, delusions=self.delusions
            )
            answer, chosen = model.solve(self.search.budget.mip_seconds, 0.0 if self.candidates.exact else _COARSE_STEP)
            scored = None if chosen is None else self._offer(chosen)
            found_s = math.inf if scored is None else scored.prediction.step_s
            thought_s = window_s + self.rules.reward_s + (answer.values.get("T", 0.0) if self.rules.sync else 0.0)
            if chosen is None or found_s <= thought_s * (1 + self.step / 2) or not self._may_retry():
                return answer.status, model.least_train_s(answer), found_s
            self.delusions.append(chosen)  # it was offered, so nothing is lost where only rounding made it slower

    def _may_retry(self) -> bool:
        """Whether another choice is worth asking for. Coarse candidates are placed by rules of their own, so slower is no wonder."""
        return self.candidates.exact and len(self.delusions) < _DELUSIONS and not self.search.halted()

    def _offer(self, chosen: Chosen) -> Scored | None:
        groups = [self.candidates.found[n].layout for n in chosen.groups]
        if not self.candidates.exact:
            placed = self._placed(groups)
            if placed is None:
                return None
            groups = placed
        if self.candidates.exact:
            replicas = self._seated(chosen)
        else:
            replicas = self._shared(chosen, groups) if self.candidates.shared else self._packed(groups)
        if not replicas:
            return None
        problem = self.search.problem
        plan = plan_of(self.candidates.classes, groups, replicas, problem.in_force)
        return None if violations(plan, problem) else self.search.offer(plan)

    def _placed(self, groups: list[GroupLayout]) -> list[GroupLayout] | None:
        """Candidates made for empty pools, one after the other on what is left of the real ones, larger ones first."""
        classes = self.candidates.classes
        left = [c.size - len(c.must_roll) for c in classes]
        out: dict[int, GroupLayout] = {}
        for n in sorted(range(len(groups)), key=lambda n: (-sum(groups[n].used(len(classes))), n)):
            g = groups[n]
            need = Counter[int]()
            for i, x in enumerate(g.used(len(classes))):
                need[self.candidates.pool_of[i]] += x
            counts = self.candidates.filled({p: x for p, x in need.items() if x}, left)
            if counts is None:
                return None
            order = sorted(range(len(classes)), key=lambda i: (-counts[i], i))
            chunks: list[tuple[int, ...]] = []
            rest = list(counts)
            for s in g.stages:
                spots = [i for i in order if classes[i].place.kind == s.kind for _ in range(rest[i] // s.tp)]
                if len(spots) < len(s.chunks):
                    return None
                mine = tuple(spots[: len(s.chunks)])
                for i in mine:
                    rest[i] -= s.tp
                chunks.append(mine)
            blocks = tuple(replace(s, chunks=c) for s, c in zip(g.stages, chunks, strict=True))
            out[n] = GroupLayout(tasks=g.tasks, stages=blocks)
            left = [a - b for a, b in zip(left, out[n].used(len(classes)), strict=True)]
        return [out[n] for n in range(len(groups))]

    def _packed(self, groups: list[GroupLayout]) -> list[SeatedReplica]:
        """The best replicas on what the groups leave, exactly."""
        classes, ways = self.candidates.classes, self.candidates.ways
        left = [c.size for c in classes]
        for g in groups:
            left = [a - b for a, b in zip(left, g.used(len(classes)), strict=True)]
        costs = [ways.cost_of(g) for g in groups]
        known = [c for c in costs if c is not None]
        if len(known) < len(groups):
            return []
        actor = next(g for g in groups if "actor_training" in g.tasks)
        places: tuple[Place, ...] = tuple(
            classes[i].place for i in dict.fromkeys(i for s in actor.stages for i in s.chunks)
        )
        found = best_rollout(
            self.search.cost,
            classes,
            left,
            trainer=places,
            train_s=phi(c.score_s for c in known) + phi(c.train_s - c.score_s for c in known),
            mip_seconds=self.search.budget.mip_seconds,
        )
        if found is None:
            return []
        return [
            SeatedReplica(shape=r.shape, seats=tuple(Seat(at=i) for i in r.chunks for _ in range(r.shape.tp)))
            for r in found.replicas
        ]

    def _seated(self, chosen: Chosen) -> list[SeatedReplica]:
        """Replicas on the slots the solver gave them; the rest on devices of their own."""
        concrete: dict[object, list[Seat]] = {}
        for g, n in enumerate(chosen.groups):
            for slot, stage, _ in self.candidates.found[n].slots:
                s = self.candidates.found[n].layout.stages[stage]
                for i in s.chunks:
                    if self.candidates.pool_of[i] == slot.pool:
                        concrete.setdefault(slot, []).extend([Seat(at=i, group=g, stage=stage)] * s.tp)
        out: list[SeatedReplica] = []
        for r, count in sorted(chosen.replicas.items()):
            c = self.replicas[r]
            pools = {
                p: [concrete[slot].pop() for slot, n in chosen.slots.get((r, p), {}).items() for _ in range(n)]
                for p in c.at
            }
            for _ in range(count):
                seats: list[Seat] = []
                for p in c.at:
                    for _ in range(c.shape.tp):
                        seats.append(pools[p].pop() if pools[p] else Seat(at=self.candidates.pools[p][0]))
                out.append(SeatedReplica(shape=c.shape, seats=tuple(seats)))
        return out

    def _shared(self, chosen: Chosen, groups: list[GroupLayout]) -> list[SeatedReplica]:
        """Coarse candidates that share devices: each TP group on the first machine with seats that it fits, larger ones
        first; a replica that finds none is left out."""
        classes = self.candidates.classes
        used = [sum(ns) for ns in zip(*(g.used(len(classes)) for g in groups), strict=True)]
        seats: list[list[tuple[Slot, Seat]]] = []
        for i, c in enumerate(classes):
            own = Slot(pool=self.candidates.pool_of[i])
            seats.append([(own, Seat(at=i))] * (c.size - used[i]))
        for g, n in enumerate(chosen.groups):
            for slot, stage, _ in self.candidates.found[n].slots:
                s = groups[g].stages[stage]
                for i in s.chunks:
                    if self.candidates.pool_of[i] == slot.pool:
                        seats[i] += [(slot, Seat(at=i, group=g, stage=stage))] * s.tp
        out: list[SeatedReplica] = []
        for r in sorted(chosen.replicas, key=lambda r: (-self.replicas[r].shape.tp, r)):
            want, tp = self.replicas[r], self.replicas[r].shape.tp
            for _ in range(chosen.replicas[r]):
                taken: list[tuple[Slot, Seat]] = []
                for p in want.at:
                    for i in self.candidates.pools[p]:
                        fit = [x for x in seats[i] if want.fits(x[0])][:tp]
                        if len(fit) == tp:
                            for x in fit:
                                seats[i].remove(x)
                            taken += fit
                            break
                if len(taken) == want.shape.devices:
                    out.append(SeatedReplica(shape=want.shape, seats=tuple(x for _, x in taken)))
        return out
