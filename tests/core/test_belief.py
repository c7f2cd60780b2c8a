"""Belief: single observations and what they are taken for. Unknown is not dead."""

import pytest
from values import NOW_S, device, fleet, flow, observed, replica, solved, started, status, stored, trainer

from runtime.core.actual import bodies
from runtime.core.belief import believe
from runtime.core.event import Event, FlowAnswered, FlowFellSilent, MilestoneReached
from runtime.core.fleet_event import (
    DeviceAnswered,
    DeviceBecameHostBound,
    DeviceCaughtUp,
    DeviceJoined,
    DeviceLost,
    DeviceWentStale,
    StepOrdered,
    UnitAdopted,
    UnitAppeared,
    UnitDied,
    UnitDrained,
    UnitServed,
    UnitStopped,
)
from runtime.core.fold import fold
from runtime.core.limits import Limits, Memory, stretched
from runtime.core.observation import Observation
from runtime.core.state import ClusterState

LIMITS = Limits()
PLAN = solved("a", "b")
UP = (*started("t0", "a"), *started("r0", "b"))


class Watch:
    """Observations one after the other, folded as the loop would."""

    def __init__(self, state: ClusterState) -> None:
        self.state, self.memory, self.now_s = state, Memory(), NOW_S
        self.events: list[Event] = []

    def see(self, obs: Observation, seconds: float = 0.5) -> list[Event]:
        """One observation `seconds` after the last; answers with what is new."""
        self.now_s += seconds
        events, self.memory = believe(obs, self.state, self.memory, LIMITS, self.now_s)
        self.state = fold(self.state, stored(*events, at_s=self.now_s))
        self.events += events
        return list(events)

    def keep(self, obs: Observation, seconds: float) -> list[Event]:
        """The same observation twice a second; answers with all that was new."""
        before = len(self.events)
        for _ in range(round(seconds * 2)):
            self.see(obs)
        return self.events[before:]


def settled() -> Watch:
    w = Watch(fleet("a", "b", plan=PLAN, more=UP))
    w.see(up())
    w.events.clear()
    return w


def up(*, age_s: float = 0.1, decoded: int = 0, flow_age_s: float = 0.2) -> Observation:
    of_flow = flow(status("r0", decoded=decoded))
    return observed(
        device("a"), device("b"), replica("r0", "b", age_s=age_s), trainer("a"), of_flow=of_flow, flow_age_s=flow_age_s
    )


def test_a_device_joins_once_and_comes_back_after_a_loss() -> None:
    w = Watch(ClusterState())
    assert w.see(observed(device("a"))) == [DeviceJoined(device="a", kind="k", node="n0", index=0)]
    assert w.keep(observed(device("a")), 5) == []
    assert [type(e) for e in w.see(observed(device("a", present=False, note="fallen off the bus")))] == [DeviceLost]
    assert w.state.devices["a"].lost == "fallen off the bus"
    assert w.keep(observed(device("a", present=False)), 5) == []
    assert [type(e) for e in w.see(observed(device("a")))] == [DeviceJoined]


@pytest.mark.parametrize("gone", [device("b", present=None, age_s=None), None])
def test_silence_is_stale_after_5_s_and_lost_only_after_60_s(gone: object) -> None:
    w = Watch(fleet("a", "b"))
    silent = observed(device("a"), *([gone] if gone is not None else []))  # type: ignore[list-item]
    assert w.keep(silent, 5) == []
    assert [type(e) for e in w.keep(silent, 55)] == [DeviceWentStale]
    assert [type(e) for e in w.keep(silent, 2)] == [DeviceLost]


def test_a_stale_device_that_answers_is_no_longer_stale() -> None:
    w = Watch(fleet("a", "b"))
    w.keep(observed(device("a"), device("b", present=None)), 10)
    assert w.state.devices["b"].stale
    assert w.see(observed(device("a"), device("b"))) == [DeviceAnswered(device="b")]
    assert not w.state.devices["b"].stale


def test_host_bound_needs_3_s_and_leaves_after_10_s() -> None:
    w = Watch(fleet("a"))
    behind, on_time = observed(device("a", host_bound=True)), observed(device("a", host_bound=False))
    w.keep(behind, 2)
    w.keep(on_time, 2)
    assert w.events == []
    assert [type(e) for e in w.keep(behind, 5)] == [DeviceBecameHostBound]
    assert w.keep(on_time, 9) == []
    assert w.keep(behind, 1) == []
    assert w.keep(on_time, 9) == []
    assert [type(e) for e in w.keep(on_time, 3)] == [DeviceCaughtUp]


def test_a_unit_appears_serves_and_drains() -> None:
    w = Watch(fleet("a", "b", plan=PLAN, more=started("r0", "b", serving=False)))

    def one(phase: str) -> list[Event]:
        return w.see(observed(device("a"), device("b"), replica("r0", "b", phase=phase), of_flow=flow(status("r0"))))

    assert UnitAppeared(unit="r0", epoch=1, pid=11) in one("starting")
    assert one("serving") == [UnitServed(unit="r0", epoch=1, version=3, after_s=1.0, pid=11)]
    assert one("serving") == []
    assert one("drained") == [UnitDrained(unit="r0", epoch=1)]


def test_a_dead_unit_says_why_and_what_it_held() -> None:
    w = settled()
    dead = observed(
        device("a"), device("b"), replica("r0", "b", phase="dead", reason="killed by signal 9", leased=0), trainer("a"),
        of_flow=flow(status("r0", leased=7)),
    )  # fmt: skip
    assert w.see(dead) == [UnitDied(unit="r0", epoch=1, reason="killed by signal 9", held=7)]
    assert w.keep(dead, 5) == []


def test_an_old_exchange_is_a_hang_but_not_while_flow_is_silent() -> None:
    w = settled()
    assert [type(e) for e in w.keep(up(age_s=100.0, flow_age_s=40.0), 60)] == [FlowFellSilent]
    assert [type(e) for e in w.see(up(age_s=1.0))] == [FlowAnswered]
    assert w.see(up(age_s=15.0)) == []
    assert w.see(up(age_s=15.5)) == [UnitDied(unit="r0", epoch=1, reason="last exchange 16 s ago", hung=True, held=8)]


def test_exchanges_without_tokens_are_a_hang_in_the_end() -> None:
    w = settled()
    decoded = 0
    for _ in range(100):
        decoded += 1
        assert w.see(up(decoded=decoded), 2.0) == []
    died = w.keep(up(decoded=decoded), 95)
    assert [type(e) for e in died] == [UnitDied]
    assert "decoded nothing" in died[0].reason  # type: ignore[union-attr]


def test_an_idle_replica_is_not_hung() -> None:
    w = settled()
    of_flow = flow(status("r0", running=0))
    idle = observed(device("a"), device("b"), replica("r0", "b", running=0), trainer("a"), of_flow=of_flow)
    assert w.keep(idle, 200) == []


def test_a_unit_nobody_can_see_is_unknown_for_60_s() -> None:
    w = settled()
    unknown = observed(device("a"), device("b"), replica("r0", "b", phase="unknown", age_s=None), trainer("a"))
    assert w.keep(unknown, 60) == []
    assert [type(e) for e in w.keep(unknown, 2)] == [UnitDied]


def test_a_living_unit_that_vanishes_is_dead_after_5_s_and_gone_once_stopped() -> None:
    w = settled()
    without = observed(device("a"), device("b"), trainer("a"), of_flow=flow())
    assert w.keep(without, 5) == []
    assert w.see(without) == [UnitDied(unit="r0", epoch=1, reason="disappeared")]
    assert w.keep(without, 30) == []
    stop = StepOrdered(id="stop-replica:r0:1", unit="r0", epoch=1, plan_rev=1)
    w.state = fold(w.state, stored(stop, at_s=w.now_s))
    assert w.keep(without, 2) == [UnitStopped(unit="r0", epoch=1)]


def test_an_end_that_was_ordered_is_no_death() -> None:
    w = settled()
    stop = StepOrdered(id="stop-replica:r0:1", unit="r0", epoch=1, plan_rev=1)
    w.state = fold(w.state, stored(stop, at_s=w.now_s))
    dying = observed(device("a"), device("b"), replica("r0", "b", phase="dead", reason="killed"), trainer("a"))
    assert w.keep(dying, 3) == []
    assert w.keep(observed(device("a"), device("b"), trainer("a")), 2) == [UnitStopped(unit="r0", epoch=1)]
    assert w.state.devices["b"].failures == 0


def test_a_unit_that_never_appears_dies_after_120_s() -> None:
    w = Watch(fleet("a", "b", plan=PLAN, more=started("r0", "b", serving=False)))
    nothing = observed(device("a"), device("b"))
    assert w.keep(nothing, 119) == []
    died = w.keep(nothing, 3)
    assert [type(e) for e in died] == [UnitDied]


def test_an_unrecorded_unit_is_adopted() -> None:
    w = Watch(fleet("a", "b"))
    seen = observed(device("a"), device("b"), replica("r4", "b", epoch=3), of_flow=flow())
    assert UnitAdopted(unit="r4", role="rollout", epoch=3, devices=("b",)) in w.see(seen)
    assert w.state.units["r4"].epoch == 3
    assert w.state.names[("b",)] == "r4"


def test_a_loss_of_its_device_is_not_the_units_failure() -> None:
    w = settled()
    gone = observed(device("a"), device("b", present=False), replica("r0", "b", phase="dead"), trainer("a"))
    events = w.see(gone)
    assert [type(e) for e in events] == [DeviceLost, UnitDied]
    assert w.state.devices["b"].failures == 0


def test_a_trainer_may_be_silent_for_twenty_of_its_steps() -> None:
    assert stretched(LIMITS, None) == stretched(LIMITS, 1.0) == LIMITS
    assert stretched(LIMITS, 100.0).trainer_silent_s == 2000.0


def test_rates_are_smoothed_over_5_s() -> None:
    w = settled()
    fast = observed(device("a"), device("b"), replica("r0", "b", tokens_per_s=200.0), trainer("a"), of_flow=flow())
    assert w.memory.rates["r0:1"].tokens_per_s == pytest.approx(100.0)
    w.see(fast, 5.0)
    assert w.memory.rates["r0:1"].tokens_per_s == pytest.approx(100.0 * 0.36788 + 200.0 * 0.63212, rel=1e-4)


def test_milestones_are_reached_once() -> None:
    from runtime.rl.types import WeightsRef

    w = Watch(fleet("a", "b", plan=PLAN, more=UP))
    ref = WeightsRef(lineage=0, version=0, path="p", digest="0123456789")
    obs = observed(device("a"), device("b"), replica("r0", "b"), trainer("a"), of_flow=flow(weights=ref, steps_done=1))
    names = [e.name for e in w.see(obs) if isinstance(e, MilestoneReached)]
    assert names == ["first weights", "first step"]
    assert w.see(obs) == []


def test_units_of_a_run_that_is_taken_over_late_are_not_dead_while_nobody_tells_of_them() -> None:
    """A new daemon's first look: flow has not been asked yet, no body has answered. The run is old."""
    w = settled()
    w.now_s += 400.0
    first_look = observed(
        device("a"), device("b"), replica("r0", "b", phase="starting"), trainer("a", phase="starting"), flow_age_s=None
    )
    assert not [e for e in w.keep(first_look, 20) if isinstance(e, UnitDied)]
    assert {b.phase for b in bodies(first_look, w.state)} == {"unknown"}
    died = [e for e in w.keep(first_look, LIMITS.start_s) if isinstance(e, UnitDied)]
    assert {e.unit for e in died} == {"t0", "r0"}  # but not for ever


def test_a_trainer_that_never_comes_to_its_step_boundary_is_hung() -> None:
    quiesced = StepOrdered(id="quiesce-trainer:t0:1", unit="t0", epoch=1, devices=(), plan_rev=1)
    w = Watch(fleet("a", plan=PLAN, more=(*started("t0", "a"), quiesced)))
    stuck = observed(device("a"), trainer("a", phase="quiescing", age_s=0.1))
    assert w.keep(stuck, LIMITS.trainer_silent_s - 5) == []
    (died,) = [e for e in w.keep(stuck, 10) if isinstance(e, UnitDied)]
    assert died.hung
    assert "no step boundary" in died.reason


def test_an_idle_device_is_not_host_bound() -> None:
    w = Watch(fleet("a"))
    w.keep(observed(device("a", host_bound=True)), 5)
    assert w.state.devices["a"].host_bound
    w.keep(observed(device("a", host_bound=None)), 12)
    assert not w.state.devices["a"].host_bound
