"""Checkpoints written beside the training, in a whole run: what a killed trainer had not saved is made again, from the same
batches; one that leaves saves first."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld

from runtime.rl.ledger.audit import audit
from tests.live import ROOT, LiveRun, by_role, identity_holds, journal_disagreements, steps

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(600)]
WAIT_S = 120.0
EVERY = 4


@pytest.fixture
def run(ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


def test_a_killed_trainer_makes_again_what_was_in_no_checkpoint_and_one_that_leaves_saves_first(run: LiveRun) -> None:
    run.start(ROOT / "configs/local.toml", "--set", f"trainer.checkpoint_every_steps={EVERY}")
    s = run.until(
        lambda s: steps(s) > EVERY and steps(s) % EVERY == EVERY // 2 and len(by_role(s, "train")) == 1,
        "steps after a checkpoint",
        deadline_s=WAIT_S,
    )
    (trainer,) = by_role(s, "train")
    assert trainer.pid is not None
    os.kill(trainer.pid, signal.SIGKILL)
    made = steps(s)
    s = run.until(
        lambda s: steps(s) >= made + EVERY and any(d.pid != trainer.pid for d in by_role(s, "train")),
        "steps of another trainer",
        deadline_s=WAIT_S,
    )
    assert identity_holds(s)
    lines = [m["step"] for m in run.metrics()]
    turns = [i for i in range(1, len(lines)) if lines[i] <= lines[i - 1]]
    assert len(turns) == 1, lines
    back = lines[turns[0]]  # the first step that was made again
    assert back % EVERY == 0, "it goes on behind a checkpoint"
    assert 1 <= lines[turns[0] - 1] - back + 1 <= 2 * EVERY - 1
    assert any("t0 died" in e.message and e.level != "info" for e in s.events)

    assert run.cli("down", "--run", run.info.id).returncode == 0
    assert run.end(60) == 0
    ended = [m["step"] for m in run.metrics()]
    run.start("--run", run.info.id)
    s = run.until(lambda s: steps(s) >= ended[-1] + 3, "steps after the end", deadline_s=WAIT_S)
    assert identity_holds(s)
    assert run.cli("down", "--run", run.info.id).returncode == 0
    assert run.end(60) == 0
    last = [m["step"] for m in run.metrics()]
    assert last[: len(ended)] == ended
    assert last[len(ended) :] == list(range(ended[-1] + 1, last[-1] + 1)), "none of them was made again"
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert journal_disagreements(run.info.paths.ledger, eta=4) == []
