"""The measured step of a run: over whole periods of checkpoints, by hand and for any phase."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.predicted import Row, compared, followed, over_periods, table
from planner import Feasible, solve
from planner.model import load_model_spec
from planner.plan import Prediction
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config
from runtime.core.fleet_event import CalibrationChanged
from runtime.core.plan_event import PlanAdopted
from runtime.core.solved import SolvedPlan
from runtime.store.events import open_store
from tests.live import ROOT, LiveRun


def run_of(steps: int, every: int, *, step_s: float = 0.5, checkpoint_s: float = 2.0, first: int = 0) -> list[Row]:
    """Rows of `metrics.jsonl`, each written after its step's checkpoint."""
    rows: list[Row] = []
    now = 1e9
    for step in range(first, first + steps):
        now += step_s + (checkpoint_s if (step + 1) % every == 0 else 0.0)
        rows.append({"step": step, "time_unix_s": now})
    return rows


def mean_s(rows: list[Row]) -> float:
    return (rows[-1]["time_unix_s"] - rows[0]["time_unix_s"]) / (len(rows) - 1)


def test_a_part_of_a_period_is_left_out() -> None:
    """Steps 7 to 45 with a checkpoint every 16: 38 intervals, of which the last 32 have two checkpoints. Steps of 0.5 s and
    checkpoints of 2 s make 0.625 s a step; all 38 happen to have two as well, and so 0.605 s."""
    rows = run_of(39, 16, first=7)
    kept, periods = over_periods(rows, 16)
    assert (periods, [kept[0]["step"], kept[-1]["step"]]) == (2, [13, 45])
    assert mean_s(list(kept)) == pytest.approx(0.5 + 2.0 / 16)
    assert mean_s(rows) == pytest.approx(0.5 + 4.0 / 38)


@given(every=st.integers(1, 40), first=st.integers(0, 100), steps=st.integers(2, 200))
def test_the_share_of_a_checkpoint_is_exact_whatever_the_phase(every: int, first: int, steps: int) -> None:
    rows = run_of(steps, every, first=first)
    kept, periods = over_periods(rows, every)
    assert kept[-1] == rows[-1]
    if periods:
        assert len(kept) == periods * every + 1
        assert len(rows) - len(kept) < every, "no whole period is left out"
        assert mean_s(list(kept)) == pytest.approx(0.5 + 2.0 / every)
    else:
        assert steps <= every
        assert list(kept) == rows


CONFIG = """
[run]
name = "made-up"

[model]
source = "shape"
path = "{shape}"

[algorithm]
prompts_per_step = 16
responses_per_prompt = 8

[sampling]
max_new_tokens = 192
max_running = 256

[trainer]
checkpoint_every_steps = 4

[lengths]
prompt_mean = 130
prompt_max = 400
response_mean = 150

[fleet]
source = "declared"
devices = [{{ kind = "H200", count = 2 }}]
"""


def a_run(folder: Path, factors: Sequence[tuple[float, float]]) -> Prediction:
    """A folder of 40 steps of a second each, from second 1000 on, that found a factor of the engine at each of those times. What the
    plan predicts."""
    (folder / "config.toml").write_text(CONFIG.format(shape=ROOT / "configs" / "models" / "smollm2-135m.json"))
    config = load_config(folder / "config.toml").config
    found = solve(problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path)))
    assert isinstance(found, Feasible)
    store = open_store(folder / "events.db")
    solved = SolvedPlan(
        rev=1, plan=found.plan, prediction=found.prediction, scheduler="areal-hex", bound_tokens_per_s=1.0, bound_scope="", gap=0.0,
        solve_s=0.1, finished=True, headline="", why=(), trigger="the start", made_at_s=0.0,
    )  # fmt: skip
    store.append([PlanAdopted(solved=solved)], 0.0)
    for at_s, factor in factors:
        changed = CalibrationChanged(
            kind="H200", role="rollout", factor=factor, before=1.0, samples=3, device_count=1,
            modelled_tokens_per_s=1.0, measured_tokens_per_s=factor,
        )  # fmt: skip
        store.append([changed], at_s)
    store.close()
    row = {"response_tokens_mean": 150.0, "batch_tokens": 128 * 280.0, "samples": 128, "cycle_s": 0.1, "publish_s": 0.1}
    more = {"generated_tokens_per_s": 1.0, "trainer_wait_share": 0.5}
    rows = [{**row, **more, "step": i, "time_unix_s": 1000.0 + i} for i in range(40)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return found.prediction


def test_what_a_run_knows_by_then_is_held_against_what_comes_after(tmp_path: Path) -> None:
    """After 4 + 36 / 3 = 16 steps, at second 1016, it knows 0.5: the factor before that is outdated, the one after it too late. Of the
    steps after it five periods of checkpoints are whole: 20 steps of a second."""
    planned = a_run(tmp_path, [(1005.0, 0.7), (1016.0, 0.5), (1016.5, 0.9)])
    found = compared(tmp_path, skip=4)
    assert found.at_lengths is not None
    assert found.at_lengths.step_s == pytest.approx(planned.step_s)
    assert planned.rollout_s > 1.2 * planned.train_s, "generation is the limit"
    assert found.factors == {"H200 rollout": 0.9}
    assert found.learnt is not None
    assert (found.learnt.steps, found.learnt.measured_s) == (20, 1.0)
    assert found.learnt.step_s == pytest.approx(2 * planned.step_s, rel=0.05)
    assert f"{found.learnt.step_s:.4g} s; the 20 steps after that: 1 s" in table(found)


def test_a_run_that_knew_nothing_by_then_says_nothing(tmp_path: Path) -> None:
    a_run(tmp_path, [(1030.0, 0.5)])
    found = compared(tmp_path, skip=4)
    assert found.learnt is None
    assert "steps after that" not in table(found)


def test_a_run_is_followed_to_its_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process in the daemon's place, which ends when its standard input does."""
    run = LiveRun(tmp_path)
    told, tell = os.pipe()
    command = [sys.executable, "-c", "import sys; sys.stdin.read(); sys.exit(3)"]
    run.daemon = subprocess.Popen(command, stdin=told, stdout=subprocess.PIPE, text=True)
    os.close(told)
    threading.Timer(1.0, os.close, (tell,)).start()
    assert followed(run, 7, say_s=0.1) == 3
    assert "0 of 7 steps after " in capfd.readouterr().err


def test_a_run_that_is_told_to_end_before_it_has_steps_says_so(tmp_path: Path) -> None:
    """SIGTERM ends the daemon too; what there is would be compared."""
    config = ROOT / "configs" / "sim-h800-h20.toml"  # no Ray; it has no steps of a trainer
    command = [sys.executable, "-m", "benchmarks.predicted", str(config), "--steps", "100000", "--root", str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as told:
        assert told.stdout is not None
        assert told.stdout.readline().startswith("0 of 100000 steps after 20 s")
        told.send_signal(signal.SIGTERM)
        said = told.communicate(timeout=120)[0]
    assert told.returncode == 1
    assert "0 steps after the first 5: too few" in said
