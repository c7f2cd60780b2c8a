"""Figures of the comparison with TRL, by hand."""

import pytest

from benchmarks.compare_trl import LAST, SETTLE, FormatReward, summary


def test_rates_count_the_steps_after_the_settled_one_over_the_time_from_its_end() -> None:
    """Steps of 2 s with 100 tokens each, the first SETTLE + 1 of 50 s with 10: 50 tokens/s."""
    rows = [{"at_s": 50.0 * i, "samples": 8.0, "trained_tokens": 10.0, "reward_mean": 0.0} for i in range(SETTLE + 1)]
    base = rows[-1]["at_s"]
    rows += [
        {"at_s": base + 2.0 * (i + 1), "samples": 4.0, "trained_tokens": 100.0, "reward_mean": 1.0} for i in range(40)
    ]
    found = summary(rows)
    assert found["trained_tokens_per_s"] == pytest.approx(50.0)
    assert found["samples_per_s"] == pytest.approx(2.0)
    assert found["tokens_a_sample"] == pytest.approx(25.0)
    assert found["step_s_median"] == pytest.approx(2.0)
    assert found["reward_last"] == 1.0
    assert found["reward_first"] == pytest.approx((LAST - SETTLE - 1) / LAST)
    rows[-1] = {"at_s": rows[-2]["at_s"] + 1000.0, "samples": 4.0, "trained_tokens": 1.0, "reward_mean": 1.0}
    assert summary(rows, 39)["trained_tokens_per_s"] == pytest.approx(50.0)
    found = summary(rows)
    assert found["trained_tokens_per_s"] < 5
    hours = (rows[-1]["at_s"] - rows[0]["at_s"]) / 3600
    assert found["reward_per_hour"] == pytest.approx((found["reward_last"] - found["reward_first"]) / hours)


def test_too_few_steps_have_no_rate() -> None:
    assert summary([{"at_s": 1.0, "trained_tokens": 1.0, "reward_mean": 0.0}]) == {"steps": 1}


def test_the_reward_for_trl_is_the_configured_verifiers() -> None:
    reward = FormatReward("exact", frozenset({2}))
    found = reward(
        completions=[[{"role": "assistant", "content": "7"}], [{"role": "assistant", "content": "7"}], "8"],
        completion_ids=[[5, 2], [5], [6, 2]],
        answer=["7", "7", "7"],
        prompts=["p"] * 3,
    )
    assert found == [1.0, 0.0, 0.0]
