"""`repair`: a valid plan at once after a loss, moving as little as it can. No MILP, no scan, no bound.

What lost a device is dropped, everything else stays. A broken trainer comes back where it can: on what is left of its own
devices with the same blocks and a smaller DP, else with idle devices, else with those of whole replicas, of its own kinds
and the nearest machines first. Devices left over generate. The good plan is another matter: `solve` follows.
"""

from planner.api import solve
from planner.judge import violations
from planner.mending import Mending
from planner.plan import Plan
from planner.problem import Budget, Problem
from planner.record import replace
from planner.resolve import broken_freezes, resolved
from planner.solution import Feasible, Infeasible, Repaired

Repair = Repaired | Feasible | Infeasible

_FALLBACK = Budget(evaluations=64, mip_seconds=0.5)


def repair(problem: Problem, previous: Plan) -> Repair:
    """A plan for `problem` as near as possible to `previous`, some of whose devices may be gone, cordoned or pinned elsewhere.

    Overrides of devices that are gone mean nothing any more, and a freeze ends where its placement cannot stay; the
    explanation says so. Where nothing near is found, a short search answers (Feasible, with its bound) or says why there is
    no plan (Infeasible).
    """
    standing, notes = _standing(replace(problem, in_force=problem.in_force or previous))
    fix = Mending(resolved(standing), previous)
    found = fix.plan()
    if found is not None and not violations(found.plan, standing):
        return fix.told(found, notes)
    # Some plan now: what to rent and how much to reach is for the search that follows.
    plain = replace(standing, objective="throughput", floor_tokens_per_s=None)
    return solve(plain, scheduler="hex", budget=_FALLBACK)


def _standing(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    """The problem without overrides that a loss has made void, and what they were."""
    ids = {d.id for d in problem.cluster.devices}
    lost = [f"freeze of {', '.join(p.devices[:4])} ends: {why}" for p, why in broken_freezes(problem)]
    void = {d for p, _ in broken_freezes(problem) for d in p.devices}
    kept = tuple(o for o in problem.overrides if o.device in ids and not (o.kind == "freeze" and o.device in void))
    gone = sorted({o.device for o in problem.overrides} - ids)
    if gone:
        lost.append(f"overrides of devices that are gone mean nothing: {', '.join(gone[:4])}")
    return replace(problem, overrides=kept), tuple(dict.fromkeys(lost))
