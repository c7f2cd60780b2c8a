"""The control loop against a simulated fleet that loses, delays, kills and flaps: invariants at every tick."""

import contextlib
from typing import Literal

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from simworld import SimWorld, device

from planner.record import replace
from runtime.backends.simulated.script import Behaviour, DeviceJoins, DeviceLeaves, UnitDies, UnitHangs
from runtime.core.limits import Limits
from runtime.core.trigger import ConsentRule
from runtime.errors import RefusedError

COUNT = 5
DEVICES = st.integers(0, COUNT - 1)
LOSSY = Behaviour(lost_share=0.3, late_s=1.5)
# In life a start and a step may take minutes; here such silence is short, so that the end comes within the test.
LIMITS = Limits(trainer_silent_s=20.0, device_lost_s=30.0, start_s=30.0)
CONVERGES_S = 240.0  # 60 s of the longest back-off, a hang of 20 s found twice, and lossy steps on their way


class Fleet(RuleBasedStateMachine):
    @initialize(seed=st.integers(0, 1000), mode=st.sampled_from(("auto", "ask")))
    def begin(self, seed: int, mode: Literal["auto", "ask"]) -> None:
        self.world = SimWorld(COUNT, behaviour=LOSSY, seed=seed, limits=LIMITS, consent=ConsentRule(mode=mode))
        self.world.run(1)

    @rule(seconds=st.sampled_from([0.5, 1.0, 2.0, 5.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.run(seconds)

    @rule(n=DEVICES, noticed=st.booleans(), back_s=st.sampled_from([None, 2.0, 10.0, 40.0]))
    def device_leaves(self, n: int, noticed: bool, back_s: float | None) -> None:
        at_s = self.world.now_s + 0.1
        self.world.sim.fleet.inject(DeviceLeaves(at_s=at_s, device=f"d{n}", noticed=noticed))
        if back_s is not None:
            self.world.sim.fleet.inject(DeviceJoins(at_s=at_s + back_s, device=device(n)))

    @rule(n=DEVICES)
    def device_joins(self, n: int) -> None:
        self.world.sim.fleet.inject(DeviceJoins(at_s=self.world.now_s, device=device(n)))

    @rule(n=DEVICES)
    def unit_dies(self, n: int) -> None:
        self.world.sim.fleet.inject(UnitDies(at_s=self.world.now_s, device=f"d{n}"))

    @rule(n=DEVICES)
    def unit_hangs(self, n: int) -> None:
        self.world.sim.fleet.inject(UnitHangs(at_s=self.world.now_s, device=f"d{n}"))

    @rule(
        n=DEVICES,
        name=st.sampled_from(["cordon", "uncordon", "drain", "pin", "unpin"]),
        role=st.sampled_from(["train", "rollout", "idle"]),
        force=st.booleans(),
    )
    def operator_speaks(self, n: int, name: str, role: str, force: bool) -> None:
        fields = {"role": role} if name == "pin" else {}
        with contextlib.suppress(RefusedError):
            self.world.command(name, device=f"d{n}", force=force, **fields)

    @rule()
    def operator_approves(self) -> None:
        proposal = self.world.loop.state.proposal
        if proposal is not None:
            self.world.command("approve", plan_rev=proposal.solved.rev)

    @rule()
    def daemon_restarts(self) -> None:
        self.world.restart()

    @invariant()
    def no_device_has_two_owners(self) -> None:
        assert self.world.sim.fleet.conflicts == []

    @invariant()
    def nothing_was_done_that_was_not_recorded(self) -> None:
        assert self.world.witness.unrecorded == []

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.sim.fleet.inject(DeviceJoins(at_s=world.now_s, device=device(COUNT)))  # never without any device
        world.sim.fleet._behaviour = replace(LOSSY, lossy_until_s=world.now_s)
        world.run(45.0)  # what was injected into the future happens
        world.settle(CONVERGES_S)
        before = len(world.witness.applied)
        world.run(10)
        assert world.witness.applied[before:] == [], "a converged state yields no action"
        self.no_device_has_two_owners()
        self.nothing_was_done_that_was_not_recorded()
        self.overrides_won()

    def overrides_won(self) -> None:
        state, standing = self.world.loop.state, self.world.standing()
        for o in state.overrides:
            role = standing.get(o.device, "idle")
            if o.kind == "pin":
                assert role in (o.role, "idle")
            else:
                assert role == "idle"
        pinned = [o.device for o in state.overrides if o.kind == "pin" and o.role == "train"]
        usable = [d for d in pinned if not state.excluded(d)]
        if len(usable) == 1 and not state.infeasible:
            assert standing.get(usable[0]) == "train"


Fleet.TestCase.settings = settings(
    settings.default, max_examples=max(10, settings.default.max_examples // 4), stateful_step_count=25, deadline=None
)
TestFleet = Fleet.TestCase
