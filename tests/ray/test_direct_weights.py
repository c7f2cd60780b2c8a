"""A whole run whose weights go straight from the trainer to its replicas over gloo; one of them is killed on the way."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld

from runtime.rl.ledger.audit import audit
from runtime.rl.weights import list_generations, read_generation
from tests.live import ROOT, LiveRun, by_role, identity_holds, journal_disagreements, steps

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(600)]
WAIT_S = 120.0


@pytest.fixture
def run(ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    text = (ROOT / "configs/local.toml").read_text()
    for name in ("models/tiny-qwen3", "paced/local.toml"):
        text = text.replace(f'"{name}"', f'"{ROOT / "configs" / name}"')
    (tmp_path / "direct.toml").write_text(text + '\n[weights]\npath = "direct"\nfull_every = 3\n')
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


def direct_members(run: LiveRun) -> list[float]:
    """Of each step so far: engines that its weights' predecessor went to."""
    return [m.get("direct_members", 0.0) for m in run.metrics()]


def test_weights_go_directly_and_by_disk_for_whoever_comes_late(run: LiveRun) -> None:
    run.start(run.folder / "direct.toml")
    s = run.until(
        lambda s: steps(s) >= 4 and len(by_role(s, "rollout")) == 3 and 3.0 in direct_members(run)[-2:],
        "three replicas, all fed directly",
        deadline_s=WAIT_S,
    )
    assert identity_holds(s)

    # A replica dies without a word; whatever transfer it was in fails or leaves it out, and the run goes on.
    victim = max(by_role(s, "rollout"), key=lambda d: d.running or 0)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    before = steps(s)
    s = run.until(
        lambda s: (
            steps(s) >= before + 2
            and any(d.id == victim.id and d.pid not in (None, victim.pid) for d in by_role(s, "rollout"))
        ),
        "a new replica, which loaded its first weights from disk",
        deadline_s=WAIT_S,
    )
    assert identity_holds(s)
    before = len(run.metrics())
    s = run.until(
        lambda s: 3.0 in direct_members(run)[before:], "the new replica is fed directly too", deadline_s=WAIT_S
    )
    assert identity_holds(s)

    done = run.cli("down", "--run", run.info.id, deadline_s=120)
    assert done.returncode == 0, done.stderr
    assert run.end(120) == 0
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert journal_disagreements(run.info.paths.ledger, eta=4) == []
    metrics = run.metrics()
    assert len(metrics) == max(m["step"] for m in metrics) + 1
    assert max(m["staleness_max"] for m in metrics if m["staleness_max"] is not None) <= 4
    # The engine's weights are the trainer's: they agree on tokens that the same version sampled and trained.
    assert max(m["engine_trainer_logprob_diff"] for m in metrics if "engine_trainer_logprob_diff" in m) < 1e-3
    newest = list_generations(run.info.paths.weights)[-1]
    assert newest.version == len(metrics), "the last weights are on disk when the trainer ends"
    read_generation(newest)
