"""`hetrl-ilp` at a fixed window W of rollout: which plan does the work in it, and with what trainer time? A MILP.

    z_s in {0, 1}   candidate s runs (a group of tasks with its layout on devices); each task is run by one, at most
                    `task_groups` run at all
    S, D            makespans of scoring and training: S >= score_s z_s, D >= train_s z_s for every set of tasks; T = S + D
    y_c integer     replicas of each candidate c, by the tier of T up to which it may run that way
    f integer       devices that replicas share with groups (co-location)

Rows: devices of each pool, pins, the link that goes with where the actor trains, the work sum_c rate_c (W - pause_c) y_c >=
B len, and admission. Async: W = P - reward for a period P, any T <= P will do, and T <= (eta + 1) P - M_tail tau_c where
y_c > 0; the model looks for the most work. Sync: W >= pause_c + tail tau_c where y_c > 0, the step is T + reward + W, and the
model looks for the least T. Taking W and not P as given is what keeps it linear there: at a fixed P the work would hold T y_c.

Links are as good as replicas elsewhere can make them, who pass weights on. A choice without those is slower than the model says:
such *delusions* are told, and the model then asks for other groups, or for some replica more or away.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pulp

from planner.cost.step import Offer, Rules
from planner.record import record
from planner.schedulers.hetrl.columns import Candidate, Candidates, Slot
from planner.schedulers.hetrl.layout import role_of
from planner.schedulers.hetrl.replicas import ReplicaCandidate, links_to
from planner.solvers import Answer, run

_FEASIBLE_GAP = 0.02  # async: a feasible plan is what is asked for, however much work it does
_ROUNDING = 1 + 1e-12


@record
class Tier:
    """One way to run a replica candidate in this window: tokens, and the largest T that admits it."""

    candidate: int
    tokens: float
    most_train_s: float


@record
class Chosen:
    """What the solver picked: groups, replicas, and the shared slots by replica candidate and pool of its TP group."""

    groups: tuple[int, ...]
    replicas: Mapping[int, int]
    slots: Mapping[tuple[int, int], Mapping[Slot, int]]


class PeriodModel:
    """The MILP of one window. `train_s`: the T looked for, the lower end proven."""

    def __init__(
        self,
        candidates: Candidates,
        replicas: Sequence[ReplicaCandidate],
        rules: Rules,
        *,
        window_s: float,
        train_s: tuple[float, float],
        delusions: Sequence[Chosen] = (),
    ) -> None:
        self.candidates, self.replicas, self.rules = candidates, replicas, rules
        self.window_s, (self.low_s, self.high_s) = window_s, train_s
        self.model = pulp.LpProblem("period", pulp.LpMaximize)
        self.z = {
            n: self._whole(f"z{n}", 1) for n, c in enumerate(candidates.found) if c.seconds <= self.high_s * (1 + 1e-12)
        }
        self.T = self.model.add_variable("T", lowBound=min(self.low_s, self.high_s), upBound=self.high_s)
        self.tiers = [t for n in range(len(replicas)) for t in self._tiers(n)]
        self.y = [self._whole(f"y{k}", replicas[t.candidate].most) for k, t in enumerate(self.tiers)]
        self.f: dict[tuple[int, int, Slot], Any] = {}
        work = pulp.lpSum(t.tokens / rules.work_tokens * y for t, y in zip(self.tiers, self.y, strict=True))
        self.model += -self.T / self.high_s if rules.sync else work - self.T / self.high_s * 0.5
        self.model += work >= 1 - 1e-9
        self._groups()
        self._devices()
        self._links()
        self._admission()
        for k, d in enumerate(delusions):
            self._something_else(k, d)

    def solve(self, limit_s: float, relative_gap: float) -> tuple[Answer, Chosen | None]:
        """The solver's answer and what it picked, where it found anything; in sync T to `relative_gap` of the least."""
        if not self.tiers:
            return Answer(status="infeasible", values={}, objective=None, bound=None, solver="cbc"), None
        answer = run(self.model, time_limit_s=limit_s, relative_gap=relative_gap if self.rules.sync else _FEASIBLE_GAP)
        if not answer.values:
            return answer, None
        values = answer.values
        counts: dict[int, int] = {}
        for k, t in enumerate(self.tiers):
            n = round(values.get(f"y{k}", 0.0))
            if n:
                counts[t.candidate] = counts.get(t.candidate, 0) + n
        slots: dict[tuple[int, int], dict[Slot, int]] = {}
        for (r, pool, slot), v in self.f.items():
            n = round(values.get(v.name, 0.0))
            if n:
                slots.setdefault((r, pool), {})[slot] = n
        groups = tuple(n for n in self.z if values.get(f"z{n}", 0.0) > 0.5)
        return answer, Chosen(groups=groups, replicas=counts, slots=slots)

    def _whole(self, name: str, most: int) -> Any:
        return self.model.add_variable(name, lowBound=0, upBound=most, cat=pulp.LpInteger)

    def _tiers(self, n: int) -> list[Tier]:
        """The ways to run a replica that no other way dominates, for the T that are possible."""
        found: list[Tier] = []
        rules = self.rules
        for o in self.replicas[n].offers:
            most = min(self.high_s, self._most_train_s(o))
            if most >= self.low_s:
                tokens = rules.tokens_in(o, self.window_s)
                found.append(Tier(candidate=n, tokens=tokens, most_train_s=most))
        kept: list[Tier] = []
        for t in sorted(found, key=lambda t: (-t.most_train_s, -t.tokens)):
            if not any(k.tokens >= t.tokens for k in kept):
                kept.append(t)
        return kept

    def _most_train_s(self, o: Offer) -> float:
        """The largest trainer time with which an offer may run: `Rules.required_s` turned round."""
        rules = self.rules
        if rules.sync:
            return math.inf if rules.least_window_s(o) <= self.window_s * _ROUNDING else -math.inf
        period_s = self.window_s + rules.reward_s
        room_s, tail_s = (period_s - o.pause_s) * _ROUNDING, rules.tail_group * o.level.tau_s
        wait_s = rules.wait_s(o)
        if wait_s + max(wait_s, tail_s) <= rules.eta * room_s:
            most = math.inf
        elif 2 * wait_s <= (rules.eta + 1) * room_s:
            most = (rules.eta + 1) * room_s - wait_s - tail_s
        else:
            return -math.inf
        return min(most, period_s - o.transfer_s) if rules.pause_all else most

    def _groups(self) -> None:
        found = self.candidates.found
        for task in sorted({t for g in self.candidates.groups for t in g}):
            self.model += pulp.lpSum(v for n, v in self.z.items() if task in found[n].layout.tasks) == 1
        self.model += pulp.lpSum(self.z.values()) <= self.candidates.problem.capabilities.task_groups
        score = self.model.add_variable("S", lowBound=0)
        train = self.model.add_variable("D", lowBound=0)
        for g in self.candidates.groups:
            mine = [(found[n], v) for n, v in self.z.items() if found[n].layout.tasks == g]
            self.model += score >= pulp.lpSum(c.score_s * v for c, v in mine)
            self.model += train >= pulp.lpSum(c.train_s * v for c, v in mine)
        self.model += score + train == self.T

    def _devices(self) -> None:
        found, classes = self.candidates.found, self.candidates.classes
        sharing = self._sharing()
        for p, ix in enumerate(self.candidates.pools):
            size, train, roll = (
                sum(len(x) for i in ix for x in parts(classes[i]))
                for parts in (
                    lambda c: (c.free, c.must_train, c.must_roll),
                    lambda c: (c.must_train,),
                    lambda c: (c.must_roll,),
                )
            )
            used = pulp.lpSum(found[n].used[p] * v for n, v in self.z.items() if found[n].used[p])
            own = self._own(p, sharing)
            self.model += used + own <= size
            self.model += used <= size - roll
            if roll:
                self.model += own >= roll
            if train:
                trains = (n for n in self.z if role_of(found[n].layout.tasks) == "train" and found[n].used[p])
                self.model += pulp.lpSum(found[n].used[p] * self.z[n] for n in trains) >= train
            for tp in sorted({self.replicas[t.candidate].shape.tp for t in self.tiers}):
                if len(ix) > 1 and tp > 1:  # TP groups stay inside machines; larger ones pack first
                    larger = self._chunks(p, tp)
                    self.model += larger <= sum(classes[i].size // tp * tp for i in ix)

    def _chunks(self, pool: int, tp: int) -> Any:
        return pulp.lpSum(
            r.shape.tp * r.at.count(pool) * y
            for t, y in zip(self.tiers, self.y, strict=True)
            if (r := self.replicas[t.candidate]).shape.tp >= tp and pool in r.at
        )

    def _own(self, pool: int, sharing: Mapping[tuple[int, int], Any]) -> Any:
        """Devices of a pool that replicas have for themselves: all they use but those they share."""
        return self._chunks(pool, 1) - pulp.lpSum(v for (_, p), v in sharing.items() if p == pool)

    def _sharing(self) -> dict[tuple[int, int], Any]:
        """Shared devices by (replica candidate, pool); each within what the groups that run offer and the replica needs."""
        supply: dict[Slot, list[tuple[int, Any]]] = {}
        for n, v in self.z.items():
            for slot, _, devices in self.candidates.found[n].slots:
                supply.setdefault(slot, []).append((devices, v))
        totals: dict[tuple[int, int], list[Any]] = {}
        for slot, offered in supply.items():
            taken = []
            for r in sorted({t.candidate for t in self.tiers}):
                c = self.replicas[r]
                if slot.pool in c.at and c.fits(slot):
                    v = self._whole(f"f{len(self.f)}", c.most * c.shape.devices)
                    self.f[r, slot.pool, slot] = v
                    taken.append(v)
                    totals.setdefault((r, slot.pool), []).append(v)
            self.model += pulp.lpSum(taken) <= pulp.lpSum(n * v for n, v in offered)
        out = {}
        for (r, pool), vs in totals.items():
            out[r, pool] = pulp.lpSum(vs)
            c = self.replicas[r]
            ys = [y for t, y in zip(self.tiers, self.y, strict=True) if t.candidate == r]
            self.model += out[r, pool] <= c.shape.tp * c.at.count(pool) * pulp.lpSum(ys)
        return out

    def _links(self) -> None:
        """A replica gets its weights over the link that goes with where the actor trains."""
        known: dict[tuple[int, ...], Mapping[Any, list[int]]] = {}
        by: dict[tuple[tuple[int, ...], Any], list[Any]] = {}
        for t, y in zip(self.tiers, self.y, strict=True):
            r = self.replicas[t.candidate]
            known.setdefault(r.at, {})
            by.setdefault((r.at, r.link), []).append((r.most, y))
        for at in known:
            known[at] = links_to(self.candidates, at)
        for (at, link), ys in by.items():
            if len(known[at]) > 1:
                trainers = pulp.lpSum(self.z[n] for n in known[at][link] if n in self.z)
                for most, y in ys:
                    self.model += y <= most * trainers

    def _admission(self) -> None:
        for k, (t, y) in enumerate(zip(self.tiers, self.y, strict=True)):
            if t.most_train_s < self.high_s * (1 - 1e-12):
                runs = self._whole(f"u{k}", 1)
                self.model += y <= self.replicas[t.candidate].most * runs
                self.model += self.high_s - (self.high_s - t.most_train_s) * runs >= self.T

    def _something_else(self, k: int, than: Chosen) -> None:
        """Another group, a replica candidate left out, or a replica more: fewer of a candidate that stays change no path."""
        if any(n not in self.z for n in than.groups):
            return
        others = [1 - self.z[n] for n in than.groups]
        counts: dict[int, Any] = {}
        for t, y in zip(self.tiers, self.y, strict=True):
            counts[t.candidate] = counts.get(t.candidate, 0) + y
        for r, count in counts.items():
            had = than.replicas.get(r, 0)
            more = self._whole(f"more{k}_{r}", 1)
            self.model += count >= (had + 1) * more
            others.append(more)
            if had:
                away = self._whole(f"away{k}_{r}", 1)
                self.model += count <= self.replicas[r].most * (1 - away)
                others.append(away)
        self.model += pulp.lpSum(others) >= 1

    def least_train_s(self, answer: Answer) -> float:
        """Sync: no plan that does the work in this window trains faster, by the solver's bound."""
        return self.low_s if answer.bound is None else max(self.low_s, -answer.bound * self.high_s)


def fastest(found: Sequence[Candidate]) -> float:
    """A lower bound of T: the group that trains the actor takes at least as long as its fastest candidate."""
    return min((c.seconds for c in found if "actor_training" in c.layout.tasks), default=float("inf"))
