"""When to plan, and what becomes of the answer: hard triggers at once, joins and drift coalesced, consent where it is due.

Failure repair and an operator's command never wait for consent; an improvement (a device joined, or is slow) does in mode
`ask`. Where devices only drifted, plans are a cool-down apart, and one that is not worth its move is not taken.
"""

from collections.abc import Collection
from typing import Literal

from planner.plan import Plan
from planner.record import record, replace
from planner.solution import Feasible, Solution
from runtime.core.event import Event
from runtime.core.fleet_event import DeviceQuarantined
from runtime.core.held import mates_in_doubt, newcomers
from runtime.core.needing import Need
from runtime.core.plan_event import PlanAdopted, PlanFoundInfeasible, PlanKept, PlanProposed, ProposalExpired
from runtime.core.solved import PlanCause, SolvedPlan, shape
from runtime.core.state import ClusterState
from runtime.core.target import QUARANTINE_AFTER, against_override
from runtime.policy.drift import FIRST_MOVE_S, DriftRule, pays

HARD_QUIET_S = 0.5  # losses come in bursts: one plan for all of them
HARD_LONGEST_S = 3.0
JOIN_QUIET_S = 3.0
JOIN_LONGEST_S = 15.0
RETRY_S = 10.0  # after a planner that broke


@record
class ConsentRule:
    """Who says yes to an improvement."""

    mode: Literal["auto", "ask"] = "auto"
    expires_s: float = 120.0


def due(
    state: ClusterState, now_s: float, *, drift: DriftRule | None = None, doubtful: Collection[str] = ()
) -> Need | None:
    """The need for a plan that should be worked on now, or None. Losses and operators at once, joins and drift when they
    pause. Drift alone waits for the cool-down of the rule `drift` from the last planning for it, unless for mates of those
    planned for then; and, as long as joins may be gathered, for mates that are `doubtful`."""
    if state.ending:
        return None
    need = state.need
    if need is None:
        failed = state.planning_failed_at_s
        if state.plan is None and failed is not None and now_s - failed >= RETRY_S:
            return _retry(state, failed)
        return None
    failed_s = state.planning_failed_at_s
    if failed_s is not None and failed_s >= need.last_s and now_s - failed_s < RETRY_S:
        return None  # the planner broke on just this: not at once again
    if need.causes & {"operator", "start"}:
        return need
    drifted = need.causes == {"drift"}
    if drifted and _cools_down(state, drift, now_s) and not newcomers(state):
        return None
    hard = bool(need.causes & {"loss", "quarantine"})
    quiet_s, longest_s = (HARD_QUIET_S, HARD_LONGEST_S) if hard else (JOIN_QUIET_S, JOIN_LONGEST_S)
    pausing = now_s - need.last_s >= quiet_s and not (drifted and mates_in_doubt(state, doubtful))
    return need if pausing or now_s - need.since_s >= longest_s else None


def _cools_down(state: ClusterState, rule: DriftRule | None, now_s: float) -> bool:
    last = state.drift_planned
    return rule is not None and last is not None and now_s - last.at_s < rule.cooldown_s


def move_s(state: ClusterState) -> float:
    """What a move costs the run, in seconds of it: the longer of the newest starts of a replica and a trainer."""
    return max(state.start_s.values(), default=FIRST_MOVE_S)


def _retry(state: ClusterState, failed_s: float) -> Need:
    cause: PlanCause = "start"
    reasons = ("the last planning failed",)
    return Need(
        causes=frozenset({cause}),
        reasons=reasons,
        since_s=failed_s,
        last_s=failed_s,
        rev=state.need_rev,
        urgent_rev=state.need_rev,
    )


def verdicts(state: ClusterState, now_s: float) -> tuple[Event, ...]:
    """What time and counters decide without any observation: quarantine, and proposals nobody answered."""
    events: list[Event] = []
    for d in state.present:
        if d.failures >= QUARANTINE_AFTER and not d.quarantined:
            reason = next(
                (u.reason for u in state.units.values() if d.id in u.devices and u.reason), "units failed on it"
            )
            events.append(DeviceQuarantined(device=d.id, failures=d.failures, reason=reason))
    if state.proposal is not None and now_s >= state.proposal.expires_at_s:
        events.append(ProposalExpired(rev=state.proposal.solved.rev))
    return tuple(events)


def trigger_words(need: Need) -> str:
    """What led to a plan, in words."""
    return ", ".join(dict.fromkeys(need.reasons))


def judge(
    state: ClusterState,
    need: Need,
    solution: Solution,
    *,
    solve_s: float,
    rule: ConsentRule,
    now_s: float,
    now_tokens_per_s: float | None = None,
    drift: DriftRule | None = None,
) -> Event:
    """What becomes of the planner's answer: adopted, proposed, kept or infeasible.

    `now_tokens_per_s`: prediction of the plan in force under the same problem as the answer's, so that a calibration that
    changed since it was made is not taken for a gain; None: as it was predicted when it was made. `drift` says what a move
    must earn where devices only drifted.
    """
    trigger = trigger_words(need)
    if not isinstance(solution, Feasible):
        return PlanFoundInfeasible(trigger=trigger, message=solution.message, need_rev=need.rev)
    in_force = state.plan
    if in_force is not None and shape(in_force.plan) == shape(solution.plan):
        return PlanKept(trigger=trigger, solve_s=solve_s, need_rev=need.rev)
    if drift is not None and need.causes == {"drift"} and now_tokens_per_s is not None:
        then, cost_s = solution.prediction.tokens_per_s, move_s(state)
        if not pays(now_tokens_per_s, then, cost_s, drift):
            gain = then / now_tokens_per_s - 1
            why = (
                f"{gain:+.1%} tokens/s would not pay for a move of {cost_s:.0f} s within {drift.payback_s / 60:.0f} min"
            )
            return PlanKept(trigger=trigger, solve_s=solve_s, need_rev=need.rev, why=why)
    solved = solved_plan(solution, rev=state.plan_rev + 1, trigger=trigger, solve_s=solve_s, now_s=now_s)
    if rule.mode == "ask" and in_force is not None and not _without_asking(state, need, in_force, solution.plan):
        now = now_tokens_per_s or in_force.prediction.tokens_per_s
        share = solution.prediction.tokens_per_s / now - 1.0 if now > 0 else None
        return PlanProposed(solved=solved, expires_at_s=now_s + rule.expires_s, gain_share=share, need_rev=need.rev)
    return PlanAdopted(solved=solved, need_rev=need.rev)


def solved_plan(solution: Feasible, *, rev: int, trigger: str, solve_s: float, now_s: float) -> SolvedPlan:
    """The solution under a revision."""
    return SolvedPlan(
        rev=rev,
        plan=solution.plan,
        prediction=solution.prediction,
        scheduler=solution.scheduler,
        bound_tokens_per_s=solution.bound_tokens_per_s,
        bound_scope=solution.bound_scope,
        gap=solution.gap,
        solve_s=solve_s,
        finished=solution.finished,
        headline=solution.explanation.headline,
        why=solution.explanation.lines,
        trigger=trigger,
        made_at_s=now_s,
    )


def _without_asking(state: ClusterState, need: Need, in_force: SolvedPlan, new: Plan) -> bool:
    """An operator's command is its own consent; so is a repair that the run cannot go on without, or that moves nothing."""
    if need.causes & {"operator", "start"}:
        return True
    if _unmet_pins(state, new) < _unmet_pins(state, in_force.plan):
        return True  # the operator said so before
    rest = surviving(state, in_force.plan)
    if rest.train is None or not rest.rollouts:
        return True
    return bool(need.causes & {"loss", "quarantine"}) and shape(rest) == shape(new)


def _unmet_pins(state: ClusterState, plan: Plan) -> int:
    """Pins of devices that are there which the plan does not follow."""
    there = {d.id for d in state.present}
    return sum(1 for o in state.overrides if o.kind == "pin" and o.device in there and plan.role_of(o.device) != o.role)


def surviving(state: ClusterState, plan: Plan) -> Plan:
    """What is left of a plan without the devices that are lost or forbidden by now."""

    def usable(device: str, role: str) -> bool:
        return not against_override(state, device, role)

    kept = tuple(p for p in plan.placements if all(usable(d, p.role) for d in p.devices))
    return replace(plan, placements=kept)
