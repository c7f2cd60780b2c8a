"""Throughput per dollar on the fleet at hand: which machines to keep renting.

An idle device of a rented machine costs as much as a busy one, so machines are rented whole. The mixes of machines are
searched best first (`planner.mixes`); what to rent on a market is asked of `planner.desk`.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable

from planner.cluster import Device
from planner.cost.model import CostModel
from planner.errors import InvalidInput
from planner.fluid import Fluid, device_rates
from planner.goals import MostPerUsd
from planner.market import Counts
from planner.mixes import Best, Evaluated, Machines, MixSearch, Outcome
from planner.problem import Problem
from planner.record import replace
from planner.solution import Conflict, Explanation, Feasible, Infeasible, Solution
from planner.space import role_limits


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
    machines = _machines(problem)
    kinds = sorted({d.kind for d in problem.cluster.devices})
    fluid = Fluid(
        device_rates(CostModel(problem), kinds),
        machines.holds,
        machines.prices,
        always=machines.always,
        always_usd_per_h=machines.always_usd_per_h,
    )
    goal = MostPerUsd(machines=machines, fluid=fluid, floor_tokens_per_s=floor, limit_usd_per_h=math.inf)

    found: list[Best] = []

    def improved(best: Best, bound: float) -> None:
        found.append(best)
        if on_incumbent is not None:
            on_incumbent(_told(best, bound))

    def stopped() -> bool:
        return bool(found) and should_stop()  # a stop still gets an answer

    search = MixSearch(machines, Evaluated(machines, throughput), goal, should_stop=stopped, on_improved=improved)
    outcome = search.run()
    if outcome.best is None:
        return _beyond(problem, floor, scheduler, throughput, outcome)
    told = _told(outcome.best, outcome.bound)
    return replace(told, finished=told.finished and outcome.finished)


def _beyond(
    problem: Problem, floor: float, scheduler: str, throughput: Callable[[Problem], Solution], outcome: Outcome
) -> Infeasible:
    """Why no mix does: no plan at all, or the floor."""
    whole = throughput(replace(problem, objective="throughput", floor_tokens_per_s=None))
    if isinstance(whole, Infeasible):
        return whole
    detail = f"{floor:,.0f} tokens/s asked for, " + (
        f"no plan exceeds {whole.bound_tokens_per_s:,.0f}" if outcome.finished else "no plan was found that reaches it"
    )
    return Infeasible(conflicts=(Conflict(limit="floor_tokens_per_s", detail=detail),), scheduler=scheduler)


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


def _machines(problem: Problem) -> Machines:
    """What there is to rent. Machines with the same devices are alike; those with overridden devices are of a type of their
    own, those in use by the plan in force come first of their type, and pinned ones are always rented."""
    pinned = {o.device for o in problem.overrides if o.kind == "pin" and o.role != "idle"}
    special = {o.device for o in problem.overrides}
    by_node: dict[str, list[Device]] = {}
    for d in problem.cluster.devices:
        by_node.setdefault(d.node, []).append(d)
    always: list[Device] = []
    types: dict[tuple[object, ...], list[list[Device]]] = {}
    for node, devices in by_node.items():
        if any(d.id in pinned for d in devices):
            always += devices
            continue
        alone = node if any(d.id in special for d in devices) else ""
        types.setdefault((tuple(sorted((d.kind, d.region) for d in devices)), alone), []).append(devices)
    force = problem.in_force
    if force is not None:
        for group in types.values():
            group.sort(key=lambda ds: -sum(force.role_of(d.id) != "idle" for d in ds))
    groups = list(types.values())
    idle = {d for d, role in role_limits(problem.overrides).items() if role == "idle"}

    def build(counts: Counts) -> Problem:
        keep = {d.id for n, g in zip(counts, groups, strict=True) for ds in g[:n] for d in ds} | {d.id for d in always}
        return _restricted(problem, tuple(d for d in problem.cluster.devices if d.id in keep))

    def usable(devices: Iterable[Device]) -> Counter[str]:
        return Counter(d.kind for d in devices if d.id not in idle)

    largest: Counter[str] = Counter()
    for node in {d.node for d in always}:
        largest |= usable(d for d in always if d.node == node)
    return Machines(
        prices=tuple(_price(problem, g[0]) for g in groups),
        holds=tuple(usable(g[0]) for g in groups),
        most=tuple(len(g) for g in groups),
        build=build,
        always=usable(always),
        always_usd_per_h=_price(problem, always),
        always_largest=largest,
    )


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


def _price(problem: Problem, devices: Iterable[Device]) -> float:
    kinds = problem.cluster.kinds
    return math.fsum(kinds[d.kind].price_usd_per_h or 0.0 for d in devices)


def _told(best: Best, most: float) -> Feasible:
    """Say what was optimised."""
    p, e = best.found.prediction, best.found.explanation
    egress = p.egress_usd_per_step / p.step_s * 3600
    usd = (p.usd_per_h or 0.0) + egress
    ratio = p.tokens_per_s / usd if usd > 0 else math.inf
    what = "machines and egress" if egress else "machines"
    line = f"${usd:.2f}/h of {what}: {ratio:,.1f} tokens/s per $/h, no mix of machines exceeds {max(most, ratio):,.1f}"
    return replace(best.found, explanation=Explanation(headline=e.headline, lines=(line, *e.lines)))
