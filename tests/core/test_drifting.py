"""Slow devices, from blocks by hand in virtual time: onset, dwell, hysteresis, recovery, cool-down, and what is not drift."""

import itertools
import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from values import NOW_S, device, fleet, flow, observed, replica, solved, started, stored, trainer

from runtime.core.calibrating import LEAST_SAMPLES, RECENT, Calibrating, Modelled, calibrate
from runtime.core.drifting import Drifting, aside, doubtful, drift, learned, median_of_others, remembered, speeds
from runtime.core.event import DaemonStarted, Event
from runtime.core.fleet_event import DeviceDrifted, DeviceJoined, DeviceLost, SpeedsLearned
from runtime.core.fold import fold
from runtime.core.observation import Observation, Work
from runtime.core.plan_event import PlanKept, PlanningStarted
from runtime.core.trigger import due
from runtime.core.words import words
from runtime.policy.drift import DriftRule

RULE = DriftRule()  # slow at 0.85 for 30 s, fast again at 0.95 for 120 s, plans 120 s apart
BLOCK_S = 5.0
UNITS = {"r0": ("b",), "r1": ("c",), "r2": ("d",), "t0": ("a",)}
PLAN = solved("a", "b", "c", "d")
FOUND_S = 3 * BLOCK_S + RULE.enter_s  # three blocks turn the median, then the dwell
BACK_S = 3 * BLOCK_S + RULE.leave_s


class Ideal:
    """20 ms a decode step, 500 tokens/s of training."""

    def decode(self, kind: str, devices: int, work: Work) -> Modelled | None:
        return Modelled(seconds=0.020 * work.steps, tokens_per_s=work.tokens / (0.020 * work.steps))

    def train(self, devices: tuple[str, ...], work: Work) -> Modelled | None:
        return Modelled(seconds=work.tokens / 500, tokens_per_s=400.0)


class Trace:
    """Units that close a block every five seconds; `go` says at which share of the modelled speed each works."""

    def __init__(self, *units: str, rule: DriftRule = RULE, units_of: dict[str, tuple[str, ...]] | None = None) -> None:
        self.units = {u: d for u, d in (units_of or UNITS).items() if not units or u in units}
        up = tuple(e for u, d in self.units.items() for e in started(u, *d))
        self.state = fleet(*sorted(d for ds in self.units.values() for d in ds), plan=PLAN, more=up)
        self.rule, self.now_s = rule, NOW_S
        self.calibrating, self.drifting = Calibrating(), Drifting()
        self.work = dict.fromkeys(self.units, Work(busy_s=10.0, steps=100, tokens=1000))
        self.events: list[tuple[float, Event]] = []
        self.planned: list[float] = []
        self.hot: tuple[str, ...] = ()
        self.look()

    def go(self, seconds: float, **shares: float) -> list[tuple[float, DeviceDrifted]]:
        """What was said of devices, with the seconds since this began."""
        began, before = self.now_s, len(self.events)
        for _ in range(round(seconds / BLOCK_S)):
            self.now_s += BLOCK_S
            for unit, w in self.work.items():
                steps, tokens = self.done(unit, shares.get(unit, 1.0))
                self.work[unit] = Work(busy_s=w.busy_s + BLOCK_S, steps=w.steps + steps, tokens=w.tokens + tokens)
            self.look()
        return [(at - began, e) for at, e in self.events[before:] if isinstance(e, DeviceDrifted)]

    @staticmethod
    def done(unit: str, share: float) -> tuple[int, int]:
        steps = round(250 * share)
        return (1, round(2500 * share)) if unit.startswith("t") else (steps, 10 * steps)

    def look(self) -> None:
        slow = aside(self.state, self.drifting)
        found, self.calibrating = calibrate(self.seen(), self.state, self.calibrating, Ideal, self.now_s, aside=slow)
        self.record(*found)
        drifted, self.drifting = drift(self.calibrating, self.state, self.drifting, self.rule, self.now_s)
        self.record(*learned(self.drifting, self.state, drifted), *drifted)

    def another_daemon(self) -> None:
        """kill -9: of the old one only what it recorded is left."""
        self.calibrating, self.drifting = Calibrating(), remembered(self.state)

    def record(self, *events: Event) -> None:
        self.events += [(self.now_s, e) for e in events]
        self.state = fold(self.state, stored(*events, at_s=self.now_s))

    def plan(self) -> None:
        """A planner that answers at once and finds nothing better."""
        need = due(self.state, self.now_s, drift=self.rule, doubtful=doubtful(self.drifting))
        if need is not None:
            self.planned.append(self.now_s)
            self.record(
                PlanningStarted(trigger="", drift="drift" in need.causes, doubtful=tuple(doubtful(self.drifting)))
            )
            self.record(PlanKept(trigger="", solve_s=0.1, need_rev=need.rev))

    def seen(self) -> Observation:
        return observed(
            *(device(d, throttled=d in self.hot) for ds in self.units.values() for d in ds),
            *(
                trainer(*ds, work=self.work[u]) if u.startswith("t") else replica(u, *ds, work=self.work[u])
                for u, ds in self.units.items()
            ),
            of_flow=flow(),
        )

    def factor(self, role: str) -> float:
        return self.state.calibration.get(("k", role), 1.0)


def test_a_slow_device_is_found_after_three_blocks_and_the_dwell() -> None:
    run = Trace()
    assert run.go(50) == []
    [(at, e)] = run.go(200, r1=0.5)
    assert at == FOUND_S
    assert (e.devices, e.role, e.before, e.for_s, e.recoveries) == (("c",), "rollout", 1.0, 30.0, 0)
    assert (e.speed, e.share) == (pytest.approx(0.5), pytest.approx(0.5))
    assert (e.measured_tokens_per_s, e.assumed_tokens_per_s) == (pytest.approx(250.0), pytest.approx(500.0))
    assert speeds(run.state) == {"c": pytest.approx(0.5)}
    assert run.state.need is not None
    assert run.state.need.causes == {"drift"}
    assert run.state.need.reasons == ("n0/gpu2 generates at 0.50 of what the plan assumed for 30 s",)
    assert words(e, run.state.display).message == f"{run.state.need.reasons[0]} (250 instead of 500 tokens/s)"


def test_slow_for_less_than_the_dwell_is_not_slow() -> None:
    run = Trace()
    run.go(50)
    assert run.go(25, r1=0.3) == []  # past the limit from 15 s to 35 s
    assert run.go(300) == []


def test_between_the_limits_nothing_changes_and_a_slow_one_is_told_again_when_it_is_otherwise_slow() -> None:
    run = Trace()
    run.go(50)
    assert run.go(300, r1=0.9) == []  # above 0.85
    run.go(FOUND_S, r1=0.5)
    assert run.go(100, r1=0.55) == []  # not materially another
    [(_, e)] = run.go(300, r1=0.9)  # below 0.95: still slow, but less
    assert (e.speed, e.before, e.share) == (pytest.approx(0.9), pytest.approx(0.5), pytest.approx(1.8, rel=0.02))


def test_a_recovery_is_a_reason_too_and_makes_the_next_verdict_take_twice_as_long() -> None:
    run = Trace()
    run.go(50)
    run.go(100, r1=0.5)
    [(at, e)] = run.go(200)
    assert at == BACK_S
    assert (e.speed, e.before, e.share, e.for_s, e.recoveries) == (1.0, 0.5, pytest.approx(2.0), 120.0, 1)
    assert speeds(run.state) == {}
    assert "at its kind's speed again, 2.00 of what the plan assumed for 120 s" in words(e, str).message
    [(at, _)] = run.go(200, r1=0.5)
    assert at == 3 * BLOCK_S + 2 * RULE.enter_s


@pytest.mark.parametrize("before", [1.0, 0.6, 1.4])
def test_a_kind_that_is_modelled_wrong_or_changes_as_a_whole_is_calibration(before: float) -> None:
    run = Trace()
    wrong = dict.fromkeys(UNITS, before)
    assert run.go(200, **wrong) == []
    assert run.factor("rollout") == pytest.approx(before, rel=0.05)
    both = {"r0": before / 2, "r1": before / 2, "r2": before / 2, "t0": before}
    assert run.go(300, **both) == []
    assert run.factor("rollout") == pytest.approx(before / 2, rel=0.06)


def test_measured_over_modelled_is_factor_times_speed() -> None:
    """Counted once: the slow device does not pull its kind's factor down, and its speed is that against the factor."""
    run = Trace("r0", "r1")  # the median of two is the mean of their logarithms: half of the drift would be in it
    run.go(200, r0=0.8, r1=0.8)
    run.go(400, r0=0.8, r1=0.4)
    assert run.factor("rollout") == pytest.approx(0.8, rel=0.05)
    assert run.factor("rollout") * speeds(run.state)["c"] == pytest.approx(0.4, rel=0.05)


def test_a_few_slow_ones_do_not_make_the_fast_one_fast() -> None:
    run = Trace("r0", "r1", "r2")
    run.go(100)
    run.go(300, r1=0.5, r2=0.5)
    assert speeds(run.state) == {"c": pytest.approx(0.5, abs=0.05), "d": pytest.approx(0.5, abs=0.05)}
    assert run.factor("rollout") == pytest.approx(1.0, rel=0.05)


def test_a_trainer_without_peers_is_held_against_its_own_past() -> None:
    run = Trace()
    assert run.go(200, t0=0.7) == []  # its kind is modelled wrong, as far as anybody can say
    [(at, e)] = run.go(200, t0=0.35)
    assert at == FOUND_S
    assert (e.devices, e.role, e.speed) == (("a",), "train", pytest.approx(0.5, rel=0.02))
    assert run.factor("train") * e.speed == pytest.approx(
        0.35, rel=0.1
    )  # one block was in the factor before it was suspect
    [(at, e)] = run.go(300, t0=0.7)
    assert (at, e.speed) == (BACK_S, 1.0)


def test_what_changes_over_hours_is_calibration() -> None:
    """Answers grow and the model misses some of it: a lone trainer loses half its speed, 1 % every minute and a half."""
    run = Trace("t0", "r0")
    run.go(100)
    share = 1.0
    while share > 0.5:
        share *= 0.99
        assert run.go(90, t0=share) == []
    assert run.factor("train") == pytest.approx(0.5, rel=0.07)


def test_a_throttled_device_says_nothing_of_its_kind_and_is_slow_all_the_same() -> None:
    run = Trace("r0", "r1")
    run.go(50)
    run.hot = ("c",)
    [(_, e)] = run.go(100, r1=0.5)
    assert (e.devices, e.speed) == (("c",), pytest.approx(0.5))
    assert run.calibrating.estimates["c", "rollout"].log_ratio == pytest.approx(0.0, abs=0.01)
    assert run.factor("rollout") == 1.0


def test_devices_of_one_replica_share_its_figure_and_are_no_peers_of_each_other() -> None:
    pairs = {"r0": ("b", "c"), "r1": ("d", "e"), "t0": ("a",)}
    run = Trace(units_of=pairs)
    run.go(50)
    [(_, e)] = run.go(100, r1=0.6)
    assert e.devices == ("d", "e")
    assert words(e, str).message.startswith("d, e generate at 0.60")


def test_who_is_slow_survives_the_daemon_and_is_not_forgotten_by_a_fresh_past() -> None:
    run = Trace("r0", "t0")
    run.go(100, t0=0.9, r0=1.0)
    run.go(100, t0=0.45)
    told = run.state.devices["a"].speed
    assert told == pytest.approx(0.5, rel=0.02)
    run.calibrating, run.drifting = Calibrating(), Drifting()
    assert run.go(400, t0=0.45) == []
    assert run.state.devices["a"].speed == told
    [(_, e)] = run.go(300, t0=0.9)
    assert (e.speed, e.recoveries) == (1.0, 1)


def test_a_daemon_that_takes_over_finds_a_lone_device_slow_that_slowed_just_then() -> None:
    """It always trained at 0.7 of what is modelled. Its blocks begin anew at the first look, and the first three count at once."""
    run = Trace("r0", "t0")
    run.go(200, t0=0.7)
    run.another_daemon()
    [(at, e)] = run.go(200, t0=0.35)
    assert at == BLOCK_S + FOUND_S
    assert (e.devices, e.role, e.speed) == (("a",), "train", pytest.approx(0.5, rel=0.03))


def test_what_is_on_record_is_exact_for_who_is_judged_and_written_seldom() -> None:
    run = Trace("r0", "r1", "t0")
    run.go(2000, t0=0.9)
    written = [e for _, e in run.events if isinstance(e, SpeedsLearned)]
    assert [{(s.device, s.role) for s in e.speeds} for e in written] == [
        {("a", "train"), ("b", "rollout"), ("c", "rollout")}
    ]
    share = 0.9
    for _ in range(40):
        share *= 0.9985  # falls by 6 % while nobody calls it slow
        run.go(25, t0=share)
    again = [e for _, e in run.events if isinstance(e, SpeedsLearned)][1:]
    assert [[s.device for s in e.speeds] for e in again] == [["a"]]
    run.go(100, t0=0.4)
    assert run.state.devices["a"].speed < 1
    assert run.drifting.pasts == remembered(run.state).pasts | {
        (d, "rollout"): run.drifting.pasts[d, "rollout"] for d in ("b", "c")
    }


def test_what_a_lost_device_showed_is_forgotten() -> None:
    run = Trace()
    run.go(100)
    run.record(DeviceLost(device="c", reason="gone"), DeviceJoined(device="c", kind="k", node="n0", index=2))
    assert {d for d, _ in run.state.learned} == {"a", "b", "d"}
    run.record(DaemonStarted(epoch=2, pid=1, adopted=False))
    assert run.state.learned == {}


def test_a_slow_device_alone_in_a_new_role_is_held_against_its_first_figures_there() -> None:
    """It trained at half speed and was moved; nobody has ever generated on its kind, and the model of that is wrong by 0.6."""
    run = Trace(units_of={"r0": ("a",)})
    told = {"measured_tokens_per_s": 200.0, "assumed_tokens_per_s": 400.0, "recoveries": 0}
    run.record(DeviceDrifted(devices=("a",), role="train", speed=0.5, before=1.0, share=0.5, for_s=30.0, **told))
    run.drifting = Drifting()
    assert run.go(400, r0=0.3) == []
    assert speeds(run.state) == {"a": 0.5}
    [(at, e)] = run.go(300, r0=0.6)
    assert (at, e.role, e.speed) == (BACK_S, "rollout", 1.0)


def test_a_device_that_is_lost_and_comes_back_is_not_slow() -> None:
    run = Trace()
    run.go(50)
    run.go(100, r1=0.5)
    run.record(DeviceLost(device="c", reason="gone"))
    run.record(DeviceJoined(device="c", kind="k", node="n0", index=2))
    assert speeds(run.state) == {}


def test_plans_for_drift_are_a_cool_down_apart_but_a_loss_does_not_wait() -> None:
    run = Trace("r0", "r1", "r2")
    run.go(50)
    for r1, r2 in ((0.5, 1.0), (0.5, 0.5), (0.3, 0.5)):
        for _ in range(20):
            run.go(BLOCK_S, r1=r1, r2=r2)
            run.plan()
    assert [b - a for a, b in itertools.pairwise(run.planned)] == [RULE.cooldown_s] * 2
    run.go(FOUND_S, r1=0.6, r2=0.3)
    assert due(run.state, run.now_s, drift=RULE) is None
    run.record(DeviceLost(device="c", reason="gone"))
    assert due(run.state, run.now_s + 3, drift=RULE) == run.state.need


# ---- devices of one machine: r1 slows at 0 s and is found at 45 s, when a gathering of 3 to 15 s begins


class Mates(Trace):
    """Plans at each look, every five seconds; `slows(r2=(10, 60))`: at half its speed from 10 s to 60 s."""

    def __init__(self, *elsewhere: str) -> None:
        super().__init__(units_of={"r0": ("b",), "r1": ("c",), "r2": ("d",), "r3": ("e",)})
        for d in elsewhere:
            self.record(DeviceJoined(device=d, kind="k", node="n1", index=0))
        self.record(PlanKept(trigger="", solve_s=0.1, need_rev=10**9))
        self.go(50)
        self.slow_then: list[set[str]] = []

    def slows(self, seconds: float = 400.0, **when: tuple[float, float]) -> list[float]:
        """Times of plannings; `slow_then`: which devices each knew to be slow."""
        began_s = self.now_s
        while self.now_s - began_s < seconds:
            at_s = self.now_s - began_s
            self.go(BLOCK_S, **{u: 0.5 for u, (since, until) in when.items() if since <= at_s < until})
            before = len(self.planned)
            self.plan()
            self.slow_then += [set(speeds(self.state))] * (len(self.planned) - before)
        return [t - began_s for t in self.planned]


EVER = 1e9


def test_mates_that_slow_together_are_planned_for_together() -> None:
    """r2 slows 10 s later, so it is found at 55 s. At 50 s it is in doubt; 60 s is 3 s after it was found, and 15 after r1 was."""
    run = Mates()
    assert run.slows(r1=(0, EVER), r2=(10, EVER)) == [60.0]
    assert run.slow_then == [{"c", "d"}]


def test_a_mate_that_is_late_does_not_wait_for_the_cool_down() -> None:
    """r2 slows at 30 s: in doubt from its block of 35 s on, found at 75 s. The plan for r1 waits for it until 60 s, no longer."""
    run = Mates()
    assert run.slows(r1=(0, EVER), r2=(30, EVER)) == [60.0, 80.0]
    assert run.slow_then == [{"c"}, {"c", "d"}]


def test_a_mate_that_slowed_after_the_plan_waits_for_the_cool_down() -> None:
    """Found at 95 s; nobody doubted it at 50 s."""
    run = Mates()
    assert run.slows(r1=(0, EVER), r2=(50, EVER)) == [50.0, 50.0 + RULE.cooldown_s]


def test_devices_of_other_machines_are_neither_waited_for_nor_let_in() -> None:
    run = Mates("d")
    assert run.slows(r1=(0, EVER), r2=(10, EVER)) == [50.0, 50.0 + RULE.cooldown_s]
    run = Mates("d")
    assert run.slows(r1=(0, EVER), r2=(30, EVER)) == [50.0, 50.0 + RULE.cooldown_s]


def test_a_doubt_that_was_none_ends_the_wait() -> None:
    """Blocks of 45 and 50 s are slow, that of 55 s is not, and their median never was."""
    run = Mates()
    assert run.slows(r1=(0, EVER), r2=(40, 50)) == [55.0]
    assert run.slow_then == [{"c"}]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.3, 1.0]), st.sampled_from([0.3, 1.0])), max_size=20))
def test_whatever_two_mates_do_a_cool_down_sees_two_plans_at_most(spells: list[tuple[int, float, float]]) -> None:
    run = Mates()
    for count, r1, r2 in spells:
        for _ in range(count):
            run.go(BLOCK_S, r1=r1, r2=r2)
            run.plan()
    assert all(later - early >= RULE.cooldown_s for early, later in zip(run.planned, run.planned[2:], strict=False))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 12), st.sampled_from([0.2, 0.5, 0.8, 0.84, 0.9, 1.0, 1.2])), max_size=25))
def test_whatever_a_device_does_plans_are_apart_and_only_for_what_lasts(spells: list[tuple[int, float]]) -> None:
    """One device changes its speed as it likes beside two that do not."""
    run, blocks = Trace("r0", "r1", "r2"), [1.0] * 6
    run.go(30)
    for count, share in spells:
        for _ in range(count):
            blocks.append(share)
            for _, e in run.go(BLOCK_S, r1=share):
                medians = [statistics.median(blocks[: n + 1][-RECENT:]) for n in range(len(blocks))]
                if e.before == 1.0:
                    lasts = medians[-1 - round(RULE.enter_s / BLOCK_S) :]
                    assert all(m <= RULE.enter_share + 0.005 for m in lasts)
                elif e.speed == 1.0:
                    lasts = medians[-1 - round(RULE.leave_s / BLOCK_S) :]
                    assert all(m >= RULE.leave_share - 0.005 for m in lasts)
            run.plan()
    assert all(b - a >= RULE.cooldown_s for a, b in itertools.pairwise(run.planned))
    if all(share > 0.86 for _, share in spells):
        assert run.planned == []
    assert speeds(run.state).keys() <= {"c"}
    assert all(abs(math.log(f)) < math.log(1.06) for f in run.state.calibration.values())


def test_a_unit_counts_from_its_third_block_on() -> None:
    run = Trace()
    assert run.go(BLOCK_S * (LEAST_SAMPLES - 1) + RULE.enter_s, r1=0.5) == []
    assert [e.devices for _, e in run.go(BLOCK_S, r1=0.5)] == [("c",)]


@given(st.lists(st.floats(-9, 9), min_size=2), st.data())
def test_the_median_of_the_others_is_that_of_a_list_without_the_one(figures: list[float], data: st.DataObject) -> None:
    figures.sort()
    own = data.draw(st.integers(0, len(figures) - 1))
    assert median_of_others(figures, without=own) == statistics.median(figures[:own] + figures[own + 1 :])
    assert median_of_others(figures, without=None) == statistics.median(figures)
