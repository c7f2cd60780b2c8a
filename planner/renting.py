"""Throughput per dollar: which machines to rent.

An idle device of a rented machine costs as much as a busy one, so machines are rented whole. Every number of machines of
each type is considered, best bound first, until no bound beats the best plan found.
"""

import itertools
from collections.abc import Callable, Iterator

from planner.bound import upper_bound
from planner.cluster import Device
from planner.cost.model import CostModel
from planner.errors import InvalidInput
from planner.problem import Problem
from planner.record import replace
from planner.solution import Conflict, Explanation, Feasible, Infeasible, Solution

_MOST_MIXES = 4096


def solve_per_dollar(
    problem: Problem,
    throughput: Callable[[Problem], Solution],
    *,
    on_incumbent: Callable[[Feasible], None] | None,
    should_stop: Callable[[], bool],
    scheduler: str,
) -> Solution:
    """The plan with most tokens a dollar among those that reach the floor. `throughput` plans a set of machines.

    InvalidInput without a floor (the smallest plan would win) or where a kind has no price.
    """
    floor = _checked_floor(problem)
    ranked, most = [], 0.0
    for devices in _mixes(problem):
        part = _restricted(problem, devices)
        bound = upper_bound(CostModel(part))
        if bound is not None:
            most = max(most, bound.tokens_per_s)
            if bound.tokens_per_s >= floor:
                ranked.append((_per_dollar(bound.tokens_per_s, _price(part)), part))
    if not ranked:
        whole = throughput(replace(problem, objective="throughput"))
        if isinstance(whole, Infeasible):
            return whole
        detail = f"{floor:,.0f} tokens/s asked for, no plan exceeds {most:,.0f}"
        return Infeasible(conflicts=(Conflict(limit="floor_tokens_per_s", detail=detail),), scheduler=scheduler)
    ranked.sort(key=lambda r: -r[0])
    best: Feasible | None = None
    for ceiling, part in ranked:
        if best is not None and (should_stop() or ceiling <= _ratio(best) * (1 + 1e-9)):
            break
        found = throughput(part)
        if isinstance(found, Feasible) and (best is None or _ratio(found) > _ratio(best) * (1 + 1e-9)):
            best = _told(found, ranked[0][0])
            if on_incumbent is not None:
                on_incumbent(best)
    if best is None:
        detail = f"{floor:,.0f} tokens/s asked for, no plan was found that reaches it"
        return Infeasible(conflicts=(Conflict(limit="floor_tokens_per_s", detail=detail),), scheduler=scheduler)
    return best


def _checked_floor(problem: Problem) -> float:
    if problem.floor_tokens_per_s is None:
        raise InvalidInput(
            "throughput_per_dollar needs a throughput floor",
            where="planner.floor_tokens_per_s",
            hint="without one the smallest plan wins; set the tokens/s you need",
        )
    for name in sorted({d.kind for d in problem.cluster.devices}):
        if problem.cluster.kinds[name].price_usd_per_h is None:
            raise InvalidInput(
                f"kind {name!r} has no price", where="fleet.prices", hint="set its USD per hour, 0 if it costs nothing"
            )
    return problem.floor_tokens_per_s


def _mixes(problem: Problem) -> Iterator[tuple[Device, ...]]:
    """Sets of machines to rent. Machines with the same devices are alike; those with overridden devices, or in use by the
    plan in force, come first of their type, and pinned ones are always rented."""
    pinned = {o.device for o in problem.overrides if o.kind == "pin" and o.role != "idle"}
    special = {o.device for o in problem.overrides}
    machines: dict[str, list[Device]] = {}
    for d in problem.cluster.devices:
        machines.setdefault(d.node, []).append(d)
    always, types = [], dict[tuple[object, ...], list[list[Device]]]()
    for node, devices in machines.items():
        if any(d.id in pinned for d in devices):
            always.append(devices)
            continue
        alone = node if any(d.id in special for d in devices) else ""
        key = (tuple(sorted((d.kind, d.region) for d in devices)), alone)
        types.setdefault(key, []).append(devices)
    force = problem.in_force
    if force is not None:
        for group in types.values():
            group.sort(key=lambda ds: -sum(force.role_of(d.id) != "idle" for d in ds))
    counts = [range(len(g) + 1) for g in types.values()]
    total = 1
    for c in counts:
        total *= len(c)
    if total > _MOST_MIXES:
        raise InvalidInput(
            "too many kinds of machine to choose from", got=total, expected=f"at most {_MOST_MIXES} mixes of machines"
        )
    for chosen in itertools.product(*counts):
        rented = [ds for n, g in zip(chosen, types.values(), strict=True) for ds in g[:n]] + always
        if rented:
            keep = {d.id for ds in rented for d in ds}
            yield tuple(d for d in problem.cluster.devices if d.id in keep)


def _restricted(problem: Problem, devices: tuple[Device, ...]) -> Problem:
    ids = {d.id for d in devices}
    force = problem.in_force
    if force is not None and any(d not in ids for p in force.placements for d in p.devices):
        force = None
    return replace(
        problem,
        cluster=replace(problem.cluster, devices=devices),
        overrides=tuple(o for o in problem.overrides if o.device in ids),
        objective="throughput",
        in_force=force,
    )


def _price(problem: Problem) -> float:
    kinds = problem.cluster.kinds
    return sum(kinds[d.kind].price_usd_per_h or 0.0 for d in problem.cluster.devices)


def _per_dollar(tokens_per_s: float, usd_per_h: float) -> float:
    return tokens_per_s / usd_per_h if usd_per_h > 0 else float("inf")


def _ratio(found: Feasible) -> float:
    return _per_dollar(found.prediction.tokens_per_s, found.prediction.usd_per_h or 0.0)


def _told(found: Feasible, ceiling: float) -> Feasible:
    """Say what was optimised."""
    usd = found.prediction.usd_per_h or 0.0
    line = f"${usd:.2f}/h of machines: {_ratio(found):,.1f} tokens/s per $/h, no mix of machines exceeds {ceiling:,.1f}"
    e = found.explanation
    return replace(found, explanation=Explanation(headline=e.headline, lines=(line, *e.lines)))
