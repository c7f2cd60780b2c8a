"""A run whose trainer has two ranks, whole: the plan gives it two devices, a rank is killed, a device is taken away."""

import os
import re
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray_world import RayWorld

from runtime.api.wire import Snapshot
from runtime.backends.ray.actors.marks import mark_names, read_mark
from runtime.backends.ray.level import LOST_OTHERS
from runtime.rl.ledger.audit import audit
from runtime.rl.train.checkpoint import complete_folders
from runtime.runs import start_ticks
from tests.live import ROOT, LiveRun, by_role, identity_holds, journal_disagreements, steps

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(600)]
WAIT_S = 150.0
EVERY = 4  # steps to a checkpoint, which is written beside the training
PACING = """
[kinds.even]
decode_step_s = 0.03
prefill_tokens_per_s = 8000
train_tokens_per_s = 3000
"""
FLEET = """
[fleet]
source = "paced"
pacing = "paced.toml"

[fleet.kinds.even]
peak_flops = "3 GFLOP/s"
hbm = "2 GB/s"
memory = "512 MB"
link = "100 MB/s"
launch = "10 ms"

[[fleet.devices]]
kind = "even"
count = 3
node = "n0"

[trainer]
max_world = 2

[planner]
solve_time = "5 s"
"""


@pytest.fixture
def run(ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


def config(folder: Path) -> Path:
    """The default run's task and model on three devices of one kind, of which the planner gives two to the trainer."""
    shipped = (ROOT / "configs/local.toml").read_text()
    head = shipped[: shipped.index("[fleet]")].replace('"models/', f'"{ROOT}/configs/models/')
    (folder / "paced.toml").write_text(PACING)
    (folder / "two.toml").write_text(head + FLEET)
    return folder / "two.toml"


def trainer_ranks(run: LiveRun) -> dict[str, int]:
    """Process of each living trainer rank, by its actor's name."""
    paths = run.info.paths
    found = {}
    for epoch in range(1, 20):
        for name in mark_names(paths, f"trainer-{epoch}"):
            mark = read_mark(paths, name)
            if mark is not None and start_ticks(mark.process.pid) == mark.process.start_ticks:
                found[name] = mark.process.pid
    return found


@contextmanager
def standing_still(pids: Iterable[int]) -> Iterator[None]:
    """Processes that do nothing within."""
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        deadline, rest = time.monotonic() + WAIT_S, threading.Event()
        while not all(_stands(pid) for pid in pids):
            assert time.monotonic() < deadline, "a trainer rank does not stand still"
            rest.wait(0.01)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _stands(pid: int) -> bool:
    return all(t.read_text().rpartition(")")[2].split()[0] == "T" for t in Path(f"/proc/{pid}/task").glob("*/stat"))


def behind_a_checkpoint(folder: Path, *, made: int) -> bool:
    """Whether there is a complete checkpoint, and none of all `made` steps: not even a begun one, whose folder is hidden."""
    begun = [int(m[1]) for p in folder.iterdir() if (m := re.search(r"s(\d{8})-l", p.name))]
    return bool(complete_folders(folder)) and max(begun) < made


def test_a_trainer_of_two_ranks_survives_the_death_of_one_and_goes_on_with_fewer(run: LiveRun, tmp_path: Path) -> None:
    run.start(config(tmp_path), "--set", f"trainer.checkpoint_every_steps={EVERY}")

    def trains_on_two(s: Snapshot, after: int) -> bool:
        return len(by_role(s, "train")) == 2 and steps(s) >= after

    s = run.until(lambda s: trains_on_two(s, 1), "steps on two ranks", deadline_s=WAIT_S)
    assert {d.replica for d in by_role(s, "train")} == {"t0"}
    ranks = trainer_ranks(run)
    assert sorted(ranks) == ["trainer-1", "trainer-1-rank1"]
    assert {d.pid for d in by_role(s, "train")} == set(ranks.values())

    # The rank that speaks to nobody is killed: both end, both come again, and what no checkpoint has is made again, from the
    # batches that were reserved.
    def killed_behind_a_checkpoint(s: Snapshot) -> bool:
        """Whoever is slow: both stand still while it is seen that the newest step is in no checkpoint, written or begun."""
        if not trains_on_two(s, EVERY + 1):
            return False
        with standing_still(ranks.values()):
            there = behind_a_checkpoint(run.info.paths.checkpoints, made=run.metrics()[-1]["step"] + 1)
            if there:
                os.kill(ranks["trainer-1-rank1"], signal.SIGKILL)
        return there

    run.until(killed_behind_a_checkpoint, "a step that no checkpoint has", deadline_s=WAIT_S)
    made = len(run.metrics())
    s = run.until(
        lambda s: trains_on_two(s, made + 3) and not trainer_ranks(run).keys() & ranks.keys(),
        "steps after the death",
        deadline_s=WAIT_S,
    )
    assert start_ticks(ranks["trainer-1"]) is None
    assert sorted(trainer_ranks(run)) == ["trainer-2", "trainer-2-rank1"]
    assert identity_holds(s)
    # Whichever rank's end is seen first: the killed one's, or that of the one that lost it.
    told = [e.message for e in s.events if "t0 died" in e.message and e.level != "info"]
    assert told
    assert all("rank 1: " in m or f"rank 0: rank 0 of the trainer {LOST_OTHERS}" in m for m in told), told

    # An operator takes one of its devices: it goes on with one rank, from the checkpoint of two.
    out = by_role(s, "train")[1].id
    assert run.command("cordon", device=out, reason="fan noise").accepted
    s = run.until(
        lambda s: [d.id == out for d in by_role(s, "train")] == [False] and sorted(trainer_ranks(run)) == ["trainer-3"],
        "a trainer of one rank",
        deadline_s=WAIT_S,
    )
    before = steps(s)
    s = run.until(lambda s: steps(s) >= before + 2, "steps of one rank", deadline_s=WAIT_S)
    assert identity_holds(s)

    done = run.cli("down", "--run", run.info.id, deadline_s=120)
    assert done.returncode == 0, done.stderr
    assert run.end(120) == 0
    assert trainer_ranks(run) == {}
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert journal_disagreements(run.info.paths.ledger, eta=4) == []
    # The death threw it back once, to behind a checkpoint; the trainer that moved had saved before it left.
    made_steps = [m["step"] for m in run.metrics()]
    (turn,) = (i for i in range(1, len(made_steps)) if made_steps[i] <= made_steps[i - 1])
    back = made_steps[turn]
    assert back % EVERY == 0
    assert 1 <= made_steps[turn - 1] - back + 1 <= 2 * EVERY - 1
    assert made_steps == [*range(made_steps[turn - 1] + 1), *range(back, made_steps[-1] + 1)]
