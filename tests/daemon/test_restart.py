"""A daemon that dies right after any event it recorded, and its successor: the same end (I11), with nothing done twice."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from simworld import TICK_S, SimWorld

from planner.errors import HexError
from runtime.backends.simulated.script import DeviceLeaves, UnitDies
from runtime.core.event import Event, RunEnded, RunEndRequested, Stored
from runtime.core.solved import shape
from runtime.store.events import EventStore, open_store

BEGAN_S = 1000.0
FAULTS = (
    UnitDies(at_s=BEGAN_S + 10, device="d1"),
    DeviceLeaves(at_s=BEGAN_S + 28, device="d3"),
)
COMMANDS: tuple[tuple[float, dict[str, str]], ...] = (
    (6.0, {"name": "cordon", "device": "d2"}),
    (16.0, {"name": "pin", "device": "d1", "role": "train"}),
    (36.0, {"name": "uncordon", "device": "d2"}),
)
LASTS_S = 48.0


class Crash(Exception):
    """kill -9."""


class FragileStore(EventStore):
    """Memory that outlives the daemon, which dies as soon as `deadly` events are in it."""

    def __init__(self, deadly: int | None) -> None:
        inner = open_store(Path(":memory:"))
        super().__init__(inner.path, inner._db)
        self.deadly = deadly

    def append(self, events: Sequence[Event], at_s: float) -> tuple[Stored, ...]:
        """One at a time, so that death can come between any two."""
        stored: tuple[Stored, ...] = ()
        for e in events:
            stored += super().append([e], at_s)
            if self.deadly is not None and self.last_seq() >= self.deadly:
                self.deadly = None
                raise Crash
        return stored


def play(deadly: int | None) -> SimWorld:
    """The whole story; the operator repeats a command whose answer never came, with its key."""
    store = FragileStore(None)
    world = SimWorld(4, faults=FAULTS, store=store)
    store.deadly = deadly
    todo = list(COMMANDS)
    while world.now_s < BEGAN_S + LASTS_S:
        world.now_s += TICK_S
        try:
            if todo and world.now_s >= BEGAN_S + todo[0][0]:
                at_s, fields = todo[0]
                world.command(key=f"at-{at_s}", **fields)
                todo.pop(0)
            world.loop.tick(world.now_s)
        except Crash:
            restart(world)
    return world


def restart(world: SimWorld) -> None:
    try:
        world.restart()
    except Crash:
        pytest.fail("one death is enough")


def end_of(world: SimWorld) -> dict[str, object]:
    state = world.loop.state
    assert state.plan is not None
    return {
        "standing": world.standing(),
        "plan": shape(state.plan.plan),
        "overrides": {(o.device, o.kind, o.role) for o in state.overrides},
        "override_rev": state.override_rev,
        "need": state.need,
        "lost": {d.id for d in state.devices.values() if d.lost},
        "conflicts": world.sim.fleet.conflicts,
        "unrecorded": world.witness.unrecorded,
    }


def test_death_after_any_event_leads_to_the_same_end() -> None:
    undisturbed = play(None)
    expected = end_of(undisturbed)
    assert expected["standing"] == {"d1": "train", "d0": "rollout", "d2": "rollout"}
    total = undisturbed.store.last_seq()
    assert total > 60
    differing = {}
    for deadly in range(6, total + 1):
        end = end_of(play(deadly))
        if end != expected:
            differing[deadly] = {k: (end[k], expected[k]) for k in end if end[k] != expected[k]}
    assert differing == {}


def test_a_restart_of_a_converged_run_does_nothing() -> None:
    world = SimWorld(4)
    world.settle()
    before = len(world.witness.applied)
    pids = {b.pid for b in world.sim.fleet.bodies.values()}
    world.restart()
    world.run(30)
    assert world.witness.applied[before:] == []
    assert {b.pid for b in world.sim.fleet.bodies.values()} == pids


def test_an_answer_outlives_the_daemon() -> None:
    world = SimWorld(4)
    world.settle()
    first = world.command("cordon", key="once", device="d3")
    world.restart()
    assert world.command("cordon", key="once", device="d3") == first
    assert world.loop.state.override_rev == 1


def test_an_ended_run_that_starts_again_goes_on_with_higher_epochs() -> None:
    world = SimWorld(4)
    world.settle()
    world.command("pin", device="d2", role="train")
    world.settle()
    world.loop.record([RunEndRequested(reason="down"), RunEnded(reason="down")], world.now_s)
    world.sim.finish(1.0)
    assert world.loop.snapshot(world.now_s).run.state == "finished"
    world.restart(adopted=False)
    assert world.loop.snapshot(world.now_s).run.state == "starting"
    world.settle(30)
    assert world.standing()["d2"] == "train"
    assert {u.epoch for u in world.loop.state.units.values() if u.status == "serving"} >= {2, 3}
    assert world.sim.fleet.conflicts == []


def test_a_store_that_cannot_write_stops_every_action() -> None:
    world = SimWorld(4)
    world.settle()
    before = len(world.witness.applied)
    world.sim.fleet.inject(UnitDies(at_s=world.now_s, device="d1"))
    world.store.close()
    with pytest.raises(HexError, match="event store"):
        world.run(5)
    assert world.witness.applied[before:] == []
