"""What the shipped configurations promise, through the command a user types. Too long for CI: `make accept`."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray_world import RayWorld

from runtime.rl.ledger.audit import audit
from tests.live import ROOT, LiveRun, journal_disagreements

pytestmark = [pytest.mark.ray, pytest.mark.accept, pytest.mark.timeout(1800)]
WINDOW = 20
PRETRAINED = ROOT / "data/smollm2-135m-instruct/config.json"
GSM8K = ROOT / "data/gsm8k/train.jsonl"


@pytest.fixture
def run(ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


@pytest.mark.parametrize(("seed", "minutes"), [(0, 5), (1, 3), (2, 3), (3, 3), (4, 3)])
def test_the_default_run_learns_and_keeps_it(run: LiveRun, seed: int, minutes: int) -> None:
    """From below 0.2 to above 0.9 within three minutes of training, and still there at the end."""
    run.start(ROOT / "configs/local.toml", "--set", f"run.seed={seed}", "--for", f"{minutes}m")
    assert run.end(minutes * 60 + 120) == 0
    metrics = run.metrics()
    rewards = [m["reward_mean"] for m in metrics]
    learnt = _above(rewards, 0.9)
    assert rewards[0] < 0.2
    assert learnt is not None, f"at most {max(rewards):.2f}"
    seconds = metrics[learnt]["time_unix_s"] - metrics[0]["time_unix_s"]
    last = statistics.fmean(rewards[-WINDOW:])
    spans = _mean(metrics, "two_versions_share")
    print(
        f"seed {seed}: above 0.9 after {learnt + 1} steps, {seconds:.0f} s; "
        f"last {WINDOW} of {len(rewards)} steps {last:.3f}; {spans:.0%} of samples span two versions"
    )
    assert seconds < 180
    assert last > 0.9
    assert max(m["staleness_max"] for m in metrics) <= 4
    assert spans >= 0.1
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert journal_disagreements(run.info.paths.ledger, eta=4) == []


@pytest.mark.skipif(not PRETRAINED.exists(), reason="no pretrained model in data/: docs/guides/pretrained.md")
@pytest.mark.skipif(not GSM8K.exists(), reason="no GSM8K in data/: docs/guides/pretrained.md")
def test_a_pretrained_model_takes_three_steps_on_gsm8k(run: LiveRun) -> None:
    """Real weights, real data, rewards by math-verify: three asynchronous steps on a CPU."""
    run.start(ROOT / "configs/smollm2-gsm8k.toml", "--steps", 3)
    assert run.end(1500) == 0
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == [0, 1, 2]
    assert all(0 <= m["reward_mean"] < 0.5 and m["trained_tokens"] > 0 for m in metrics)
    assert max(m["staleness_max"] for m in metrics) >= 1  # asynchronous: some tokens are older than their step
    assert audit(run.info.paths.ledger).balanced


def _above(rewards: Sequence[float], level: float) -> int | None:
    """The first step at which the mean of ten steps is above `level`."""
    ends = range(9, len(rewards))
    return next((i for i in ends if statistics.fmean(rewards[i - 9 : i + 1]) > level), None)


def _mean(metrics: Sequence[dict[str, Any]], key: str) -> float:
    return statistics.fmean(m[key] for m in metrics)
