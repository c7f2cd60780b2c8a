"""Plans made by hand: what still stands of a plan, a trainer refitted beside it, replicas on what is left over.

Nothing is searched and nothing is optimal: `planner.repair` wants a plan at once, `planner.infeasible` any plan at all.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from planner.cluster import Device
from planner.columns import Columns
from planner.cost.decode import ReplicaShape
from planner.cost.host import within_host_memory
from planner.cost.model import CostModel, Scored
from planner.cost.network import best_link
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.record import replace
from planner.refit import refitted
from planner.resolve import changed, count_capped, frozen_placements, room_of, unmet_cap
from planner.solution import Explanation, Repaired
from planner.space import DeviceClass, device_classes, replica_shapes, role_limits
from planner.workflow import tasks_of

_FEW = 64  # placements
_WORTH = 0.95  # a larger trainer must make the step so much shorter to take more from replicas
_NOWHERE = Placement(role="train", kind="", devices=("",))  # a trainer that had no device of this cluster


class Mending:
    """One repair: what stands of `previous`, what is free, and what is made of it. The problem is a resolved one."""

    def __init__(self, problem: Problem, previous: Plan) -> None:
        self.problem, self.previous = problem, previous
        self.cost = CostModel(problem)
        self.columns = Columns(self.cost)
        self.classes = device_classes(problem)
        self.devices = {d.id: d for d in problem.cluster.devices}
        self.limits = role_limits(problem.overrides)
        pinned = frozenset(d for d, role in self.limits.items() if role == "train")
        train = previous.train
        self.must_train = pinned
        whole = [p for p in previous.placements if all(self._may(d, p.role) for d in p.devices)]
        if train is not None and not pinned <= set(train.devices):
            whole = [p for p in whole if p is not train]
        self.whole = [_plain(p) for p in whole]
        stays = {p.devices for p in whole}
        self.broken = [p for p in previous.placements if p.devices not in stays]
        used = {d for p in previous.placements for d in p.devices}
        freed = [d for p in self.broken for d in p.devices if d in self.devices and self.limits.get(d) != "idle"]
        self.freed = list(dict.fromkeys(freed))
        self.idle = [d for d in self.devices if d not in used and self.limits.get(d) != "idle"]
        self.frozen = {d for p in frozen_placements(problem) for d in p.devices}

    def _may(self, device: str, role: str) -> bool:
        return device in self.devices and self.limits.get(device, role) == role

    def plan(self) -> Scored | None:
        """The repaired plan with its prediction; None when nothing near the previous plan is valid."""
        if self.previous.train is None or len({d for p in self.previous.placements for d in p.devices}) != sum(
            len(p.devices) for p in self.previous.placements
        ):
            return None  # devices with two placements need a search
        tasks = tasks_of(self.previous, self.problem.workload)
        sides = [replace(p, tasks=tasks[p]) for p in self.broken if p.role != "rollout"]
        if not sides:
            return self._completed(self.whole) or self._from_trainer(self.whole)
        if len(sides) > 1:
            return None
        return self._with_trainer(sides[0])

    def from_scratch(self) -> Scored | None:
        """Some plan around what `previous` holds, good or not; None when none was found, which proves nothing."""
        if self.previous.train is not None:
            return self._completed(self.whole)
        return self._with_trainer(_NOWHERE)

    def _with_trainer(self, old: Placement) -> Scored | None:
        """A new trainer on its own devices, or with others' where that is needed, or worth it after most of it was lost."""
        lost = len(old.devices) - sum(d in self.devices for d in old.devices)
        ways: list[tuple[float, Placement, list[Placement]]] = []  # seconds estimated, trainer, what stays beside it
        for taken, pool in self._pools(old):
            if ways and sum(len(r.devices) for r in taken) > lost:
                break
            train = self._refit(old, pool)
            if train is None:
                continue
            gone = {p.devices for p in taken}
            rest = [p for p in self.whole if p.devices not in gone]
            ways.append((self._estimate_s(train, rest), train, rest))
            if not taken and train.kind == old.kind and 2 * len(train.devices) >= len(old.devices):
                break
        best = 0
        for i, way in enumerate(ways):
            if way[0] < ways[best][0] * _WORTH:
                best = i
        for _, train, rest in (*ways[best:], *ways[:best]):
            found = self._completed([train, *rest]) or self._from_trainer([train, *rest])
            if found is not None:
                return found
        return None

    def _estimate_s(self, train: Placement, rest: Sequence[Placement]) -> float:
        """Roughly the step: training against generation at the replicas' best rates."""
        seconds = self.cost.trainer(self.cost.trainer_shape(train))
        shapes = Counter((r.kind, r.tp, r.pp) for r in rest if r.role == "rollout")
        rate = sum(n * self._rate(ReplicaShape(kind=k, tp=tp, pp=pp)) for (k, tp, pp), n in shapes.items())
        if seconds is None or rate <= 0:
            return float("inf")
        parts = (seconds.train_s, self.cost.rules.work_tokens / rate)
        return sum(parts) if self.cost.rules.sync else max(parts)

    def _rate(self, shape: ReplicaShape) -> float:
        offers = self.cost.offers(shape, self.problem.cluster.same_kind.bulk())
        return max((o.level.rate_tokens_per_s for o in offers), default=0.0)

    def _refit(self, old: Placement, pool: Sequence[str]) -> Placement | None:
        may = [self.devices[d] for d in pool if self.limits.get(d, "train") == "train"]
        must = self.must_train if not old.tasks or "actor_training" in old.tasks else frozenset()
        return refitted(self.columns, old, may, must=must, room=self._room)

    def _room(self, kind: str) -> int:
        return room_of(self.problem, "train", kind)

    def _pools(self, old: Placement) -> Iterator[tuple[list[Placement], list[str]]]:
        """(replicas taken, devices that may train): the least disturbance first."""
        own = [d for d in old.devices if d in self.freed]
        pinned = [d for d in self.must_train if d not in own]
        homes = [p for p in self.whole if p.role == "rollout" and set(p.devices) & set(pinned)]
        own += pinned
        freed = [d for d in self.freed if d not in own]
        idle = [d for d in self.idle if d not in own]
        yield homes, own
        if freed:
            yield homes, own + freed
        if idle:
            yield homes, own + freed + self._nearest_first(idle, old)
        away = {d for p in homes for d in p.devices} | self.frozen
        others = [p for p in self.whole if p.role == "rollout" and not away & set(p.devices)]
        where = self._where(old)
        others.sort(key=lambda p: (_apart(self.devices[p.devices[0]], where), len(p.devices)))
        n = 1
        while n <= len(others):
            taken = others[:n]
            yield [*homes, *taken], own + freed + idle + [d for p in taken for d in p.devices]
            n = n + 1 if n < 4 else len(others) if n < len(others) < 2 * n else 2 * n

    def _nearest_first(self, devices: Sequence[str], old: Placement) -> list[str]:
        where = self._where(old)
        return sorted(devices, key=lambda d: _apart(self.devices[d], where))

    def _where(self, old: Placement) -> tuple[set[str], set[str], set[str]]:
        """Kinds, machines and regions of a placement, as far as its devices are still there."""
        mine = [self.devices[d] for d in old.devices if d in self.devices]
        return {k for s in old.stages for k in s.kind.split("+")}, {d.node for d in mine}, {d.region for d in mine}

    def _from_trainer(self, placements: Sequence[Placement]) -> Scored | None:
        """No replica is left and no other device is free: the trainer gives some of its own."""
        train = next((p for p in placements if p.role == "train"), None)
        if train is None or any(p.role == "rollout" for p in placements) or self.frozen & set(train.devices):
            return None
        others = [p for p in placements if p is not train]
        n = len(train.devices)
        for given in dict.fromkeys(min(n - 1, g) for g in (1, 2, 3, 4, 6, 8, n // 4, n // 2, n - 1) if g >= 1):
            ordered = sorted(train.devices, key=lambda d: self.limits.get(d) != "train")
            for rest in (ordered[: n - given], ordered[given:]):
                smaller = self._refit(train, rest)
                if smaller is not None and (found := self._completed([smaller, *others])) is not None:
                    return found
        return None

    def _completed(self, placements: Sequence[Placement]) -> Scored | None:
        """The placements with replicas on free devices: those whose placement is gone, and idle ones where there is need."""
        used = {d for p in placements for d in p.devices}
        before = {d for p in self.previous.placements for d in p.devices}
        free = [d for d in self.devices if d not in used and self.limits.get(d, "rollout") == "rollout"]
        must = [d for d in free if self.limits.get(d) == "rollout"]
        mine = [d for d in free if d in before or d in must]
        best: Scored | None = None
        has_replica = any(p.role == "rollout" for p in placements)
        tried: list[list[Placement]] = []
        # Whether a few more replicas help is asked of small fleets only: there one that is slow could pace the step.
        for pool in ([must] if has_replica and len(placements) <= _FEW else []) + [mine, free]:
            if best is not None and pool is free:
                break  # devices that were idle stay so unless nothing else generates
            new = self._new_replicas(pool, placements)
            if new in tried:
                continue
            tried.append(new)
            found = self._scored([*placements, *new])
            if found is not None and (best is None or found.prediction.step_s < best.prediction.step_s * (1 - 1e-9)):
                best = found
        return best

    def _scored(self, placements: Sequence[Placement]) -> Scored | None:
        plan = Plan(placements=tuple(placements))
        if self.problem.cluster.host_memory_bytes:
            kept = [d for d, role in self.limits.items() if role == "rollout"]
            plan = within_host_memory(self.cost.context, plan, kept=[*kept, *self.frozen])
        if unmet_cap(plan, self.problem) is not None:
            return None
        return self.cost.evaluate(plan)

    def _new_replicas(self, devices: Sequence[str], beside: Sequence[Placement]) -> list[Placement]:
        """Replicas on these devices, the shape with the best rate a device first, within the caps."""
        train = next((p for p in beside if p.role == "train"), None)
        if train is None or not devices:
            return []
        kinds = {d.id: d.kind for d in self.problem.cluster.devices}
        room = {
            c: c.devices - count_capped(Plan(placements=tuple(beside)), c, kinds)
            for c in self.problem.caps
            if c.role == "rollout"
        }
        out: list[Placement] = []
        groups: dict[str, dict[str, list[str]]] = {}
        for d in devices:
            groups.setdefault(self.devices[d].kind, {}).setdefault(self.devices[d].node, []).append(d)
        for kind, machines in groups.items():
            left = [*machines.values()]
            for shape in self._shapes(kind, train):
                mine = [c for c in room if c.kind in (None, kind)]
                while all(room[c] >= shape.devices for c in mine) and (chosen := _taken(left, shape)) is not None:
                    out.append(Placement(role="rollout", kind=kind, devices=chosen, tp=shape.tp, pp=shape.pp))
                    for c in mine:
                        room[c] -= shape.devices
        return out

    def _shapes(self, kind: str, train: Placement) -> list[ReplicaShape]:
        cluster = self.problem.cluster
        places = tuple(c.place for c in self.classes if c.place.kind == kind)
        link = best_link(cluster, self.cost.places_of(train.devices), places)

        def rate(shape: ReplicaShape) -> float:
            return max((o.level.rate_tokens_per_s for o in self.cost.offers(shape, link)), default=0.0) / shape.devices

        shapes: Sequence[ReplicaShape] = replica_shapes(self.cost, self._classes_of(kind), kind)
        return sorted(shapes, key=lambda s: -rate(s))

    def _classes_of(self, kind: str) -> tuple[DeviceClass, ...]:
        return tuple(c for c in self.classes if c.place.kind == kind)

    def told(self, found: Scored, notes: tuple[str, ...]) -> Repaired:
        """The answer, in words: what was lost, what moved."""
        moved = changed(found.plan, self.previous, self.problem)
        gone = [d for p in self.previous.placements for d in p.devices if d not in self.devices]
        barred = [d for d, role in self.limits.items() if role == "idle" and self.previous.role_of(d) != "idle"]
        lines = [f"{len(self.whole)} of {len(self.previous.placements)} placements could stay"]
        if gone or barred:
            lines.append(f"lost: {_some([*gone, *barred])}")
        if moved:
            lines.append(f"another placement: {_some(moved)}")
        lines.append("no bound was computed: a plan made to be there at once, not to be the best")
        many = "1 device changes its" if len(moved) == 1 else f"{len(moved)} devices change their"
        head = f"repaired: {many} placement, step {found.prediction.step_s:.3g} s"
        return Repaired(
            plan=found.plan,
            prediction=found.prediction,
            changed=moved,
            explanation=Explanation(headline=head, lines=(*lines, *notes)),
        )


def _plain(p: Placement) -> Placement:
    """A placement without what the cost model chose for it, so that it chooses again beside another trainer."""
    return replace(p, max_running=None, rate_tokens_per_s=None, share=None)


def _apart(d: Device, where: tuple[set[str], set[str], set[str]]) -> tuple[bool, bool, bool]:
    kinds, nodes, regions = where
    return d.kind not in kinds, d.region not in regions, d.node not in nodes


def _taken(machines: list[list[str]], shape: ReplicaShape) -> tuple[str, ...] | None:
    """Devices for one replica, taken out of the machines; None when they do not hold one."""
    chosen: list[tuple[int, list[str]]] = []
    left = [list(m) for m in machines]
    for _ in range(shape.pp):
        at = next((i for i, m in enumerate(left) if len(m) >= shape.tp), None)
        if at is None:
            return None
        chosen.append((at, left[at][: shape.tp]))
        left[at] = left[at][shape.tp :]
    machines[:] = left
    return tuple(d for _, ds in chosen for d in ds)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
