"""When a plan is due and what becomes of the answer."""

from typing import Literal

import pytest
from values import NOW_S, fleet, solved, started, stored

from planner.override import Override
from planner.solution import Conflict, Explanation, Feasible, Infeasible
from runtime.core.event import DaemonStarted, Event, RunEnded, RunEndRequested
from runtime.core.fleet_event import DeviceDrifted, DeviceJoined, DeviceLost
from runtime.core.fold import fold
from runtime.core.needing import Need, outdates
from runtime.core.plan_event import (
    OverrideSet,
    PlanAdopted,
    PlanFoundInfeasible,
    PlanKept,
    PlanningFailed,
    PlanningStarted,
    PlanProposed,
    ProposalExpired,
)
from runtime.core.solved import SolvedPlan
from runtime.core.state import ClusterState
from runtime.core.trigger import RETRY_S, ConsentRule, due, judge, move_s, verdicts
from runtime.policy.drift import FIRST_MOVE_S, DriftRule

FORCE = solved("a", "b", "c")
JOINED = DeviceJoined(device="d", kind="k", node="n0", index=3)
LOST = DeviceLost(device="c", reason="gone")
PINNED = OverrideSet(override=Override(device="b", kind="pin", role="train"), rev=1)


def after(*events: Event, at_s: float = NOW_S) -> ClusterState:
    return fold(fleet("a", "b", "c", plan=FORCE), stored(*events, at_s=at_s))


def need(state: ClusterState) -> Need:
    assert state.need is not None
    return state.need


def feasible(plan: SolvedPlan) -> Feasible:
    return Feasible(
        plan=plan.plan,
        prediction=plan.prediction,
        bound_tokens_per_s=400.0,
        bound_scope="toy",
        explanation=Explanation(headline="h"),
        scheduler="toy",
        evaluations=1,
    )


def verdict(state: ClusterState, plan: SolvedPlan, mode: Literal["auto", "ask"] = "ask") -> Event:
    rule = ConsentRule(mode=mode, expires_s=60)
    return judge(state, need(state), feasible(plan), solve_s=0.5, rule=rule, now_s=NOW_S)


@pytest.mark.parametrize(("event", "quiet_s", "longest_s"), [(JOINED, 3.0, 15.0), (LOST, 0.5, 3.0), (PINNED, 0.0, 0.0)])
def test_joins_are_gathered_losses_nearly_not_operators_never(event: Event, quiet_s: float, longest_s: float) -> None:
    state = after(event)
    if quiet_s:
        assert due(state, NOW_S + quiet_s - 0.1) is None
    assert due(state, NOW_S + quiet_s) == state.need
    if longest_s:
        more = fold(state, stored(event, at_s=NOW_S + longest_s - 0.1))
        assert due(more, NOW_S + longest_s) == more.need or event is LOST


def test_nothing_is_planned_while_the_run_ends_and_when_nothing_is_needed() -> None:
    assert due(fleet("a", "b", "c", plan=FORCE), NOW_S + 99) is None
    assert due(after(PINNED, RunEndRequested(reason="down")), NOW_S + 99) is None


def test_a_broken_planner_is_tried_again_while_there_is_no_plan() -> None:
    state = fold(fleet("a", "b"), stored(PlanningFailed(trigger="", message="boom", need_rev=99)))
    assert due(state, NOW_S + 9) is None
    assert due(state, NOW_S + 10) is not None


def test_only_joins_let_a_planning_under_way_finish() -> None:
    first = need(after(JOINED))
    again = need(fold(after(JOINED), stored(DeviceJoined(device="e", kind="k", node="n0", index=4))))
    assert not outdates(again, first)
    assert outdates(need(fold(after(JOINED), stored(LOST))), first)
    assert not outdates(first, first)


@pytest.mark.parametrize(
    ("event", "plan", "mode", "expected"),
    [
        (JOINED, solved("a", "b", "c", "d"), "auto", PlanAdopted),
        (JOINED, solved("a", "b", "c", "d"), "ask", PlanProposed),
        (JOINED, FORCE, "ask", PlanKept),
        (PINNED, solved("b", "a", "c"), "ask", PlanAdopted),  # the command is its own consent
        (LOST, solved("a", "b"), "ask", PlanAdopted),  # repair that moves nothing
        (LOST, solved("b", "a"), "ask", PlanProposed),  # repair done by leaving out; the rest is an improvement
    ],
)
def test_consent(event: Event, plan: SolvedPlan, mode: Literal["auto", "ask"], expected: type) -> None:
    assert type(verdict(after(event), plan, mode)) is expected


def test_a_repair_without_which_nothing_trains_never_asks() -> None:
    state = after(DeviceLost(device="a", reason="gone"))
    assert type(verdict(state, solved("b", "c"))) is PlanAdopted


def test_a_pin_that_a_join_makes_possible_was_consented_to_before() -> None:
    pin_d = OverrideSet(override=Override(device="d", kind="pin", role="train"), rev=1)
    state = after(pin_d, PlanKept(trigger="", solve_s=0.1, need_rev=99))
    state = fold(state, stored(JOINED))
    assert type(verdict(state, solved("d", "a", "b", "c"))) is PlanAdopted
    assert type(verdict(state, solved("a", "b", "c", "d"))) is PlanProposed


def test_revisions_grow_and_gain_is_against_the_plan_in_force() -> None:
    adopted = verdict(after(PINNED), solved("b", "a", "c"), "auto")
    assert isinstance(adopted, PlanAdopted)
    assert (adopted.solved.rev, adopted.solved.trigger) == (2, "pin n0/gpu1 to train")
    proposed = verdict(after(JOINED), solved("a", "b", "c", "d"))
    assert isinstance(proposed, PlanProposed)
    assert (proposed.gain_share, proposed.expires_at_s) == (0.0, NOW_S + 60)


def test_infeasible_is_an_event_and_the_plan_stays() -> None:
    state = after(LOST)
    none = Infeasible(conflicts=(Conflict(limit="memory", detail="too large"),), scheduler="toy")
    event = judge(state, need(state), none, solve_s=0.1, rule=ConsentRule(), now_s=NOW_S)
    state = fold(state, stored(event))
    assert state.infeasible == "memory: too large"
    assert state.plan is not None
    assert state.need is None


def test_time_expires_proposals_and_counts_quarantine() -> None:
    state = after(PlanProposed(solved=solved("a", "b", rev=2), expires_at_s=NOW_S + 5, gain_share=None))
    assert verdicts(state, NOW_S + 4) == ()
    assert verdicts(state, NOW_S + 5) == (ProposalExpired(rev=2),)


def test_a_join_does_not_throw_a_planning_away() -> None:
    worked_on = need(after(LOST))
    state = fold(after(LOST), stored(JOINED))
    assert not outdates(need(state), worked_on)
    assert outdates(need(fold(state, stored(PINNED))), worked_on)


def test_a_planning_that_broke_is_tried_again_and_said() -> None:
    asked = after(PINNED)
    failed = PlanningFailed(trigger="pin", message="the planner died", need_rev=need(asked).rev)
    state = fold(asked, stored(failed, at_s=NOW_S + 1))
    assert state.need == asked.need
    assert due(state, NOW_S + 1 + RETRY_S - 0.1) is None
    assert due(state, NOW_S + 1 + RETRY_S) == state.need
    newer = fold(state, stored(LOST, at_s=NOW_S + 2))
    assert due(newer, NOW_S + 3) == newer.need, "a new reason does not wait for the old one's rest"
    kept = fold(state, stored(PlanKept(trigger="pin", solve_s=0.1, need_rev=need(state).rev), at_s=NOW_S + 20))
    assert (kept.need, kept.planning_failed_at_s) == (None, None)


def test_a_run_that_ended_starts_with_a_clean_sheet() -> None:
    ended = after(
        PlanFoundInfeasible(trigger="x", message="two devices are needed", need_rev=99),
        RunEnded(reason="down"),
        DaemonStarted(epoch=2, pid=1, adopted=False),
    )
    assert (ended.infeasible, ended.plan) == ("", None)
    assert need(ended).causes == {"start"}
    assert {u.status for u in ended.units.values()} <= {"stopped"}


# ---- drift

DRIFTED = DeviceDrifted(
    devices=("a",), role="train", speed=0.5, before=1.0, share=0.5, for_s=30.0, measured_tokens_per_s=200.0,
    assumed_tokens_per_s=400.0,
)  # fmt: skip
OTHER = solved("b", "a", "c", rev=2)  # 300 tokens/s


def judged(state: ClusterState, now_tokens_per_s: float, mode: Literal["auto", "ask"] = "auto") -> Event:
    return judge(
        state, need(state), feasible(OTHER), solve_s=0.5, rule=ConsentRule(mode=mode, expires_s=60), now_s=NOW_S,
        now_tokens_per_s=now_tokens_per_s, drift=DriftRule(),
    )  # fmt: skip


def test_drift_is_gathered_as_joins_are_and_does_not_end_a_planning_under_way() -> None:
    state = after(DRIFTED)
    assert state.devices["a"].speed == 0.5
    assert due(state, NOW_S + 2.9, drift=DriftRule()) is None
    assert due(state, NOW_S + 3.0, drift=DriftRule()) == state.need
    assert not outdates(need(fold(after(JOINED), stored(DRIFTED))), need(after(JOINED)))


def test_the_cool_down_counts_from_the_last_planning_for_drift() -> None:
    planned = (PlanningStarted(trigger="", drift=True), PlanKept(trigger="", solve_s=0.1, need_rev=10**9))
    state = fold(after(DRIFTED, *planned), stored(DRIFTED, at_s=NOW_S + 50))
    assert due(state, NOW_S + 119.9, drift=DriftRule()) is None
    assert due(state, NOW_S + 120.0, drift=DriftRule()) == state.need
    lost = fold(state, stored(LOST, at_s=NOW_S + 50))
    assert due(lost, NOW_S + 51, drift=DriftRule()) == lost.need


def test_a_move_for_drift_must_pay_and_an_unpaid_one_says_so() -> None:
    """60 s before any start was seen: 1.5 x 60 / 1800 = 5 %."""
    state = fold(fleet("a", "b", "c", plan=FORCE), stored(DRIFTED))
    assert move_s(state) == FIRST_MOVE_S
    kept = judged(state, 300 / 1.049)
    assert isinstance(kept, PlanKept)
    assert kept.why == "+4.9% tokens/s would not pay for a move of 60 s within 30 min"
    assert isinstance(judged(state, 300 / 1.051), PlanAdopted)


def test_a_move_costs_what_the_newest_starts_took() -> None:
    state = fold(fleet("a", "b", "c", plan=FORCE), stored(*started("t0", "a"), *started("r0", "b"), DRIFTED))
    assert move_s(state) == 1.0
    assert isinstance(judged(state, 300 / 1.049), PlanAdopted)


def test_a_loss_beside_drift_need_not_pay_and_drift_alone_asks_where_improvements_do() -> None:
    state = fold(fleet("a", "b", "c", plan=FORCE), stored(DRIFTED))
    assert isinstance(judged(state, 200.0, "ask"), PlanProposed)
    assert isinstance(judged(fold(state, stored(LOST)), 299.0), PlanAdopted)


def test_before_the_first_plan_drift_is_no_reason() -> None:
    state = fold(fleet("a", "b"), stored(DRIFTED))
    assert state.need is None or "drift" not in state.need.causes
    assert state.devices["a"].speed == 0.5
