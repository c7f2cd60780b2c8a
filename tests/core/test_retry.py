"""Slow devices that the plan leaves idle, in virtual time: tried again, ever more rarely while they stay slow.

The fleet is a fast device and a spare one; the trainer is on the fast one unless that counts as slow, and nothing else works. So
the fast one is measured by nothing but the trainer.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from values import NOW_S, device, fleet, flow, observed, solved, started, stored, trainer

from planner.record import replace
from runtime.core.calibrating import Calibrating, Modelled, calibrate
from runtime.core.drifting import Drifting, aside, doubtful, drift, learned, remembered, speeds
from runtime.core.event import Event
from runtime.core.fleet_event import DeviceRetried
from runtime.core.fold import fold
from runtime.core.observation import Work
from runtime.core.plan_event import PlanAdopted, PlanKept, PlanningStarted
from runtime.core.trigger import JOIN_QUIET_S, due
from runtime.core.words import words
from runtime.policy.drift import MOST_DOUBLINGS, DriftRule

TICK_S = 5.0
MOVE_S = 60.0
RULE = DriftRule(retry_s=600.0)
PLANNED_S = JOIN_QUIET_S + RULE.cooldown_s + MOVE_S + 2 * TICK_S  # from a need to a trainer that has moved
FOUND_S = 3 * TICK_S + RULE.enter_s


class Ideal:
    """500 tokens/s of training."""

    def decode(self, kind: str, devices: int, work: Work) -> Modelled | None:
        raise AssertionError("nobody generates")

    def train(self, devices: tuple[str, ...], work: Work) -> Modelled | None:
        return Modelled(seconds=work.tokens / 500, tokens_per_s=400.0)


class Lone:
    """A trainer that closes a block every five seconds on the device `on`; `go` says at which share of its speed `fast` works.
    Both reach `wrong` of what is modelled of their kind."""

    def __init__(self, rule: DriftRule = RULE, *, wrong: float = 1.0) -> None:
        self.wrong, self.rule, self.now_s, self.on, self.epoch = wrong, rule, NOW_S, "fast", 1
        self.state = fleet("fast", "spare", plan=solved("fast"), more=started("t0", "fast"))
        self.calibrating, self.drifting = Calibrating(), Drifting()
        self.work, self.ready_s = Work(busy_s=10.0, steps=100, tokens=1000), NOW_S
        self.moves: list[float] = []
        self.events: list[Event] = []
        self.slow_s = 0.0  # of training on the fast device while that was slow
        self.go(200, 1.0)

    def go(self, seconds: float, share: float, *, plans: bool = True) -> None:
        for _ in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            if self.now_s >= self.ready_s:
                self._train(share if self.on == "fast" else 1.0)
            self._look()
            if plans:
                self._plan()

    def until(self, on: str, share: float, most_s: float) -> float:
        """Seconds until the trainer is on that device."""
        began = self.now_s
        while self.on != on or self.now_s < self.ready_s:
            assert self.now_s - began <= most_s, f"not on {on} within {most_s:.0f} s"
            self.go(TICK_S, share)
        return self.now_s - began

    def _train(self, share: float) -> None:
        w = self.work
        tokens = w.tokens + round(500 * TICK_S * self.wrong * share)
        self.work = Work(busy_s=w.busy_s + TICK_S, steps=w.steps + 1, tokens=tokens)
        self.slow_s += TICK_S if share < 1 else 0.0

    def _look(self) -> None:
        there = () if self.now_s < self.ready_s else (trainer(self.on, epoch=self.epoch, work=self.work),)
        seen = observed(device("fast"), device("spare"), *there, of_flow=flow())
        slow = aside(self.state, self.drifting)
        found, self.calibrating = calibrate(seen, self.state, self.calibrating, Ideal, self.now_s, aside=slow)
        self.record(*found)
        told, self.drifting = drift(self.calibrating, self.state, self.drifting, self.rule, self.now_s)
        self.record(*learned(self.drifting, self.state, told), *told)

    def _plan(self) -> None:
        need = due(self.state, self.now_s, drift=self.rule, doubtful=doubtful(self.drifting))
        if need is None:
            return
        self.record(PlanningStarted(trigger="", drift="drift" in need.causes, doubtful=tuple(doubtful(self.drifting))))
        best = "spare" if "fast" in speeds(self.state) else "fast"
        if best == self.on:
            self.record(PlanKept(trigger="", solve_s=0.1, need_rev=need.rev))
            return
        self.record(PlanAdopted(solved=solved(best, rev=self.state.plan_rev + 1), need_rev=need.rev))
        self.on, self.epoch, self.ready_s = best, self.epoch + 1, self.now_s + MOVE_S
        self.work = Work(busy_s=10.0, steps=100, tokens=1000)
        self.moves.append(self.now_s)

    def record(self, *events: Event) -> None:
        self.events += events
        self.state = fold(self.state, stored(*events, at_s=self.now_s))

    def retried(self) -> list[DeviceRetried]:
        return [e for e in self.events if isinstance(e, DeviceRetried)]


def test_a_device_left_idle_is_tried_again_and_is_slow_again_if_it_is() -> None:
    run = Lone()
    run.until("spare", 0.5, FOUND_S + PLANNED_S)
    run.go(RULE.retry_s - MOVE_S, 0.5)
    [e] = run.retried()
    assert (e.device, e.before, e.recoveries) == ("fast", pytest.approx(0.5), 1)
    assert e.unmeasured_s == pytest.approx(RULE.retry_s, abs=TICK_S)
    assert words(e, run.state.display).message == (
        "n0/gpu0 is tried at its kind's speed again: nobody could judge it for 600 s"
    )
    assert run.until("fast", 0.5, PLANNED_S) <= PLANNED_S
    # Held against what it trained at before: found after twice the dwell, and its kind's factor is as it was.
    run.until("spare", 0.5, 3 * TICK_S + 2 * RULE.enter_s + PLANNED_S)
    assert run.state.devices["fast"].speed == pytest.approx(0.5)
    assert run.state.calibration["k", "train"] == pytest.approx(1.0, rel=0.06)
    run.go(2 * RULE.retry_s - PLANNED_S, 0.5)
    assert len(run.retried()) == 1, "the second try comes after twice the time"
    run.go(2 * PLANNED_S, 0.5)
    assert [e.recoveries for e in run.retried()] == [1, 2]


def test_a_device_that_is_fast_again_stays() -> None:
    run = Lone()
    run.until("spare", 0.5, FOUND_S + PLANNED_S)
    assert run.until("fast", 1.0, RULE.retry_s + PLANNED_S) > RULE.retry_s / 2
    run.go(10 * RULE.retry_s, 1.0)
    assert (len(run.moves), speeds(run.state)) == (2, {})


def test_who_is_judged_is_not_tried() -> None:
    """It stays slow where it works: nothing is planned, so it goes on training there and is judged by that."""
    run = Lone()
    run.go(10 * RULE.retry_s, 0.5, plans=False)
    assert speeds(run.state) == {"fast": pytest.approx(0.5)}
    assert run.retried() == []


@pytest.mark.parametrize("wrong", [0.7, 1.0])
def test_a_daemon_that_takes_over_waits_anew_and_knows_slow_from_fast(wrong: float) -> None:
    """By what the device showed before, which is on record."""
    run = Lone(wrong=wrong)
    run.until("spare", 0.5, FOUND_S + PLANNED_S)
    run.go(RULE.retry_s / 2, 0.5)
    run.calibrating, run.drifting = Calibrating(), remembered(run.state)
    run.go(RULE.retry_s - TICK_S, 0.5)
    assert run.retried() == []
    run.go(2 * TICK_S, 0.5)
    assert len(run.retried()) == 1
    run.until("fast", 0.5, PLANNED_S)
    run.until("spare", 0.5, 3 * TICK_S + 2 * RULE.enter_s + PLANNED_S)
    assert run.state.devices["fast"].speed == pytest.approx(0.5, rel=0.02)


def test_a_run_recorded_before_speeds_were_goes_by_its_kinds_factor() -> None:
    run = Lone(wrong=0.7)
    run.until("spare", 0.5, FOUND_S + PLANNED_S)
    run.calibrating, run.drifting = Calibrating(), Drifting()
    run.until("fast", 0.5, RULE.retry_s + PLANNED_S)
    run.until("spare", 0.5, 3 * TICK_S + 2 * RULE.enter_s + PLANNED_S)
    assert run.state.devices["fast"].speed == pytest.approx(0.5, rel=0.1)


@settings(max_examples=12, deadline=None)
@given(share=st.floats(0.1, 0.8), tries=st.integers(1, 40), retry_s=st.sampled_from([240.0, 600.0]))
def test_for_a_device_that_stays_slow_moves_are_ever_rarer(share: float, tries: int, retry_s: float) -> None:
    run = Lone(replace(RULE, retry_s=retry_s))
    lasts_s = tries * retry_s
    run.go(lasts_s, share)
    most = 1 + math.log2(1 + lasts_s / retry_s)
    assert len(run.retried()) <= most
    assert len(run.moves) <= 1 + 2 * most
    # Seconds at the slow device: those of finding out, doubling with each try as the time between tries does.
    dwells = [RULE.enter_s * 2 ** min(n, MOST_DOUBLINGS) for n in range(len(run.retried()) + 1)]
    assert run.slow_s <= sum(dwells) + len(dwells) * (3 * TICK_S + PLANNED_S)


@settings(max_examples=12, deadline=None)
@given(share=st.floats(0.1, 0.8), slow_s=st.floats(0.0, 12_000.0))
def test_a_device_that_recovers_is_back_no_later_than_it_was_slow_and_a_try(share: float, slow_s: float) -> None:
    run = Lone()
    run.go(FOUND_S + slow_s, share)
    run.go(slow_s + RULE.retry_s + FOUND_S + PLANNED_S + RULE.leave_s, 1.0)
    assert run.on == "fast"
    assert speeds(run.state) == {}
    moves = len(run.moves)
    run.go(2 * RULE.retry_s, 1.0)
    assert len(run.moves) == moves
