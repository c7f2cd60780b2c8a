"""A paced run whose trainer's device is slowed while it runs: seen, planned for, moved, and back once the device is as fast as
before. Nothing is lost. In its new role the device hardly works: what brings it back is either that or the retry."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_world import RayWorld

from runtime.rl.ledger.audit import audit
from tests.live import ROOT, LiveRun, by_role, identity_holds, steps

pytestmark = [pytest.mark.ray, pytest.mark.accept, pytest.mark.timeout(1200)]
WAIT_S = 240.0
BACK_S = 420.0
CUT = 0.2
LAST = 4  # steps that a rate is over; those before a move are not among the six that follow it
RULE = """
[drift]
enter = "10 s"
leave = "10 s"
cooldown = "10 s"
retry = "180 s"
"""
# Far slower than the shipped speeds, with smaller batches: a loaded host keeps up, so that only what is cut is slow. Training is
# the longer side, so the device that is best at it trains.
DECLARED = """
[kinds.fast]
decode_step_s = 0.12
prefill_tokens_per_s = 30000
train_tokens_per_s = 200
[kinds.wide]
decode_step_s = 0.10
prefill_tokens_per_s = 15000
train_tokens_per_s = 80
[kinds.old]
decode_step_s = 0.125
prefill_tokens_per_s = 10000
train_tokens_per_s = 50
"""
PLANNED = {
    'solve_time = "5 s"': 'solve_time = "40 s"',
    "prompts_per_step = 32": "prompts_per_step = 8",
    "responses_per_prompt = 8": "responses_per_prompt = 4",
    '"15 GFLOP/s"': '"0.3 GFLOP/s"',
    '"4.5 GFLOP/s"': '"0.1 GFLOP/s"',
    '"3.5 GFLOP/s"': '"0.07 GFLOP/s"',
}


@pytest.fixture
def run(ray_world: RayWorld, tmp_path: Path) -> Iterator[LiveRun]:
    live = LiveRun(tmp_path, environment=ray_world.env())
    yield live
    live.close()


def trained_tokens_per_s(run: LiveRun) -> float:
    """Over the last steps, from the end of one to the end of another."""
    rows = run.metrics()[-LAST:]
    return sum(r["trained_tokens"] for r in rows[1:]) / (rows[-1]["time_unix_s"] - rows[0]["time_unix_s"])


def test_a_run_moves_its_trainer_off_a_device_that_became_slow(run: LiveRun, tmp_path: Path) -> None:
    pacing = tmp_path / "pacing.toml"
    pacing.write_text(DECLARED)
    config = tmp_path / "local.toml"
    text = (ROOT / "configs/local.toml").read_text()
    text = text.replace('"models/', f'"{ROOT}/configs/models/').replace('"paced/local.toml"', f'"{pacing}"')
    for old_words, words in PLANNED.items():
        assert old_words in text
        text = text.replace(old_words, words)
    config.write_text(text + RULE)

    run.start(config)
    s = run.until(lambda s: steps(s) >= 24, "a trainer that is known", deadline_s=WAIT_S)
    [old] = by_role(s, "train")
    assert old.speed == 1.0
    fine = trained_tokens_per_s(run)

    # Five times slower from now on, in everything it does.
    pacing.write_text(DECLARED + f'\n[devices."{old.id}"]\nspeed = {CUT}\n')
    s = run.until(lambda s: any(d.speed < 1 for d in s.devices), "it is found slow", deadline_s=WAIT_S)
    cut = trained_tokens_per_s(run)
    [slow] = [d for d in s.devices if d.speed < 1]
    assert slow.id == old.id
    assert slow.status == "slow"
    assert 0.5 * CUT < slow.speed < 2 * CUT
    s = run.until(
        lambda s: bool(by_role(s, "train")) and by_role(s, "train")[0].id != old.id, "it moves", deadline_s=WAIT_S
    )
    assert s.plan is not None
    assert f"{old.display} trains at" in s.plan.trigger
    began = steps(s)
    s = run.until(lambda s: steps(s) >= began + 6, "steps elsewhere", deadline_s=WAIT_S)
    moved = trained_tokens_per_s(run)
    assert identity_holds(s)
    assert moved > 1.5 * cut

    pacing.write_text(DECLARED)
    recovered_s = time.monotonic()
    s = run.until(lambda s: all(d.speed == 1 for d in s.devices), "it counts as fast again", deadline_s=BACK_S)
    known_s = time.monotonic() - recovered_s
    s = run.until(
        lambda s: bool(by_role(s, "train")) and by_role(s, "train")[0].id == old.id, "it comes back", deadline_s=WAIT_S
    )
    came_s = time.monotonic() - recovered_s
    assert s.plan is not None
    assert old.display in s.plan.trigger
    print(f"paced: known after {known_s:.0f} s, back after {came_s:.0f} s by {s.plan.trigger!r}")
    began = steps(s)
    s = run.until(lambda s: steps(s) >= began + 6, "steps where it began", deadline_s=WAIT_S)
    back = trained_tokens_per_s(run)
    assert identity_holds(s)
    assert back > moved

    print(f"paced, trained tokens/s: {fine:.0f} before, {cut:.0f} cut, {moved:.0f} moved, {back:.0f} back")
    assert run.cli("down", "--run", run.info.id).returncode == 0
    assert run.end(120) == 0
    whole = audit(run.info.paths.ledger)
    assert whole.faults == ()
    assert whole.balanced
    assert len(run.metrics()) == max(m["step"] for m in run.metrics()) + 1
