"""A prompt's samples stay on one replica where that leaves no slot empty: the real flow with several replicas, any history."""

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.policy.staleness import StalenessPolicy
from runtime.rl.types import EngineStats, Lease
from tests.rl.flow_desk import Desk, whole
from tests.rl.flow_world import scratch

GROUP, PROMPTS, ETA = 4, 8, 2
NAMES = ("a", "b", "c")


class Several:
    """Three replicas of `holds` samples at most each. None tells a rate, so that each is granted all it has room for."""

    def __init__(self, folder: Path, holds: int) -> None:
        policy = StalenessPolicy(eta=ETA, prompts_per_step=PROMPTS, stale="mask")
        self.holds = holds
        self.desk = Desk(folder, policy=policy, responses_per_prompt=GROUP, longest_prompt=9)
        self.desk.start()
        self.held: dict[str, list[Lease]] = {n: [] for n in NAMES}
        self.serving: set[str] = set()
        self.at: dict[int, set[str]] = defaultdict(set)  # group -> replicas that had samples of it
        self.left: dict[int, int] = defaultdict(lambda: GROUP)  # samples never leased
        for name in (*NAMES, *NAMES):  # the first time for the weights
            self.ask(name, 0)

    def ask(self, name: str, ended: int) -> None:
        """One exchange in which so many samples end, the oldest first; what is leased must be as the rule says."""
        done, self.held[name] = self.held[name][:ended], self.held[name][ended:]
        stats = EngineStats(slots=4 * self.holds)  # a fourth while nothing was measured
        reply = self.desk.exchange(name, stats=stats, appends=tuple(whole(x, 0) for x in done))
        groups = [x.sample.group for x in reply.leases]
        frontier = (ETA + 1) * PROMPTS
        fresh = [g for g in range(frontier) if not self.at[g]]
        waiting = sum(self.left[g] for g in range(frontier))
        if name in self.serving:
            assert len(groups) == min(self.holds - len(self.held[name]), waiting), "a slot stays empty"
        for g in groups:
            due = g // PROMPTS
            assert all(self.left[o] == 0 for o in range(due * PROMPTS)), "an older step waits"
            if name not in self.at[g]:
                own = [o for o in range(frontier) if name in self.at[o] and self.left[o] and o // PROMPTS == due]
                assert not own, "another group before what is left of its own"
            if self.at[g] - {name}:
                assert name in self.at[g] or not [o for o in fresh if o // PROMPTS == due], (
                    "taken from another too early"
                )
            self.left[g] -= 1
            self.at[g].add(name)
            fresh = [o for o in fresh if o != g]
        self.held[name] += reply.leases
        self.serving.add(name)


@settings(max_examples=60, deadline=None)
@given(
    holds=st.integers(1, 10),
    moves=st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 10)), min_size=5, max_size=60),
)
def test_any_history_fills_all_slots_keeps_the_order_of_steps_and_takes_from_others_last(
    holds: int, moves: list[tuple[str, int]]
) -> None:
    with scratch() as folder:
        world = Several(folder, holds)
        for name, ended in moves:
            world.ask(name, ended)
        world.desk.flow.close()


@pytest.mark.parametrize("holds", [2, 6, 8])
def test_a_prompt_is_prefilled_hardly_more_than_once(tmp_path: Path, holds: int) -> None:
    """24 groups, samples that end one by one on replicas in turn. Each step's last groups are the only ones that are shared: by at
    most all three replicas, so 6 more prompts at most in 3 steps. One by one in the order of the queue they would be 3 x 24."""
    world = Several(tmp_path, holds)
    while any(world.left[g] for g in range((ETA + 1) * PROMPTS)):
        for name in NAMES:
            world.ask(name, 1)
    prefills = sum(len(at) for at in world.at.values())
    assert prefills <= (ETA + 1) * (PROMPTS + 2)
    world.desk.flow.close()


def test_a_group_whose_replica_is_gone_is_nobodys(tmp_path: Path) -> None:
    """`b` has two of its first group, then the other two; after these the oldest that waits is the group that `a` had begun."""
    world = Several(tmp_path, 2)
    (lost,) = {x.sample.group for x in world.held["a"]}
    (own,) = {x.sample.group for x in world.held["b"]}
    world.desk.flow.forget_replica(1, "a", 1)
    taken: list[set[int]] = []
    for _ in range(2):
        done, stats = world.held["b"], EngineStats(slots=8)
        world.held["b"] = [*world.desk.exchange("b", stats=stats, appends=tuple(whole(x, 0) for x in done)).leases]
        taken.append({x.sample.group for x in world.held["b"]})
    assert taken == [{own}, {lost}]
    world.desk.flow.close()
