"""next_steps: single situations worked out by hand."""

from hypothesis import given
from hypothesis import strategies as st
from values import NOW_S, body, fleet, solved, started

from planner.override import Override
from planner.plan import Placement, Stage
from planner.record import replace
from runtime.core.action import DrainReplica, QuiesceTrainer, StartReplica, StartTrainer, StopReplica, StopTrainer
from runtime.core.actual import Body
from runtime.core.fleet_event import DeviceLost, DeviceQuarantined, StepOrdered, UnitDied
from runtime.core.plan_event import OverrideSet
from runtime.core.reconcile import Converged, Steps, next_steps
from runtime.core.state import ClusterState
from runtime.core.target import slots_of


def steps(state: ClusterState, *bodies: Body, now_s: float = NOW_S, most: int = 8) -> tuple[object, ...]:
    found = next_steps(bodies, state, now_s, most_starts=most)
    assert isinstance(found, Steps), found
    return found.now


def cordon(device: str) -> OverrideSet:
    return OverrideSet(override=Override(device=device, kind="cordon"), rev=1)


def answered(state: ClusterState) -> ClusterState:
    """The planner had its say: no need is open."""
    return replace(state, need=None)


def test_nothing_is_wanted_without_a_plan() -> None:
    assert next_steps((), fleet("a", "b"), NOW_S) == Converged()


def test_an_empty_fleet_is_filled_trainer_first_at_most_so_many_at_once() -> None:
    state = fleet("a", "b", "c", "d", plan=solved("a", "b", "c", "d"))
    assert steps(state, most=3) == (
        StartTrainer(trainer="t0", epoch=1, devices=("a",)),
        StartReplica(replica="r0", epoch=1, devices=("b",)),
        StartReplica(replica="r1", epoch=1, devices=("c",)),
    )


def test_a_trainer_of_two_kinds_is_started_with_the_shares_of_its_plan_also_again() -> None:
    """The stage lists its ranks in another order than the placement: shares go by device."""
    stage = Stage(devices=("a", "b"), kind="k+j", dp=2, tp=1, layers=4, token_shares=(0.75, 0.25))
    train = Placement(role="train", kind="k+j", devices=("b", "a"), dp=2, stages=(stage,))
    made = solved(None, "c")
    made = replace(made, plan=replace(made.plan, placements=(train, *made.plan.placements)))
    wanted = StartTrainer(trainer="t0", epoch=1, devices=("b", "a"), shares=(0.25, 0.75))
    assert steps(fleet("a", "b", "c", plan=made), most=1) == (wanted,)
    state = fleet("a", "b", "c", plan=made, more=started("t0", "b", "a", serving=False) + started("r0", "c"))
    assert steps(state, body("t0", "b", "a", phase="ordered"), body("r0", "c")) == (wanted,)


def test_replicas_are_allotted_what_the_plan_in_force_has_them_decode_at_once() -> None:
    made = solved("a", "b", "c")
    by_device = {"b": 48, "c": None}
    placements = tuple(replace(p, max_running=by_device.get(p.devices[0])) for p in made.plan.placements)
    made = replace(made, plan=replace(made.plan, placements=placements))
    assert slots_of(fleet("a", "b", "c")) == {}
    assert slots_of(fleet("a", "b", "c", plan=made)) == {}, "nobody has a name yet"
    state = fleet("a", "b", "c", plan=made, more=started("t0", "a") + started("r0", "b") + started("r1", "c"))
    assert slots_of(state) == {"r0": 48}


def test_as_wished_is_converged() -> None:
    state = fleet("a", "b", plan=solved("a", "b"), more=started("t0", "a") + started("r0", "b"))
    assert next_steps((body("t0", "a"), body("r0", "b")), state, NOW_S) == Converged()


def test_a_start_nobody_saw_is_repeated_under_the_same_id() -> None:
    state = fleet("a", "b", plan=solved("a", "b"), more=started("t0", "a") + started("r0", "b", serving=False))
    again = steps(state, body("t0", "a"), body("r0", "b", phase="ordered"))
    assert again == (StartReplica(replica="r0", epoch=1, devices=("b",)),)


def test_the_dead_are_cleared_before_their_device_is_used() -> None:
    more = started("t0", "a") + started("r0", "b") + (UnitDied(unit="r0", epoch=1, reason="killed"),)
    state = fleet("a", "b", plan=solved("a", "b"), more=more)
    assert steps(state, body("t0", "a"), body("r0", "b", phase="dead")) == (StopReplica(replica="r0", epoch=1),)
    assert steps(state, body("t0", "a")) == (StartReplica(replica="r0", epoch=2, devices=("b",)),)


def test_a_zombie_of_an_older_epoch_is_stopped_and_bars_the_device() -> None:
    state = fleet("a", "b", plan=solved("a", "b"), more=started("t0", "a") + started("r0", "b", epoch=2))
    found = steps(state, body("t0", "a"), body("r0", "b", epoch=1, phase="dead"), body("r0", "b", epoch=2))
    assert found == (StopReplica(replica="r0", epoch=1),)


def test_second_failure_waits_and_says_so() -> None:
    more = started("t0", "a") + started("r0", "b") + (UnitDied(unit="r0", epoch=1, reason="x"),)
    more += (*started("r0", "b", epoch=2, serving=False), UnitDied(unit="r0", epoch=2, reason="x"))
    state = fleet("a", "b", plan=solved("a", "b"), more=more)
    waiting = next_steps((body("t0", "a"),), state, NOW_S + 1)
    assert isinstance(waiting, Steps)
    assert waiting.now == ()
    assert waiting.waiting == ("replica on n0/gpu1: 1 more s after 2 failures",)
    assert steps(state, body("t0", "a"), now_s=NOW_S + 2) == (StartReplica(replica="r0", epoch=3, devices=("b",)),)


def test_role_change_is_drained_never_stopped_while_it_holds_samples() -> None:
    state = fleet(
        "a", "b", "c", plan=solved("a", "b"), more=started("t0", "a") + started("r0", "b") + started("r1", "c")
    )
    rest = (body("t0", "a"), body("r0", "b"))
    assert steps(state, *rest, body("r1", "c")) == (DrainReplica(replica="r1", epoch=1),)
    assert steps(state, *rest, body("r1", "c", phase="draining", leaving=True, leased=4)) == ()
    assert steps(state, *rest, body("r1", "c", phase="drained", leaving=True, leased=1)) == ()
    assert steps(state, *rest, body("r1", "c", phase="drained", leaving=True)) == (StopReplica(replica="r1", epoch=1),)


def test_a_drain_whose_order_was_lost_is_repeated() -> None:
    drained = StepOrdered(id="drain-replica:r1:1", unit="r1", epoch=1, plan_rev=1)
    more = started("t0", "a") + started("r0", "b") + started("r1", "c") + (drained,)
    state = fleet("a", "b", "c", plan=solved("a", "b"), more=more)
    found = steps(state, body("t0", "a"), body("r0", "b"), body("r1", "c", leaving=True))
    assert found == (DrainReplica(replica="r1", epoch=1),)


def test_a_cordon_of_a_serving_device_drains_it_even_before_the_new_plan() -> None:
    more = started("t0", "a") + started("r0", "b") + started("r1", "c") + (cordon("c"),)
    state = fleet("a", "b", "c", plan=solved("a", "b", "c"), more=more)
    assert state.need is not None
    found = steps(state, body("t0", "a"), body("r0", "b"), body("r1", "c"))
    assert found == (DrainReplica(replica="r1", epoch=1),)


def test_the_trainer_stays_until_the_plan_that_moves_it_is_there() -> None:
    state = fleet("a", "b", "c", plan=solved("a", "b", "c"), more=(*started("t0", "a"), cordon("a")))
    bodies = (body("t0", "a"), body("r0", "b"), body("r1", "c"))
    assert next_steps(bodies, state, NOW_S) == Converged()
    assert steps(answered(state), *bodies) == (QuiesceTrainer(trainer="t0", epoch=1),)


def test_the_trainer_waits_for_its_new_place_and_is_never_doubled() -> None:
    more = started("t0", "a") + started("r0", "b") + started("r1", "c")
    state = fleet("a", "b", "c", plan=solved("b", "a", "c", rev=2), more=more)
    t, r1 = body("t0", "a"), body("r1", "c")
    assert steps(state, t, body("r0", "b"), r1) == (DrainReplica(replica="r0", epoch=1),)
    assert steps(state, t, body("r0", "b", phase="draining", leaving=True), r1) == ()
    assert steps(state, t, r1) == (QuiesceTrainer(trainer="t0", epoch=1),)
    quiesced = body("t0", "a", phase="drained", leaving=True)
    assert steps(state, quiesced, r1) == (StopTrainer(trainer="t0", epoch=1),)
    assert steps(state, r1) == (
        StartTrainer(trainer="t0", epoch=2, devices=("b",)),
        StartReplica(replica="r2", epoch=1, devices=("a",)),
    )


def test_the_last_serving_replica_leaves_only_when_another_serves() -> None:
    more = started("t0", "a") + started("r0", "b")
    state = answered(fleet("a", "b", "c", plan=solved("a", "c", rev=2), more=more))
    t, r0 = body("t0", "a"), body("r0", "b")
    assert steps(state, t, r0) == (StartReplica(replica="r1", epoch=1, devices=("c",)),)
    assert steps(state, t, r0, body("r1", "c", phase="starting")) == ()
    assert steps(state, t, r0, body("r1", "c")) == (DrainReplica(replica="r0", epoch=1),)


def test_without_any_order_the_floor_is_waived_and_that_is_said() -> None:
    more = started("t0", "a") + started("r0", ["b", "c"][0], "c")
    state = answered(fleet("a", "b", "c", plan=solved("a", "b", "c", rev=2), more=more))
    found = next_steps((body("t0", "a"), body("r0", "b", "c")), state, NOW_S)
    assert isinstance(found, Steps)
    assert found.now == (DrainReplica(replica="r0", epoch=1),)
    assert "no order" in found.waived


def test_what_stood_on_a_lost_device_is_stopped_without_draining() -> None:
    more = started("t0", "a") + started("r0", "b") + started("r1", "c") + (DeviceLost(device="c", reason="gone"),)
    state = fleet("a", "b", "c", plan=solved("a", "b", "c"), more=more)
    found = steps(state, body("t0", "a"), body("r0", "b"), body("r1", "c"))
    assert found == (StopReplica(replica="r1", epoch=1),)


def test_the_unknown_are_left_alone() -> None:
    state = fleet(
        "a", "b", "c", plan=solved("a", "b"), more=started("t0", "a") + started("r0", "b") + started("r1", "c")
    )
    found = next_steps((body("t0", "a"), body("r0", "b"), body("r1", "c", phase="unknown")), state, NOW_S)
    assert isinstance(found, Steps)
    assert found.now == ()
    assert found.running == ("r1 does not answer; waiting until it is known whether it lives",)


def test_a_trainer_on_a_lost_device_does_not_wait_for_the_new_plan() -> None:
    more = (*started("t0", "a"), *started("r0", "b"), DeviceLost(device="a", reason="gone"))
    state = fleet("a", "b", plan=solved("a", "b"), more=more)
    assert state.need is not None
    assert steps(state, body("t0", "a"), body("r0", "b")) == (StopTrainer(trainer="t0", epoch=1),)


def test_a_place_in_quarantine_is_wished_for_by_nobody_once_the_planner_had_its_say() -> None:
    more = (*started("t0", "a"), DeviceQuarantined(device="b", failures=5, reason="x"))
    pending = fleet("a", "b", plan=solved("b", rev=2), more=more)
    found = next_steps((body("t0", "a"),), pending, NOW_S)
    assert found == Steps(now=(), waiting=("trainer on n0/gpu1: quarantined (x)",))
    assert next_steps((), answered(pending), NOW_S) == Converged()


def test_a_trainer_that_cannot_leave_is_blocked_with_options() -> None:
    state = answered(fleet("a", "b", "c", plan=solved("b", "c", rev=2), more=started("t0", "a")))
    stuck = next_steps((body("t0", "a", phase="unknown"), body("r0", "c")), state, NOW_S)
    assert isinstance(stuck, Steps)
    assert stuck.running == ("t0 does not answer; waiting until it is known whether it lives",)


PHASES = st.sampled_from(["ordered", "starting", "serving", "draining", "drained", "dead", "unknown"])


@st.composite
def situations(draw: st.DrawFn) -> tuple[ClusterState, tuple[Body, ...]]:
    """Any plan over five devices, any bodies on distinct devices."""
    devices = list("abcde")
    order = draw(st.permutations(devices))
    plan = solved(order[0], *order[1 : draw(st.integers(1, 5))])
    where = draw(st.permutations(devices))
    count = draw(st.integers(0, 5))
    has_trainer = draw(st.booleans())
    bodies: list[Body] = []
    more: tuple[object, ...] = ()
    for i in range(count):
        unit = "t0" if i == 0 and has_trainer else f"r{i}"
        bodies.append(
            body(unit, where[i], phase=draw(PHASES), leaving=draw(st.booleans()), leased=draw(st.integers(0, 2)))
        )
        more += started(unit, where[i])
    return answered(fleet(*devices, plan=plan, more=more)), tuple(bodies)  # type: ignore[arg-type]


@given(situations())
def test_safe_in_every_situation(case: tuple[ClusterState, tuple[Body, ...]]) -> None:
    state, bodies = case
    found = next_steps(bodies, state, NOW_S)
    assert found == next_steps(bodies, state, NOW_S), "the same input gives the same steps"
    if not isinstance(found, Steps):
        return
    held = {d for b in bodies for d in b.devices}
    fresh = [
        s
        for s in found.now
        if isinstance(s, StartReplica | StartTrainer)
        and f"{s.id.split(':')[1]}" not in {b.unit for b in bodies if b.phase == "ordered"}
    ]
    for s in fresh:
        assert not held & set(s.devices), "a device is never given to two"
    assert len({d for s in fresh for d in s.devices}) == sum(len(s.devices) for s in fresh)
    by_unit = {b.unit: b for b in bodies}
    for s in found.now:
        if isinstance(s, StopReplica):
            b = by_unit[s.replica]
            assert b.phase != "serving", "a serving replica is drained first"
            assert not (b.phase in ("draining", "drained") and b.leased), "samples are given back first"
        if isinstance(s, StopTrainer):
            assert by_unit[s.trainer].phase in ("drained", "dead", "ordered", "starting")
    assert len({s.id for s in found.now}) == len(found.now)
