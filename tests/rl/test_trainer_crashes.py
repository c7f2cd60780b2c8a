"""A trainer that writes checkpoints beside its training and dies at any moment: every step is made once, nothing is lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.rl.ledger import audit
from runtime.rl.train.checkpoint import StoredState, list_complete
from runtime.rl.train.schedule import most_unsaved
from tests.rl.flow_world import scratch
from tests.rl.trainer_lives import Fate, Lives, a_trainer

STEPS = 8


def lived(fate: Fate, steps: int = STEPS) -> Lives:
    """A whole run under a fate, with what must be true of it afterwards."""
    with scratch() as folder:
        lives = Lives(folder, fate, steps=steps)
        lives.run()
        assert lives.desk.flow.status().steps_done == steps
        assert max(lives.lost) <= most_unsaved(fate.every)
        found = audit(folder / "ledger.db")
        assert found.faults == ()
        assert found.balanced
        for step, attempts in lives.batches.items():
            assert all(b == attempts[0] for b in attempts), f"step {step} was made again from another batch"
        seen = [s.sample for attempts in lives.batches.values() for s in attempts[0].samples]
        assert len(seen) == len(set(seen)), "a sample was trained in two steps"

        # The last checkpoint is what one trainer makes of these batches in one life.
        newest = list_complete(folder / "checkpoints")[-1]
        assert newest.step == steps - 1
        stored = StoredState(folder / "checkpoints", lineage=newest.lineage, step=newest.step)
        straight = a_trainer(folder / "straight")
        for step in range(steps):
            straight.train_step(lives.batches[step][0])
        for name, master in straight.master_parameters().items():
            assert torch.equal(stored.whole(f"param.{name}"), master)
        lives.desk.flow.close()
        return lives


@settings(max_examples=15)
@given(
    every=st.integers(1, 3),
    deaths=st.lists(st.integers(0, 60), max_size=4),
    writes=st.lists(st.integers(0, 5), max_size=4),
    quiesce_at=st.integers(0, STEPS),
    flow_too=st.booleans(),
)
def test_whenever_it_dies(every: int, deaths: list[int], writes: list[int], quiesce_at: int, flow_too: bool) -> None:
    lived(Fate(every=every, deaths=tuple(deaths), writes=tuple(writes), quiesce_at=quiesce_at, flow_too=flow_too))


@pytest.mark.parametrize("flow_too", [False, True])
def test_as_many_steps_as_can_be_lost_are_lost_and_made_again(flow_too: bool) -> None:
    """Every third step a checkpoint; the write of the first lasts until the second is due, and the trainer dies before that."""
    worst = 0
    for calls in range(52, 68, 3):
        fate = Fate(every=3, deaths=(calls,), writes=(100,), quiesce_at=STEPS, flow_too=flow_too)
        worst = max(worst, *lived(fate).lost)
    assert worst == most_unsaved(3) == 5


def test_with_a_checkpoint_each_step_no_death_makes_a_step_again() -> None:
    for calls in range(0, 40, 3):
        lives = lived(Fate(every=1, deaths=(calls,), writes=(), quiesce_at=STEPS, flow_too=False), steps=4)
        assert set(lives.lost) == {0}


def test_a_full_disk_and_an_order_to_wait() -> None:
    lives = lived(Fate(every=2, deaths=(), writes=(3, 0), quiesce_at=5, flow_too=True))
    assert len(lives.lost) > 1, "a life ended with the full disk"
    assert lives.quiesced == 1
