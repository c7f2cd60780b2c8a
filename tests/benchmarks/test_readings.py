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


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (READINGS / "grpo-smollm2-2xh200.jsonl").read_text().splitlines()]


def test_grpo_on_two_gpus_kept_the_staleness_bound_and_learnt_the_form() -> None:
    steps = rows()
    assert [r["step"] for r in steps] == list(range(len(steps)))
    assert max(r["staleness_max"] for r in steps) == ETA
    assert all(r["samples"] == 64 for r in steps)
    first, last = (statistics.fmean(r["reward_mean"] for r in part) for part in (steps[:10], steps[-10:]))
    assert (f"{first:.3f}", f"{last:.3f}") == ("0.012", "0.100")
    assert f"{first:.3f} to {last:.3f}" in PAGE
    fresh = [r for r in steps if "engine_trainer_logprob_diff" in r]
    assert fresh
    assert f"mean {statistics.fmean(r['engine_trainer_logprob_diff'] for r in fresh):.3f}" in PAGE
    assert f"largest {max(r['engine_trainer_logprob_diff_max'] for r in fresh):.2f}" in PAGE
    sent = [r for r in steps[1:] if r["direct_members"] == 1]
    assert len(sent) == len(steps) - 1
    assert f"{statistics.median(r['transfer_s'] for r in sent) * 1e3:.0f} ms" in PAGE


@pytest.mark.parametrize("name", ["torch_1.5b", "vllm_1.5b", "vllm_7b"])
def test_weight_updates_met_their_goal(name: str) -> None:
    read = json.loads((READINGS / "weights-2xh200.json").read_text())[name]
    assert goal_s(read["bytes"], read["bandwidth"]) == pytest.approx(read["goal_s"], abs=1e-5)
    assert read["update_s"] <= read["goal_s"]
    assert f"{read['update_s'] * 1e3:.1f} ms" in PAGE


@pytest.mark.parametrize("name", ["0.5b_2048", "1.5b_2048", "1.5b_8192"])
def test_training_speed_is_told_as_read(name: str) -> None:
    read = json.loads((READINGS / "trainer-h200.json").read_text())
    ours, plain = (read[f"{name}_{who}_tokens_per_s"] for who in ("ours_auto", "hf"))
    assert ours > plain
    for figure in (f"{ours:,.0f}", f"{plain:,.0f}", f"{ours / plain:.2f}"):
        assert figure in PAGE
