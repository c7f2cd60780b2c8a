"""Overrides and caps in plain terms: what `keep` and `freeze` mean for each device, and whether all of it makes sense.

`keep` is a pin to the role of the plan in force. `freeze` becomes a mark on every device of the placement, which gives these
devices a class of their own (`planner.space`): no search mixes them with others, and `planner.holding` puts the frozen
placement itself into every plan offered. So no scheduler knows of freezes, and each bound holds: it is that of the weaker
demand that the devices keep their role.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import cast

from planner.errors import InvalidInput
from planner.override import Cap, Override, Role
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.record import replace

_WHERE = "problem.overrides"


def resolved(problem: Problem) -> Problem:
    """The same problem with roles for `keep` and `freeze`, one freeze a device; what a cap says of all training devices goes
    into the capabilities, which every scheduler reads. Resolving twice changes nothing.

    InvalidInput for an override of an unknown device, a pin without role, a cap of an unknown kind, keep or freeze without
    a plan in force, and a freeze that cannot hold because a device of its placement is gone, cordoned or pinned elsewhere.
    """
    _check(problem)
    frozen = frozen_placements(problem)
    if not problem.overrides and not problem.caps:
        return problem
    held = {d: _role(p.role, d) for p in frozen for d in p.devices}
    said: list[Override] = []
    for o in problem.overrides:
        if o.kind == "keep" and problem.in_force is not None:
            said.append(replace(o, role=_role(problem.in_force.role_of(o.device), o.device)))
        elif o.kind == "freeze":
            said.append(replace(o, role=held.get(o.device, "idle")))  # without a placement it goes on having none
        else:
            said.append(o)
    marked = {o.device for o in said if o.kind == "freeze"}
    said += [Override(device=d, kind="freeze", role=role) for d, role in held.items() if d not in marked]
    caps = problem.capabilities
    limits = _train_limits(problem)
    if caps.task_groups == 1:
        limits += [len(p.devices) for p in frozen if p.role == "train"]
    if limits:
        most = min((*limits, caps.train_max_devices or limits[0]))
        caps = replace(caps, train_max_devices=most)
    return replace(problem, overrides=tuple(said), capabilities=caps)


def with_pins_for_keeps(problem: Problem) -> Problem:
    """The problem with a pin for every keep, for an objective that chooses machines and so cannot hold the plan in force.
    InvalidInput where there are freezes: those need it."""
    if any(o.kind == "freeze" for o in problem.overrides):
        raise InvalidInput(
            "freeze goes with objective throughput only",
            where=_WHERE,
            got=problem.objective,
            hint="keep the devices instead, or take the freeze back",
        )
    said = tuple(replace(o, kind="pin") if o.kind == "keep" else o for o in resolved(problem).overrides)
    return replace(problem, overrides=said)


def room_of(problem: Problem, role: str, kind: str) -> int:
    """The most devices of a kind that the caps let have the role."""
    return min((c.devices for c in problem.caps if c.role == role and c.kind in (None, kind)), default=10**9)


def _train_limits(problem: Problem) -> list[int]:
    """Most devices that may train by what caps say of each kind and of all; none where no cap binds. Never 0, which would
    mean no limit: the judge sees to that."""
    if not any(c.role == "train" for c in problem.caps):
        return []
    counts = Counter(d.kind for d in problem.cluster.devices)
    total = sum(min(n, room_of(problem, "train", k)) for k, n in counts.items())
    whole = min((c.devices for c in problem.caps if c.role == "train" and c.kind is None), default=total)
    return [max(1, min(total, whole))]


def frozen_placements(problem: Problem) -> tuple[Placement, ...]:
    """The placements of the plan in force that freezes hold."""
    force = problem.in_force
    held = {o.device for o in problem.overrides if o.kind == "freeze"}
    return tuple(p for p in (force.placements if force else ()) if held & set(p.devices))


def unmet_cap(plan: Plan, problem: Problem) -> Cap | None:
    """A cap that the plan exceeds; None when it keeps all. All devices of a role count, whatever the number of groups."""
    kinds = {d.id: d.kind for d in problem.cluster.devices} if problem.caps else {}
    return next((c for c in problem.caps if count_capped(plan, c, kinds) > c.devices), None)


def count_capped(plan: Plan, cap: Cap, kinds: Mapping[str, str]) -> int:
    """Devices of the plan that count for the cap."""
    mine = {d for p in plan.placements if p.role == cap.role for d in p.devices}
    return sum(cap.kind in (None, kinds.get(d)) for d in mine)


def same_placement(a: Placement, b: Placement) -> bool:
    """Whether two placements put the same on the same devices. Rates, shares and the number of running samples are the cost
    model's choice for a plan and may differ; tasks of a trainer may be unnamed."""
    shape = (a.role, a.kind, a.devices, a.tp, a.pp, a.dp, a.stages) == (
        b.role, b.kind, b.devices, b.tp, b.pp, b.dp, b.stages,
    )  # fmt: skip
    return shape and (a.tasks == b.tasks or not a.tasks or not b.tasks)


def changed(plan: Plan, before: Plan, problem: Problem) -> tuple[str, ...]:
    """Devices of the cluster whose placement is not the one they had in `before`; devices idle in both have not changed."""

    def by_device(p: Plan) -> dict[str, tuple[Placement, ...]]:
        out: dict[str, tuple[Placement, ...]] = {}
        for one in p.placements:
            for d in one.devices:
                out[d] = (*out.get(d, ()), one)
        return out

    now, then = by_device(plan), by_device(before)
    stays: dict[tuple[int, int], bool] = {}

    def same(a: tuple[Placement, ...], b: tuple[Placement, ...]) -> bool:
        if len(a) != len(b):
            return False
        for x, y in zip(a, b, strict=True):
            key = (id(x), id(y))
            if key not in stays:
                stays[key] = same_placement(x, y)
            if not stays[key]:
                return False
        return True

    return tuple(d.id for d in problem.cluster.devices if not same(now.get(d.id, ()), then.get(d.id, ())))


def broken_freezes(problem: Problem) -> Iterator[tuple[Placement, str]]:
    """Frozen placements that cannot stay, and why."""
    ids = {d.id for d in problem.cluster.devices}
    for p in frozen_placements(problem):
        for d in p.devices:
            others = [o for o in problem.overrides if o.device == d and o.kind not in ("keep", "freeze")]
            said = [o for o in others if o.kind != "pin" or o.role != p.role]
            if d not in ids:
                yield p, f"{d} is not in the cluster any more"
            elif said:
                yield p, f"{d} is under {said[0].kind}" + (f" to {said[0].role}" if said[0].role else "")


def _check(problem: Problem) -> None:
    ids = {d.id for d in problem.cluster.devices}
    for o in problem.overrides:
        if o.device not in ids:
            raise InvalidInput(
                f"{o.kind} of a device that is not in the cluster",
                where=_WHERE,
                got=o.device,
                expected=", ".join(sorted(ids)[:8]) or "a device",
            )
        if o.kind == "pin" and o.role is None:
            raise InvalidInput("a pin needs a role", where=_WHERE, got=o.device)
        if o.kind in ("keep", "freeze") and problem.in_force is None:
            raise InvalidInput(
                f"{o.kind} means the plan in force, and there is none",
                where=_WHERE,
                got=o.device,
                hint="pin a role instead",
            )
    for c in problem.caps:
        if c.kind is not None and c.kind not in problem.cluster.kinds:
            raise InvalidInput(
                "a cap of a kind that is not in the cluster",
                where="problem.caps",
                got=c.kind,
                expected=", ".join(sorted(problem.cluster.kinds)),
            )
    for p in frozen_placements(problem):
        if p.role == "score" or (
            p.role == "train" and problem.in_force is not None and p is not problem.in_force.train
        ):
            raise InvalidInput(
                "only the actor's trainer and replicas can be frozen", where=_WHERE, got=f"{p.role} on {p.devices[0]}"
            )
    for p, why in broken_freezes(problem):
        raise InvalidInput(
            "a frozen placement cannot stay as it is",
            where=_WHERE,
            got=f"{p.role} on {', '.join(p.devices[:8])}: {why}",
            hint="take the freeze back",
        )


def _role(role: str, device: str) -> Role:
    if role not in ("train", "rollout", "idle"):
        raise InvalidInput("only the roles train, rollout and idle can be kept", where=_WHERE, got=f"{device}: {role}")
    return cast(Role, role)
