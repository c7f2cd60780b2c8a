"""What holds a plan back, and what one change would give.

`held_back_by` asks the cost model about the same plan with a tenth more of one resource at a time. `actions` solves the problem
again with one change at a time. Both are predictions; beside each action stands the most that any plan could gain by it.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from planner.cluster import Cluster, Link
from planner.cost.model import CostModel
from planner.plan import Plan
from planner.problem import Problem
from planner.record import record, replace
from planner.solution import Feasible, Solution
from planner.whatif import with_devices, without_devices

MORE = 1.1  # of a resource
_WORTH_SAYING = 5e-4  # of the step


@record
class Pressure:
    """How much shorter the step of the same plan is with a tenth more of something."""

    what: str
    gain: float  # tokens/s with it over without, less 1; predicted


@record
class Action:
    """One change and what the plan solved anew under it gives."""

    what: str
    gain: float | None  # tokens/s, predicted, against the plan; None where the change leaves no plan
    at_most: float | None  # no plan gains more, by the bound; None where the change leaves no plan
    finished: bool = True  # False: stopped early, the gain may be larger


def held_back_by(problem: Problem, plan: Plan) -> tuple[Pressure, ...]:
    """What the step of this plan depends on, the strongest first. Empty where more of nothing helps."""
    # Concurrency is chosen anew: it is what more memory buys.
    free = Plan(placements=tuple(replace(p, max_running=None) if p.role == "rollout" else p for p in plan.placements))
    now = CostModel(problem).evaluate(free)
    if now is None:
        return ()
    out = []
    for what, other in _tenths(problem, plan):
        then = CostModel(other).evaluate(free)
        if then is not None:
            gain = then.prediction.tokens_per_s / now.prediction.tokens_per_s - 1
            if gain > _WORTH_SAYING:
                out.append(Pressure(what=what, gain=gain))
    return tuple(sorted(out, key=lambda p: (-p.gain, p.what)))


def _tenths(problem: Problem, plan: Plan) -> Iterator[tuple[str, Problem]]:
    """The problem with a tenth more of each resource. Kinds by role: only those of the plan matter."""
    cluster, w = problem.cluster, problem.workload
    kinds = {d.id: d.kind for d in cluster.devices}
    train = {kinds[d] for p in plan.sides for d in p.devices}
    roll = {r.kind for r in plan.rollouts}
    for k in sorted(train | roll):
        roles = " and ".join(r for r, of in (("training", train), ("rollout", roll)) if k in of)
        kind = cluster.kinds[k]
        yield f"compute of {k} ({roles})", _with_kind(problem, k, peak_flops=kind.peak_flops * MORE)
        yield f"HBM bandwidth of {k} ({roles})", _with_kind(problem, k, hbm_bytes_per_s=kind.hbm_bytes_per_s * MORE)
        word = "KV memory" if k in roll else "memory"
        yield f"{word} of {k} ({roles})", _with_kind(problem, k, memory_bytes=kind.memory_bytes * MORE)
        yield f"link inside machines of {k}", _with_kind(problem, k, link_bytes_per_s=kind.link_bytes_per_s * MORE)
        if kind.launch_s:
            yield f"kernel launches on {k} ({roles})", _with_kind(problem, k, launch_s=kind.launch_s / MORE)
        if kind.decode_floor_s and k in roll:
            less = _with_kind(problem, k, decode_floor_s=kind.decode_floor_s / MORE)
            yield f"host time of the engine on {k} (rollout)", less
    for name, other in _links(cluster, MORE):
        yield name, replace(problem, cluster=other)
    if not w.synchronous:
        yield "staleness bound (one more step)", replace(problem, workload=replace(w, eta=w.eta + 1))
    if w.update_mode != "overlapped" and not problem.capabilities.direct_updates:
        yield "weight update (overlapped)", replace(problem, workload=replace(w, update_mode="overlapped"))
    if w.reward_s_per_sample > 0:
        faster = replace(w, reward_s_per_sample=w.reward_s_per_sample / MORE)
        yield "rewards on CPUs", replace(problem, workload=faster)


def _links(cluster: Cluster, times: float) -> Iterator[tuple[str, Cluster]]:
    """The cluster with each class of link that devices can use made faster."""

    def faster(link: Link) -> Link:
        return Link(latency_s=link.latency_s, bytes_per_s=link.bytes_per_s * times)

    if len({d.node for d in cluster.devices}) > 1:
        yield "links between machines of a kind", replace(cluster, same_kind=faster(cluster.same_kind))
        if len({d.kind for d in cluster.devices}) > 1:
            yield "links between kinds", replace(cluster, cross_kind=faster(cluster.cross_kind))
    if len({d.region for d in cluster.devices}) > 1:
        pairs = {pair: faster(link) for pair, link in cluster.regions.items()}
        yield "links between regions", replace(cluster, cross_region=faster(cluster.cross_region), regions=pairs)


def _with_kind(problem: Problem, name: str, **changes: float) -> Problem:
    cluster = problem.cluster
    kind = replace(cluster.kinds[name], **changes)
    return replace(problem, cluster=replace(cluster, kinds={**cluster.kinds, name: kind}))


def actions(
    problem: Problem,
    found: Feasible,
    solve: Callable[[Problem], Solution],
    *,
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[Action, ...]:
    """What each change gives, the largest gain first; those solved before `should_stop`.

    Every solve starts from the plan found where that is still valid, so that no change looks worse than it is for want of
    search. What a switch costs does not count here.
    """
    keeps = any(o.kind in ("keep", "freeze") for o in problem.overrides)
    base = replace(problem, switch_s=0.0, in_force=problem.in_force if keeps else found.plan)
    out: list[Action] = []
    for what, other in changes_of(base, found.plan):
        if should_stop():
            break
        after = solve(other)
        if isinstance(after, Feasible):
            now = found.prediction.tokens_per_s
            out.append(
                Action(
                    what=what,
                    gain=after.prediction.tokens_per_s / now - 1,
                    at_most=after.bound_tokens_per_s / now - 1,
                    finished=after.finished,
                )
            )
        else:
            out.append(Action(what=what, gain=None, at_most=None))
    return tuple(sorted(out, key=lambda a: float("inf") if a.gain is None else -a.gain))


def changes_of(problem: Problem, plan: Plan) -> Iterator[tuple[str, Problem]]:
    """The changes worth asking about: one more and one fewer of each kind, eta, KV, links, memory."""
    cluster, w = problem.cluster, problem.workload
    counts = Counter(d.kind for d in cluster.devices)
    for k in counts:
        yield f"one more {k}", with_devices(problem, cluster.kinds[k], 1)
    for k in counts:
        gone = _least_missed(problem, plan, k)
        if gone is not None:
            yield f"one {k} fewer", without_devices(problem, {gone})
    if not w.synchronous:
        yield f"eta {w.eta * 2} instead of {w.eta}", replace(problem, workload=replace(w, eta=w.eta * 2))
        if w.kv_on_update == "recompute":
            kept = replace(problem, workload=replace(w, kv_on_update="keep"))
            yield "KV caches kept on a weight update", kept
    for name, other in _links(cluster, 10.0):
        yield f"{name} ten times as fast", replace(problem, cluster=other)
    kinds = {d.id: d.kind for d in cluster.devices}
    for k in sorted({kinds[d] for p in plan.placements for d in p.devices}):
        yield f"twice the memory of {k}", _with_kind(problem, k, memory_bytes=2 * cluster.kinds[k].memory_bytes)
    if problem.capabilities.rollout_max_running is not None:
        more = replace(problem.capabilities, rollout_max_running=None)
        yield "no limit on samples an engine runs at once", replace(problem, capabilities=more)


def _least_missed(problem: Problem, plan: Plan, kind: str) -> str | None:
    """A device of a kind that no override names: an idle one, else one of the smallest machine."""
    said = {o.device for o in problem.overrides}
    sizes = Counter(d.node for d in problem.cluster.devices)
    mine = [d for d in problem.cluster.devices if d.kind == kind and d.id not in said]
    used = {d for p in plan.placements for d in p.devices}
    return min(mine, key=lambda d: (d.id in used, sizes[d.node], d.node, -d.index)).id if mine else None
