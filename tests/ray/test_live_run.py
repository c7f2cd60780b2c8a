"""The shipped default run, whole: daemon, Ray, engines, trainer, ledger. An operator speaks, processes are killed, the run goes on."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld

from runtime.rl.ledger.audit import audit
from runtime.runs import start_ticks
from tests.live import (
    ROOT,
    LiveRun,
    by_role,
    identity_holds,
    in_hand,
    journal_disagreements,
    pids,
    resumed_samples,
    steps,
)

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(600)]
WAIT_S = 120.0


@pytest.fixture
def run(ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


def test_the_run_goes_on_whatever_happens_to_it(run: LiveRun) -> None:
    run.start(ROOT / "configs/local.toml")
    s = run.until(
        lambda s: steps(s) >= 3 and len(by_role(s, "rollout")) == 3, "three replicas and three steps", deadline_s=WAIT_S
    )
    assert s.run.label == "paced"
    assert identity_holds(s)

    # An operator takes a device out: its replica is drained, the rest goes on.
    out = by_role(s, "rollout")[0].id
    assert run.command("cordon", device=out, reason="fan noise").accepted
    s = run.until(
        lambda s: all(d.replica is None and d.cordoned for d in s.devices if d.id == out), "cordon", deadline_s=WAIT_S
    )
    before = steps(s)
    s = run.until(lambda s: steps(s) >= before + 2, "steps with two replicas", deadline_s=WAIT_S)
    assert identity_holds(s)
    assert any("cordon" in e.message and "fan noise" in e.message for e in s.events)

    # And gives it back.
    assert run.command("uncordon", device=out).accepted
    s = run.until(lambda s: out in {d.id for d in by_role(s, "rollout")}, "the replica is back", deadline_s=WAIT_S)

    # A replica dies without a word: another takes its place, its samples go on from their tokens.
    ledger = run.info.paths.ledger
    s = run.until(
        lambda s: any(in_hand(ledger, d.replica or "") >= 4 for d in by_role(s, "rollout")),
        "a replica in the middle of samples",
        deadline_s=WAIT_S,
    )
    victim = max(by_role(s, "rollout"), key=lambda d: in_hand(ledger, d.replica or ""))
    assert victim.pid is not None
    resumed = resumed_samples(ledger)
    os.kill(victim.pid, signal.SIGKILL)
    s = run.until(
        lambda s: any(d.id == victim.id and d.pid not in (None, victim.pid) for d in by_role(s, "rollout")),
        "a new replica",
        deadline_s=WAIT_S,
    )
    before = steps(s)
    s = run.until(lambda s: steps(s) >= before + 2, "steps after the death", deadline_s=WAIT_S)
    assert identity_holds(s)
    assert resumed_samples(ledger) > resumed
    assert any(victim.replica is not None and victim.replica in e.message and e.level != "info" for e in s.events)

    # Pinning another device to training moves the trainer there, through its checkpoint.
    old = by_role(s, "train")[0].id
    new = next(d.id for d in by_role(s, "rollout") if d.kind == "wide")
    before = steps(s)
    assert run.command("pin", device=new, role="train").accepted
    s = run.until(
        lambda s: [d.id for d in by_role(s, "train")] == [new] and steps(s) >= before + 3,
        "the trainer has moved",
        deadline_s=WAIT_S,
    )
    assert identity_holds(s)
    s = run.until(lambda s: old in {d.id for d in by_role(s, "rollout")}, "its old device generates", deadline_s=WAIT_S)

    # The daemon dies: nothing else does, and the run goes on without it.
    assert run.daemon is not None
    alive = {name: (pid, start_ticks(pid)) for name, pid in pids(s).items()}
    run.daemon.kill()
    run.daemon.wait(60)
    made = len(run.metrics())
    _until_lines(run, made + 3)
    run.start("--run", run.info.id)
    s = run.until(
        lambda s: steps(s) >= made + 4 and len(by_role(s, "rollout")) == 3 and pids(s).keys() == alive.keys(),
        "adoption",
        deadline_s=WAIT_S,
    )
    assert {name: (pid, start_ticks(pid)) for name, pid in pids(s).items()} == alive
    assert identity_holds(s)

    # The end, as typed.
    left = [pid for pid, _ in alive.values()]
    done = run.cli("down", "--run", run.info.id, deadline_s=120)
    assert done.returncode == 0, done.stderr
    assert run.end(120) == 0
    assert run.info.state == "ended"
    assert [pid for pid in left if start_ticks(pid) is not None] == []
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert journal_disagreements(run.info.paths.ledger, eta=4) == []
    assert len(run.metrics()) == max(m["step"] for m in run.metrics()) + 1


def _until_lines(run: LiveRun, count: int) -> None:
    """metrics.jsonl grows although no daemon lives. There is no API to wait on: the file itself is watched, with a deadline."""
    import select
    import time

    deadline = time.monotonic() + WAIT_S
    while len(run.metrics()) < count:
        assert time.monotonic() < deadline, "the run stopped with its daemon"
        select.select([], [], [], 0.2)
