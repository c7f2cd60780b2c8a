"""A search that puts what operators hold into every plan offered: frozen placements as they are, and no more than the caps.

Schedulers know classes of devices with roles. What they offer is right about everything else: the trainer where it may
move, and which devices roll out. Where a cap leaves fewer replicas than a scheduler gave, replicas are chosen anew for
that trainer, over the ways to leave devices idle.
"""

import itertools
from collections.abc import Iterator, Sequence

from planner.cost.model import Scored
from planner.placing import StageLayout, materialise
from planner.plan import Placement, Plan
from planner.resolve import count_capped, frozen_placements, unmet_cap
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.search import Search
from planner.space import DeviceClass, device_classes

_WAYS = 64  # ways to leave devices idle that are tried for one trainer


class HoldingSearch(Search):
    """Completes offered plans with frozen placements, then cuts them to the caps. Without freezes and caps, a `Search`."""

    def offer(self, plan: Plan) -> Scored | None:
        """As `Search.offer`, of the completed plan; None where no completion keeps every cap."""
        if not self.problem.caps and not any(o.kind == "freeze" for o in self.problem.overrides):
            return super().offer(plan)
        found: Scored | None = None
        offered = False
        for way in self._within_caps(self._completed(plan)):
            offered = True
            scored = super().offer(way)
            if scored is not None and (found is None or self.better(scored, found)):
                found = scored
        if not offered:
            self.evaluations += 1
        return found

    def _completed(self, plan: Plan) -> Plan:
        """The plan with frozen placements for whatever it has on their devices."""
        frozen = frozen_placements(self.problem)
        held = {d for p in frozen for d in p.devices}
        others = [p for p in plan.placements if not held & set(p.devices)]
        if any(p.role == "train" for p in frozen):
            others = [p for p in others if p.role != "train"]
        sides = [p for p in (*frozen, *others) if p.role != "rollout"]
        rollouts = sorted((p for p in (*frozen, *others) if p.role == "rollout"), key=lambda p: p.devices)
        return Plan(placements=(*sides, *rollouts))

    def _within_caps(self, plan: Plan) -> Iterator[Plan]:
        cap = unmet_cap(plan, self.problem)
        if cap is None:
            yield plan
        elif (
            cap.role == "rollout"
            and unmet_cap(Plan(placements=plan.sides or plan.placements[:1]), self.problem) is None
        ):
            yield from self._with_fewer_replicas(plan)

    def _with_fewer_replicas(self, plan: Plan) -> Iterator[Plan]:
        """The sides and frozen replicas of a plan with the best other replicas on as many devices as the caps leave."""
        classes = device_classes(self.problem)
        fixed = Plan(placements=(*plan.sides, *(p for p in frozen_placements(self.problem) if p.role == "rollout")))
        used = {d for p in fixed.placements for d in p.devices}
        free = [sum(d not in used for d in (*c.free, *c.must_roll)) for c in classes]
        for counts in itertools.islice(self._counts(classes, free, fixed), _WAYS):
            if self.halted():
                return
            found = replicas_beside(self, classes, counts, fixed)
            whole = Plan(placements=(*fixed.placements, *found))
            if whole.rollouts and unmet_cap(whole, self.problem) is None:
                yield whole

    def _counts(self, classes: Sequence[DeviceClass], free: list[int], fixed: Plan) -> Iterator[tuple[int, ...]]:
        """Devices by class to roll out on, as many as the caps leave: the largest classes first, then other ways."""
        kinds = {d.id: d.kind for d in self.problem.cluster.devices}
        room = {
            (c.kind, i): c.devices - count_capped(fixed, c, kinds)
            for i, c in enumerate(self.problem.caps)
            if c.role == "rollout"
        }

        def go(at: int, left: dict[tuple[str | None, int], int]) -> Iterator[tuple[int, ...]]:
            if at == len(classes):
                yield ()
                return
            kind = classes[at].place.kind
            mine = [k for k in left if k[0] in (None, kind)]
            least = sum(d not in held for d in classes[at].must_roll)
            for n in range(min((free[at], *(left[k] for k in mine))), least - 1, -1):
                for rest in go(at + 1, {k: v - n if k in mine else v for k, v in left.items()}):
                    yield (n, *rest)

        held = {d for p in fixed.placements for d in p.devices}
        yield from _maximal(go(0, room))


def _maximal(ways: Iterator[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    """Without ways that only leave out what an earlier one had: more devices never give less."""
    seen: list[tuple[int, ...]] = []
    for way in ways:
        if not any(all(a <= b for a, b in zip(way, other, strict=True)) for other in seen):
            seen.append(way)
            yield way


def replicas_beside(
    search: Search, classes: Sequence[DeviceClass], counts: Sequence[int], fixed: Plan
) -> tuple[Placement, ...]:
    """The best replicas on `counts` devices of each class beside the trainer of `fixed`, none of whose devices are taken."""
    cost, train = search.cost, fixed.train
    if train is None or not any(counts):
        return ()
    seconds = cost.trainer(cost.trainer_shape(train))
    used = {d for p in fixed.placements for d in p.devices}
    left = [
        DeviceClass(
            place=c.place,
            free=tuple(d for d in c.free if d not in used),
            must_roll=tuple(d for d in c.must_roll if d not in used),
        )
        for c in classes
    ]
    if seconds is None:
        return ()
    found = best_rollout(
        cost,
        left,
        counts,
        trainer=cost.places_of(train.devices),
        train_s=seconds.train_s,
        mip_seconds=search.budget.mip_seconds,
    )
    if found is None:
        return ()
    # `materialise` wants a trainer: it gets a device that no replica can have, and is left out again.
    aside = DeviceClass(place=classes[0].place, free=("",))
    stage = StageLayout(kind=train.stages[0].kind, tp=1, layers=1, chunks=(len(left),))
    return materialise([*left, aside], [stage], found.replicas, search.problem.in_force).rollouts


def around_frozen_trainer(search: Search) -> None:
    """The scheduler where the trainer is frozen: all that is left to choose is replicas."""
    classes = device_classes(search.problem)
    fixed = Plan(placements=frozen_placements(search.problem))
    used = {d for p in fixed.placements for d in p.devices}
    counts = [sum(d not in used for d in (*c.free, *c.must_roll)) for c in classes]
    found = replicas_beside(search, classes, counts, fixed)
    search.offer(Plan(placements=(*fixed.placements, *found)))
