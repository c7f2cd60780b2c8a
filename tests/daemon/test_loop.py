"""What the loop does about single things, end to end over the simulated fleet."""

import pytest
from simworld import TICK_S, SimWorld, device

from runtime.backends.simulated.script import Behaviour, DeviceJoins, DeviceLeaves, DeviceSlows, UnitDies, UnitHangs
from runtime.core.action import DrainReplica, QuiesceTrainer, StartReplica, StartTrainer, StopReplica, StopTrainer
from runtime.core.trigger import ConsentRule
from runtime.errors import RefusedError


def kinds_of(world: SimWorld, start: int = 0) -> list[str]:
    return [e.kind for e in world.loop.events(0, 10_000)][start:]


def test_first_plan_is_carried_out() -> None:
    world = SimWorld(3)
    assert world.settle(30) <= 5
    assert world.standing() == {"d0": "train", "d1": "rollout", "d2": "rollout"}
    assert {s.id for s in world.witness.applied} == {"start-trainer:t0:1", "start-replica:r0:1", "start-replica:r1:1"}
    assert kinds_of(world)[-1] == "PlanReached"


def test_moving_the_trainer_drains_quiesces_stops_and_starts_in_that_order() -> None:
    world = SimWorld(4)
    world.settle()
    begun = len(world.witness.applied)
    world.command("pin", device="n0/gpu2", role="train")
    world.settle()
    assert world.standing()["d2"] == "train"
    steps = list(dict.fromkeys(world.witness.applied[begun:]))
    assert steps == [
        DrainReplica(replica="r1", epoch=1),
        StopReplica(replica="r1", epoch=1),
        QuiesceTrainer(trainer="t0", epoch=1),
        StopTrainer(trainer="t0", epoch=1),
        StartTrainer(trainer="t0", epoch=2, devices=("d2",)),
        StartReplica(replica="r3", epoch=1, devices=("d0",)),
    ]


def test_calm_is_a_run_in_service_with_nothing_on_its_way() -> None:
    world = SimWorld(3)
    world.run(1)
    assert not world.loop.calm
    world.settle()
    assert world.loop.calm
    world.command("pin", device="n0/gpu2", role="train")
    assert not world.loop.calm
    world.run(1)
    assert not world.loop.calm  # the trainer moves
    world.settle()
    assert world.loop.calm
    world.sim.fleet.inject(UnitDies(at_s=world.now_s + 1, device="d1"))
    world.run(1.5)
    assert not world.loop.calm
    world.settle()
    assert world.loop.calm


def test_a_swap_keeps_a_serving_replica_by_moving_the_trainer_first() -> None:
    world = SimWorld(2)
    world.settle()
    world.command("pin", device="d1", role="train")
    fewest = 9
    for _ in range(60):
        world.run(0.5)
        fewest = min(fewest, sum(1 for r in world.standing().values() if r == "rollout"))
    assert world.standing() == {"d1": "train", "d0": "rollout"}
    assert fewest == 1


def test_a_killed_replica_comes_back_under_a_new_epoch() -> None:
    world = SimWorld(3)
    world.settle()
    world.sim.fleet.inject(UnitDies(at_s=world.now_s + 1, device="d2"))
    world.run(2)
    assert world.settle(30) <= 6
    assert world.loop.state.units["r1"].epoch == 2
    messages = [e.message for e in world.loop.snapshot(world.now_s).events]
    assert any("r1 died (killed by signal 9); its 16 samples go on elsewhere" in m for m in messages)


def test_a_hung_replica_is_replaced_within_15_s_and_shown_hung() -> None:
    world = SimWorld(3)
    world.settle()
    world.sim.fleet.inject(UnitHangs(at_s=world.now_s, device="d1"))
    world.run(16)
    assert "UnitDied" in kinds_of(world)
    assert world.loop.state.units["r0"].hung
    world.settle(20)
    assert world.loop.state.units["r0"].epoch == 2


def test_a_silent_device_is_stale_not_lost() -> None:
    world = SimWorld(3)
    world.settle()
    world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s, device="d1", noticed=False, returns_s=world.now_s + 30))
    world.run(20)
    row = next(d for d in world.loop.snapshot(world.now_s).devices if d.id == "d1")
    assert (row.status, row.replica) == ("STALE", "r0")
    assert world.standing()["d1"] == "rollout"
    world.run(15)
    assert "DeviceLost" not in kinds_of(world)
    assert next(d for d in world.loop.snapshot(world.now_s).devices if d.id == "d1").status == "ok"


def test_join_leave_join_within_a_minute_moves_at_most_once() -> None:
    world = SimWorld(3)
    world.settle()
    plans = world.loop.state.plan_rev
    at_s = world.now_s
    for i, fault in enumerate([DeviceJoins, DeviceLeaves, DeviceJoins]):
        t = at_s + 1 + i
        world.sim.fleet.inject(
            fault(at_s=t, device=device(7)) if fault is DeviceJoins else fault(at_s=t, device="d7")  # type: ignore[operator]
        )
    world.run(10)
    world.settle(60)
    assert world.loop.state.plan_rev <= plans + 1
    assert world.standing()["d7"] == "rollout"


def test_a_crash_loop_ends_in_quarantine_and_uncordon_lifts_it() -> None:
    world = SimWorld(4)
    world.settle()
    for _ in range(200):
        world.sim.fleet.inject(UnitDies(at_s=world.now_s, device="d3", reason="exit code 1"))
        world.run(1)
    assert world.loop.state.devices["d3"].quarantined == "exit code 1"
    starts = [s for s in world.witness.applied if isinstance(s, StartReplica) and s.devices == ("d3",)]
    assert len({s.id for s in starts}) == 5
    assert world.settle(30) >= 0
    assert "d3" not in world.standing()
    world.command("uncordon", device="d3")
    world.settle(60)
    assert world.standing()["d3"] == "rollout"


def test_lost_effects_are_repeated_without_new_records() -> None:
    world = SimWorld(4, behaviour=Behaviour(lost_share=0.7), seed=3)
    world.settle(120)
    recorded = [e for e in kinds_of(world) if e == "StepOrdered"]
    assert len(recorded) == 4
    assert len(world.witness.applied) > 4


def test_an_improvement_asks_and_a_repair_does_not() -> None:
    world = SimWorld(3, consent=ConsentRule(mode="ask", expires_s=60))
    world.settle()
    world.sim.fleet.inject(DeviceJoins(at_s=world.now_s, device=device(3)))
    world.run(8)
    proposal = world.loop.snapshot(world.now_s).proposal
    assert proposal is not None
    assert proposal.plan.rev == 2
    assert "d3" not in world.standing()
    with pytest.raises(RefusedError, match="old"):
        world.command("approve", plan_rev=1)
    world.command("approve", plan_rev=2)
    world.settle()
    assert world.standing()["d3"] == "rollout"
    world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s, device="d0"))
    world.run(1)
    world.settle(60)
    assert "train" in world.standing().values()
    assert world.loop.state.proposal is None


def test_a_proposal_expires() -> None:
    world = SimWorld(3, consent=ConsentRule(mode="ask", expires_s=20))
    world.settle()
    world.sim.fleet.inject(DeviceJoins(at_s=world.now_s, device=device(3)))
    world.run(30)
    assert world.loop.state.proposal is None
    assert "ProposalExpired" in kinds_of(world)
    assert "d3" not in world.standing()


def test_half_the_fleet_gone_at_once_is_one_plan() -> None:
    world = SimWorld(8)
    world.settle()
    rev = world.loop.state.plan_rev
    for n in (2, 3, 4, 5):
        world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s + 0.1 * n, device=f"d{n}"))
    world.run(3)
    world.settle(60)
    assert world.loop.state.plan_rev == rev + 1
    assert sorted(world.standing()) == ["d0", "d1", "d6", "d7"]


def test_a_loss_throws_the_planning_under_way_away_before_it_is_due_itself() -> None:
    """The answer to the first would be for a fleet that is no more; the second is asked when losses have been gathered."""
    world = SimWorld(4)
    world.settle()
    asked, solved = len(world.planning.problems), world.planning.solved
    world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s, device="d3"))
    while not world.planning.busy:
        world.run(TICK_S)
    world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s, device="d2"))
    world.run(TICK_S)
    assert (len(world.planning.problems), world.planning.solved) == (asked + 1, solved)
    world.settle()
    assert (len(world.planning.problems), world.planning.solved) == (asked + 2, solved + 1)
    assert {d.id for d in world.planning.problems[-1].cluster.devices} == {"d0", "d1"}


def test_all_rollout_gone_the_trainer_stays_and_a_join_resumes() -> None:
    world = SimWorld(3)
    world.settle()
    for n in (1, 2):
        world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s, device=f"d{n}"))
    world.run(20)
    assert world.standing() == {"d0": "train"}
    assert world.loop.snapshot(world.now_s).infeasible
    world.sim.fleet.inject(DeviceJoins(at_s=world.now_s, device=device(1)))
    world.run(5)
    world.settle(60)
    assert world.standing() == {"d0": "train", "d1": "rollout"}


def test_snapshot_numbers_grow_across_a_restart() -> None:
    world = SimWorld(3)
    world.run(5)
    before = world.loop.seq
    world.restart()
    assert world.loop.seq > before


def test_an_override_of_a_device_that_left_does_not_keep_the_planner_from_working() -> None:
    """Drain is said of a device that goes away; then it goes."""
    world = SimWorld(4)
    world.settle()
    world.command("drain", device="d3")
    world.settle()
    world.sim.fleet.inject(DeviceLeaves(at_s=world.now_s, device="d3"))
    world.run(5)
    world.command("cordon", device="d2")
    world.settle(60)
    assert "PlanningFailed" not in kinds_of(world)
    assert world.standing() == {"d0": "train", "d1": "rollout"}
    assert {o.device for o in world.loop.state.overrides} == {"d2", "d3"}  # kept for when it comes back


def test_a_page_of_events_is_full_whatever_commands_there_were() -> None:
    world = SimWorld(3)
    world.settle()
    last = world.loop.events(0, 10_000)[-1].seq
    for _ in range(30):
        world.command("cordon", device="d2")
    world.command("uncordon", device="d2")
    world.settle()
    (first,) = world.loop.events(last, 1)
    assert first.kind == "OverrideSet"
    assert [e.kind for e in world.loop.events(first.seq, 10_000)]


def test_what_a_run_measures_goes_into_the_next_problem_and_survives_the_daemon() -> None:
    world = SimWorld(3, behaviour=Behaviour(train_tokens_per_s=1e6))  # no back-pressure: the replicas never wait
    world.settle()
    world.run(60)
    # The toy fleet decodes 100 tokens/s where the model says far more: the factor stands at its lower bound.
    assert world.loop.state.calibration == {("wide", "rollout"): 0.25}
    [row] = [r for r in world.loop.snapshot(world.now_s).calibration if r.role == "rollout"]
    assert (row.kind, row.factor, row.measured_factor, row.devices) == ("wide", 0.25, 0.25, 2)
    assert row.samples >= 6
    assert row.running == pytest.approx(16, rel=0.1)
    device = next(d for d in world.loop.snapshot(world.now_s).devices if d.id == "d1")
    assert device.modelled_tokens_per_s is not None
    assert device.drift_factor == pytest.approx(1.0, rel=0.05)
    assert kinds_of(world).count("CalibrationChanged") == 1
    world.restart()
    assert world.loop.state.calibration == {("wide", "rollout"): 0.25}
    world.command("replan")
    world.run(2)
    asked = world.planning.problems[-1]
    assert {k.rollout_efficiency for k in asked.cluster.kinds.values()} == {0.25}
    world.run(30)
    assert kinds_of(world).count("CalibrationChanged") == 1


def test_a_slow_device_is_planned_for_once_and_again_when_it_is_back() -> None:
    world = SimWorld(5, behaviour=Behaviour(train_tokens_per_s=1e6))
    world.settle()
    world.run(60)
    world.sim.fleet.inject(DeviceSlows(at_s=world.now_s, device="d2", speed=0.5))
    world.run(300)
    assert [p.speeds for p in world.planning.problems if p.speeds] == [{"d2": pytest.approx(0.5, rel=0.05)}]
    asked = world.planning.problems[-1]
    assert asked.switch_s > 0
    # Its kind is modelled as wrongly as before.
    assert {k.rollout_efficiency for k in asked.cluster.kinds.values()} == {0.25}
    told = [e.message for e in world.loop.events(0, 10_000) if e.kind == "DeviceDrifted"]
    assert len(told) == 1
    assert "n0/gpu2 generates at 0.5" in told[0]
    shown = next(d for d in world.loop.snapshot(world.now_s).devices if d.id == "d2")
    assert (shown.status, shown.speed) == ("slow", pytest.approx(0.5, rel=0.05))
    # Who is slow survives the daemon, and whatever else needs a plan gets one that counts with it.
    world.restart()
    world.command("replan")
    world.run(2)
    assert world.planning.problems[-1].speeds == asked.speeds
    world.sim.fleet.inject(DeviceSlows(at_s=world.now_s, device="d2", speed=1.0))
    world.run(300)
    assert world.planning.problems[-1].speeds == {}
    assert kinds_of(world).count("DeviceDrifted") == 2
    assert world.standing()["d2"] == "rollout"


def test_the_next_daemon_holds_a_device_without_peers_against_what_the_last_one_saw() -> None:
    """It slows in the moment of the take-over: by what is measured from then on it is as it always was."""
    world = SimWorld(2, behaviour=Behaviour(train_tokens_per_s=1e6))
    world.settle()
    world.run(60)
    world.sim.fleet.inject(DeviceSlows(at_s=world.now_s, device="d1", speed=0.5))
    world.restart()
    world.run(100)
    assert world.loop.state.devices["d1"].speed == pytest.approx(0.5, rel=0.05)
    assert "SpeedsLearned" not in {e.kind for e in world.loop.snapshot(world.now_s).events}


def test_a_pinned_device_stays_where_it_is_however_slow() -> None:
    world = SimWorld(4, behaviour=Behaviour(train_tokens_per_s=1e6))
    world.command("pin", device="d2", role="rollout")
    world.settle()
    world.run(60)
    world.sim.fleet.inject(DeviceSlows(at_s=world.now_s, device="d2", speed=0.3))
    world.run(200)
    assert kinds_of(world).count("DeviceDrifted") == 1
    asked = world.planning.problems[-1]
    assert asked.speeds.keys() == {"d2"}
    assert [(o.device, o.role) for o in asked.overrides] == [("d2", "rollout")]
    assert world.standing()["d2"] == "rollout"
