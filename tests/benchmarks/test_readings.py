"""What docs/gpu.md says of GPUs follows from the readings kept here."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_weights import goal_s

READINGS = Path(__file__).parent / "readings"
PAGE = (Path(__file__).parents[2] / "docs" / "gpu.md").read_text()
ETA = 4
UNDISTURBED = 112  # steps before the first kill


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (READINGS / "live-smollm2-2xh200.jsonl").read_text().splitlines()]


def test_grpo_on_two_gpus_kept_the_staleness_bound_and_learnt_the_form() -> None:
    steps = rows()[:UNDISTURBED]
    assert [r["step"] for r in steps] == list(range(UNDISTURBED))
    assert max(r["staleness_max"] for r in rows()) == ETA
    assert all(r["samples"] == 128 for r in steps)
    first, last = (statistics.fmean(r["reward_mean"] for r in part) for part in (steps[:10], steps[-10:]))
    assert (f"{first:.3f}", f"{last:.3f}") == ("0.016", "0.101")
    assert f"{first:.3f} to {last:.3f}" in PAGE
    fresh = [r for r in steps if "engine_trainer_logprob_diff" in r]
    assert fresh
    assert f"mean\n{statistics.fmean(r['engine_trainer_logprob_diff'] for r in fresh):.3f}" in PAGE
    assert f"largest {max(r['engine_trainer_logprob_diff_max'] for r in fresh):.2f}" in PAGE
    sent = [r for r in steps[1:] if r["direct_members"] == 1]
    assert len(sent) == len(steps) - 1
    assert f"in {statistics.median(r['transfer_s'] for r in sent) * 1e3:.0f} ms" in PAGE


def test_a_disturbed_run_lost_nothing() -> None:
    read = json.loads((READINGS / "live-smollm2-2xh200.json").read_text())
    kills = ("kill_rollout", "kill_train", "kill_daemon", "swap", "swap_back")
    assert all(read[f"{k}_identity_holds"] for k in kills)
    assert (read["audit_faults"], read["exit_code"], read["staleness_max"]) == ([], 0, ETA)
    for k in kills:
        assert f" {read[f'{k}_in_service_s']:.{1 if k == 'kill_daemon' else 0}f} s" in PAGE
    assert f"{read['daemon_core_share_a_device']:.1%}".replace("%", " %") in PAGE
    assert max(read["memory_used_bytes_after"]) < 1e9


@pytest.mark.parametrize("name", ["torch_1.5b", "vllm_1.5b", "vllm_7b"])
def test_weight_updates_met_their_goal(name: str) -> None:
    read = json.loads((READINGS / "weights-2xh200.json").read_text())[name]
    assert goal_s(read["bytes"], read["bandwidth"]) == pytest.approx(read["goal_s"], abs=1e-5)
    assert read["update_s"] <= read["goal_s"]
    assert f"{read['update_s'] * 1e3:.1f} ms" in PAGE


@pytest.mark.parametrize(
    ("file", "name", "way"),
    [
        ("trainer-h200", "0.5b_2048", "auto"),
        ("trainer-h200", "1.5b_2048", "cudnn"),
        ("trainer-h200", "1.5b_8192", "cudnn"),
        ("trainer-2xh200", "1.5b_2048", "cudnn"),
        ("trainer-2xh200", "1.5b_8192", "cudnn"),
        ("trainer-2xh200", "7b_2048", "auto"),
    ],
)
def test_training_speed_is_told_as_read(file: str, name: str, way: str) -> None:
    read = json.loads((READINGS / f"{file}.json").read_text())
    ours, plain = (read[f"{name}_{who}_tokens_per_s"] for who in (f"ours_{way}", "hf"))
    assert ours > plain
    assert f"| {ours:,.0f} | {plain:,.0f} | {ours / plain:.2f} |" in PAGE
