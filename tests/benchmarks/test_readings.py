"""What docs/gpu.md and docs/gpu-runs.md say of GPUs follows from the readings kept here."""

import bisect
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks import predicted_training as formula
from benchmarks.bench_weights import goal_s
from benchmarks.compare_trl import LAST, rows_of, summary
from planner import Feasible, solve
from planner.calibration import decode
from planner.cost.model import CostModel
from planner.model import load_model_spec
from planner.record import replace
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

READINGS = Path(__file__).parent / "readings"
ROOT = Path(__file__).parents[2]
PAGE = "\n".join((ROOT / "docs" / page).read_text() for page in ("gpu-runs.md", "gpu.md"))
FLAT = " ".join(PAGE.split())
ETA = 4
LONG_RUN: dict[str, Any] = {"file": "trainer-h200", "gpus": 1, "shape": "1.5b", "length": 8192}
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


def test_the_training_formula_beside_our_trainer_is_told_as_it_is() -> None:
    assert formula.table() in PAGE
    flash, cudnn = (
        formula.Run(**{**LONG_RUN, "name": n, "kernel": k})
        for n, k in (("ours_auto", "flash_2"), ("ours_cudnn", "cudnn"))
    )
    more = [formula.TOKENS / of(flash) - formula.TOKENS / of(cudnn) for of in (formula.predicted, formula.measured)]
    assert more == pytest.approx([0.22, 0.22], abs=0.01)
    assert formula.predicted(flash) == pytest.approx(formula.measured(flash), rel=0.06)


def steps_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (READINGS / f"{name}-smollm2-2xh200.jsonl").read_text().splitlines()]


def reached(steps: list[dict[str, float]], reward: float) -> tuple[float, int]:
    """Seconds and steps until the mean of `LAST` steps is that high."""
    for i in range(LAST, len(steps) + 1):
        if statistics.fmean(s["reward_mean"] for s in steps[i - LAST : i]) >= reward:
            return steps[i - 1]["at_s"] - steps[0]["at_s"], i
    raise AssertionError(f"never {reward}")


def test_hexctl_beside_trl_is_told_as_read() -> None:
    trl = json.loads((READINGS / "trl-smollm2-2xh200.json").read_text())
    still, learn = (rows_of(steps_of(name)) for name in ("still", "learn"))
    ours, theirs = summary(still), summary(trl["still"])
    rates = [f["trained_tokens_per_s"] for f in (ours, theirs)]
    assert rates[0] / rates[1] > 1.2
    assert f"| {rates[0]:,.0f} | {rates[1]:,.0f} | {rates[0] / rates[1]:.2f} |" in PAGE
    assert f"| {ours['step_s_median']:.3f} s | {theirs['step_s_median']:.3f} s |" in PAGE
    assert f"| {ours['tokens_a_sample']:.0f} | {theirs['tokens_a_sample']:.0f} |" in PAGE
    (our_s, our_steps), (their_s, their_steps) = reached(learn, 0.06), reached(trl["learn"], 0.06)
    assert (
        f"| {our_s:.0f} s, {our_steps} steps | {their_s:.0f} s, {their_steps} steps | {their_s / our_s:.1f} |" in PAGE
    )
    hourly = [summary(rows)["reward_per_hour"] for rows in (learn, trl["learn"])]
    assert f"| {hourly[0]:.1f} | {hourly[1]:.1f} | {hourly[0] / hourly[1]:.1f} |" in PAGE


def test_runs_beside_trl_kept_their_promises() -> None:
    read = json.loads((READINGS / "quiet-smollm2-2xh200.json").read_text())
    for name in ("still", "learn"):
        assert max(r["staleness_max"] for r in steps_of(name)) == ETA
        assert (read[name]["audit_faults"], read[name]["exit_code"]) == ([], 0)
        assert f"{read[name]['daemon_core_share_a_device']:.1%}" == "0.8%"
        assert 0.09 <= round(read[name]["flow_core_share_a_device"], 2) <= 0.10


def test_the_predicted_step_is_told_beside_the_measured_one() -> None:
    read = json.loads((READINGS / "predicted-2xh200.json").read_text())
    at = read["at_lengths"]
    times = [r["time_unix_s"] for r in steps_of("still")]
    assert (times[71] - times[12]) / 59 == pytest.approx(read["step_s"], abs=1e-3)
    for measured in (read["step_s"], (times[71] - times[7]) / 64):
        assert f"| {at['step_s']:.3f} s | {measured:.3f} s |" in PAGE
        assert f"{at['step_s'] / measured - 1:+.1%}".replace("%", " %") in PAGE
    assert (
        f"| {at['train_s']:.3f} s | {read['turn_s']:.3f} s | {at['train_s'] / read['turn_s'] - 1:+.0%}".replace(
            "%", " %"
        )
        in PAGE
    )


def test_admission_is_told_as_read() -> None:
    read = json.loads((READINGS / "admission-h200.json").read_text())["smollm2-135m"]
    together, at_once = (read[way]["tokens_per_s"] for way in ("together", "at once"))
    assert f"{together:,.0f} tokens/s, each at once {at_once:,.0f}" in PAGE


def read_steps(name: str) -> tuple[float, float]:
    """Seconds of a step, and trained tokens/s, of steps 5 to 30."""
    steps = [json.loads(line) for line in (READINGS / name).read_text().splitlines()][5:31]
    assert [r["step"] for r in steps] == list(range(5, 31))
    seconds = steps[-1]["time_unix_s"] - steps[0]["time_unix_s"]
    return seconds / (len(steps) - 1), sum(r["trained_tokens"] for r in steps[1:]) / seconds


def test_one_card_in_two_parts_is_told_as_read() -> None:
    """Beside the same steps of the run on two cards; and that nothing was lost when its processes were killed."""
    (one_s, one), (two_s, two) = read_steps("live-smollm2-1xh200.jsonl"), read_steps("learn-smollm2-2xh200.jsonl")
    assert f"steps 5 to 30 took {one_s:.2f} s, {one:,.0f}"[:-2] in PAGE  # to hundreds
    assert f"took {two_s:.2f} s, {two:,.0f}"[:-2] in PAGE
    assert f"{one / two:.0%} of two cards".replace("%", " %") in PAGE
    read = json.loads((READINGS / "live-smollm2-1xh200.json").read_text())
    kills = ("kill_rollout", "kill_train", "kill_daemon")
    assert all(read[f"{k}_identity_holds"] for k in kills)
    assert (read["audit_faults"], read["exit_code"], read["staleness_max"]) == ([], 0, ETA)
    for k in kills:
        assert f" {read[f'{k}_in_service_s']:.{1 if k == 'kill_daemon' else 0}f} s" in PAGE
    assert max(read["memory_used_bytes_after"]) < 1e9


def test_a_kept_cache_and_swapped_parts_are_told_as_read() -> None:
    read = json.loads((READINGS / "keep-smollm2-1xh200.json").read_text())
    seconds, rate = read_steps("keep-smollm2-1xh200.jsonl")
    assert f"steps 5 to 30 took {seconds:.2f} s, {rate:,.0f}"[:-2] in PAGE  # to hundreds
    assert (read["audit_faults"], read["exit_code"], read["staleness_max"]) == ([], 0, ETA)
    for swap in ("swap", "swap_back"):
        assert read[f"{swap}_identity_holds"]
        assert f" {read[f'{swap}_in_service_s']:.0f} s" in PAGE
        assert f" {read[f'{swap}_two_steps_s']:.0f} s" in PAGE
    assert f"from {read['reward_first_20']:.3f} (first 20 steps) to {read['reward_last_20']:.3f}" in PAGE
    rows = [json.loads(line) for line in (READINGS / "keep-smollm2-1xh200.jsonl").read_text().splitlines()]
    apart = [r["engine_trainer_logprob_diff"] for r in rows if "engine_trainer_logprob_diff" in r]
    assert f"mean {statistics.fmean(apart):.3f}, at most {read['logprob_difference_max']:.2f}" in PAGE


def test_generation_beside_vllm_alone_is_told_as_read() -> None:
    read = json.loads((READINGS / "generation-h200.json").read_text())
    ours, alone = (read[f"{who}_1.5b_256_sequences_tokens_per_s"] for who in ("hexctl", "vllm"))
    assert ours / alone >= 0.97
    assert f"{ours:,.0f} tokens/s, vLLM alone {alone:,.0f}" in PAGE


def assert_told(read: dict[str, Any], which: str = "") -> None:
    """The page has the median and the mean step and the trainer's turn beside their predictions, in rows that end with `which`."""
    at = read["at_lengths"]
    for planned, measured in (
        (at["step_s"], read["step_median_s"]),
        (at["step_s"], read["step_s"]),
        (at["train_s"], read["turn_s"]),
    ):
        off = f"{planned / measured - 1:+.1%}".replace("%", " %")
        assert f"{which} | {planned:.3f} s | {measured:.3f} s | {off} |" in PAGE.replace("**", "")


def still_run(predicted: str, run: str, *, steps: int, periods: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What was compared, and the run's steps: its figure is the mean of the last ones, whole periods of checkpoints."""
    read = json.loads((READINGS / f"predicted-{predicted}.json").read_text())
    rows = [json.loads(line) for line in (READINGS / f"{run}.jsonl").read_text().splitlines()]
    seconds = rows[-1]["time_unix_s"] - rows[-1 - steps]["time_unix_s"]
    assert seconds / steps == pytest.approx(read["step_s"], abs=1e-3)
    assert (read["steps"], read["periods"]) == (steps, periods)
    return read, rows


def test_the_step_on_parts_is_told_beside_its_prediction() -> None:
    read, rows = still_run("1xh200", "still-smollm2-1xh200", steps=64, periods=2)
    times = [r["time_unix_s"] for r in rows]
    assert_told(read)
    for first, last in ((15, 29), (40, 62)):
        seconds = times[last] - times[first]
        tokens = sum(r["response_tokens_mean"] * r["samples"] for r in rows[first + 1 : last + 1])
        assert f"{seconds / (last - first):.2f} s ({round(tokens / seconds, -2):,.0f}" in PAGE
    around = [times[i + 4] - times[i - 1] for i in (31, 63)]
    assert f"took {around[0]:.1f} s\n  and {around[1]:.1f} s" in PAGE


def test_the_step_with_checkpoints_beside_is_told_beside_its_prediction() -> None:
    read, steps = still_run("beside-1xh200", "beside-smollm2-1xh200", steps=64, periods=2)
    times = [r["time_unix_s"] for r in steps]
    assert_told(read, ", beside")
    stood = [steps[i]["checkpoint_s"] for i in (31, 63)]
    written = [r["checkpoint_write_s"] for r in steps if r["checkpoint_write_s"]]
    assert f"stood still for {stood[0]:.2f} s at the first" in PAGE
    assert f"for {stood[1]:.2f} s at the second" in PAGE
    assert f"written in {written[0]:.1f} and {written[1]:.1f} s" in PAGE
    around = [times[i + 4] - times[i - 1] for i in (31, 63)]
    others = 5 * statistics.median(b - a for a, b in itertools.pairwise(times[12:]))
    assert f"took {around[0]:.1f} s and {around[1]:.1f} s, where five others take {others:.1f}" in PAGE
    tokens = sum(r["response_tokens_mean"] * r["samples"] for r in steps[16:30])
    assert f"({round(tokens / (times[29] - times[15]), -2):,.0f} tokens/s in steps 16 to 29)" in PAGE


def test_the_engines_fast_and_slow_seconds_are_told_as_read() -> None:
    seconds = [json.loads(line) for line in (READINGS / "engine-seconds-1xh200.jsonl").read_text().splitlines()]
    fast = [s for s in seconds if s["step_median_ms"] < 7]
    slow = [s for s in seconds if s["step_median_ms"] > 9]
    assert len(slow) > len(seconds) / 2
    told = [statistics.median(s["step_median_ms"] for s in part) for part in (fast, slow)]
    assert f"**{told[0]:.1f} ms in some seconds and {told[1]:.1f} ms in most**" in PAGE
    held = [statistics.median(s["held"] for s in part) for part in (fast, slow)]
    assert abs(held[0] - held[1]) < 1, "no more wait in slow seconds"
    assert max(s["kv_used_most"] for s in seconds) < 0.05
    price = statistics.median(s["price_steps"] for s in seconds)
    assert f"({price:.1f} plain steps there)" in PAGE


def reckoned_step_s(cards: int, calibration: str, read: dict[str, Any]) -> float:
    """What the cost model of today says of that run's step: its calibration, its lengths, 256 samples on the replica."""
    shape = ROOT / "configs" / "models" / "smollm2-135m.json"
    changed = {
        "model.source": "shape",
        "model.path": str(shape),
        "fleet.source": "declared",
        "fleet.devices": f'[{{kind="H200", count={cards}}}]',
        "lengths.prompt_mean": str(read["prompt_mean"]),
        "lengths.response_mean": str(read["response_mean"]),
    }
    file = ROOT / "configs" / f"smollm2-gsm8k-gpus-{cards}.toml"
    config = load_config(file, overrides=changed, check_files=False).config
    known = decode((READINGS / calibration).read_text())
    problem = problem_from_config(config, cluster_from_config(config), load_model_spec(shape), calibration=known)
    found = solve(problem)
    assert isinstance(found, Feasible)
    placed = [replace(p, max_running=256) if p.role == "rollout" else p for p in found.plan.placements]
    scored = CostModel(problem).evaluate(replace(found.plan, placements=tuple(placed)))
    assert scored is not None
    return scored.prediction.step_s


@pytest.mark.parametrize(
    ("cards", "calibration", "run", "off"),
    [
        (2, "calibration-2xh200.json", "again-2xh200", 0.01),
        (1, "calibration-1xh200.json", "1xh200", 0.10),
        (1, "calibration-beside-1xh200.json", "beside-1xh200", 0.12),
        (1, "calibration-beside-1xh200.json", "slow-1xh200", 0.12),
    ],
)
def test_still_runs_reckoned_again_are_told_as_they_come_out(
    cards: int, calibration: str, run: str, off: float
) -> None:
    read = json.loads((READINGS / f"predicted-{run}.json").read_text())
    again, measured = reckoned_step_s(cards, calibration, read), read["step_s"]
    assert abs(again / measured - 1) <= off
    told = f"{again / measured - 1:+.1%}".replace("%", " %")
    assert f"| {read['at_lengths']['step_s']:.3f} s | {again:.3f} s | {measured:.3f} s | {told} |" in PAGE


def test_the_step_with_all_counted_is_told_beside_its_prediction() -> None:
    read, _ = still_run("again-2xh200", "again-smollm2-2xh200", steps=128, periods=4)
    assert f"{read['factors']['H200 rollout']:.2f}" == "1.01"
    assert_told(read, ", all counted")


def test_the_engines_thread_never_waits_for_a_processor() -> None:
    steps = [json.loads(line) for line in (READINGS / "again-smollm2-2xh200.jsonl").read_text().splitlines()][12:]
    plain, host = ([r[k] * 1e3 for r in steps if k in r] for k in ("engine_step_s", "engine_host_s"))
    assert f"took {statistics.fmean(plain):.1f} ms in the mean" in PAGE
    tenths = statistics.quantiles(plain, n=10)
    assert f"{tenths[0]:.1f} ms in the fastest tenth of the steps and more than {tenths[-1]:.1f} ms" in PAGE
    assert f"{statistics.fmean(host):.1f} ms of that is processor time" in PAGE
    seconds = [json.loads(line) for line in (READINGS / "host-seconds-2xh200.jsonl").read_text().splitlines()]
    ran = statistics.fmean(s["engine_run_s"] / s["span_s"] for s in seconds)
    assert f"{ran:.1%}".replace("%", " %") in PAGE
    assert sum(s["engine_wait_s"] for s in seconds) < 2e-3
    assert f"in {len(seconds)} s" in PAGE
    stolen = statistics.fmean(s["steal_jiffies"] / 100 / 32 / s["span_s"] for s in seconds)
    assert f"{stolen:.1%} was stolen".replace("%", " %") in PAGE


DISTURBANCES = {
    "kill_rollout": "kill -9 of vLLM's engine",
    "kill_train": "kill -9 of the trainer",
    "kill_daemon": "kill -9 of the daemon",
    "swap": "the two GPUs swap roles",
    "swap_back": "and swap back",
}


def assert_disturbances_told(read: dict[str, Any], which: str) -> None:
    """The books balanced after each, and the page has its seconds in rows that end with `which`."""
    for key, name in DISTURBANCES.items():
        digits = 1 if key == "kill_daemon" else 0
        service_s, steps_s = read[f"{key}_in_service_s"], read[f"{key}_two_steps_s"]
        assert f"| {name}, {which} | {service_s:.{digits}f} s | {steps_s:.{digits}f} s |" in PAGE
        assert read[f"{key}_identity_holds"]
    assert f"{read['daemon_core_share_a_device']:.2%} of a core".replace("%", " %") in FLAT
    assert f"flow {read['flow_core_share_a_device']:.1%}".replace("%", " %") in FLAT


def test_the_run_on_two_cards_disturbed_again_is_told_as_read() -> None:
    read = json.loads((READINGS / "live-again-smollm2-2xh200.json").read_text())
    assert_disturbances_told(read, "again")
    step_s, tokens_per_s = read_steps("live-again-smollm2-2xh200.jsonl")
    assert f"took {step_s:.2f} s, {round(tokens_per_s, -3):,.0f} trained" in PAGE.replace("\n", " ")
    steps = [json.loads(line) for line in (READINGS / "live-again-smollm2-2xh200.jsonl").read_text().splitlines()]
    assert max(r["staleness_max"] for r in steps) == ETA
    assert steps[-1]["step"] == 74
    first, last = (statistics.fmean(r["reward_mean"] for r in part) for part in (steps[:10], steps[-10:]))
    assert f"from {first:.3f} to {last:.3f} (first and last ten steps), engine" in PAGE
    apart = statistics.fmean(r["engine_trainer_logprob_diff"] for r in steps if "engine_trainer_logprob_diff" in r)
    most = max(r.get("engine_trainer_logprob_diff_max", 0.0) for r in steps)
    assert f"apart by mean {apart:.3f}, largest {most:.2f}" in PAGE
    made = [r["step"] for r in steps]
    assert sorted({n for n in made if made.count(n) > 1}) == list(range(32, 44))


def test_the_run_on_two_cards_to_its_end_is_told_as_read() -> None:
    """108 steps that learn, with every disturbance; those that were made again count once."""
    read = json.loads((READINGS / "live-third-smollm2-2xh200.json").read_text())
    assert_disturbances_told(read, "third")
    assert (read["audit_faults"], read["exit_code"], read["staleness_max"]) == ([], 0, ETA)
    assert max(read["memory_used_bytes_after"]) < 0.65e9
    assert f"the third profile, {read['total_s']:.0f} s)" in FLAT
    steps = [json.loads(line) for line in (READINGS / "live-third-smollm2-2xh200.jsonl").read_text().splitlines()]
    made = [r["step"] for r in steps]
    assert sorted({n for n in made if made.count(n) > 1}) == list(range(20))
    learnt = list({r["step"]: r for r in steps}.values())
    assert [r["step"] for r in learnt] == list(range(108))
    rewards, tokens = (
        [statistics.fmean(r[k] for r in part) for part in (learnt[:10], learnt[-10:])]
        for k in ("reward_mean", "response_tokens_mean")
    )
    assert f"reward {rewards[0]:.3f} to {rewards[1]:.3f} (first and last ten), answers from" in FLAT
    assert f"from {tokens[0]:.0f} tokens to {tokens[1]:.0f}," in FLAT
    apart = statistics.fmean(r["engine_trainer_logprob_diff"] for r in steps if "engine_trainer_logprob_diff" in r)
    assert f"{apart:.3f} apart in the mean, at most {read['logprob_difference_max']:.2f}" in FLAT


def test_the_third_step_is_told_beside_its_predictions() -> None:
    """The one before the run, and the one that the run made by its own factors."""
    read, steps = still_run("third-2xh200", "third-smollm2-2xh200", steps=96, periods=3)
    times = [r["time_unix_s"] for r in steps]
    assert_told(read, ", third")
    assert reckoned_step_s(2, "calibration-third-2xh200.json", read) == pytest.approx(
        read["at_lengths"]["step_s"], rel=0.01
    )
    assert f"its factor was {read['factors']['H200 rollout']:.2f}" in FLAT
    by = read["learnt"]
    assert (times[109] - times[45]) / 64 == pytest.approx(by["measured_s"], abs=1e-6)
    off = f"{by['step_s'] / by['measured_s'] - 1:+.1%}".replace("%", " %")
    known, after = f"after {by['after_steps']} steps {by['step_s']:.3f} s", f"took {by['measured_s']:.3f} s, **{off}**"
    assert f"{known}, the {by['steps']} steps after that {after}" in FLAT
    plain = [r["engine_step_s"] * 1e3 for r in steps[12:] if "engine_step_s" in r]
    tenths = statistics.quantiles(plain, n=10)
    mean, fast, slow = (f"{x:.1f} ms" for x in (statistics.fmean(plain), tenths[0], tenths[-1]))
    assert f"{mean} in the mean, {fast} in the fastest tenth of the steps and more than {slow} in the slowest" in FLAT
    (kind,) = decode((READINGS / "calibration-third-2xh200.json").read_text()).kinds
    full = max((r for r in kind.engine if r.phase == "decode"), key=lambda r: r.running)
    assert f"of {full.running} samples took {full.running / full.tokens_per_s * 1e3:.1f} ms in the two seconds" in FLAT


def test_the_step_of_a_profile_with_both_at_work_is_told_beside_its_prediction() -> None:
    read, steps = still_run("beside-2xh200", "beside-smollm2-2xh200", steps=96, periods=3)
    assert_told(read, ", both at work")
    assert reckoned_step_s(2, "calibration-beside-2xh200.json", read) == pytest.approx(
        read["at_lengths"]["step_s"], rel=0.01
    )
    assert max(r["staleness_max"] for r in steps) == ETA
    planned = read["planned"]["step_s"]
    off = f"{planned / read['step_s'] - 1:+.1%}".replace("%", " %")
    assert f"{planned:.3f} s had been predicted, {off}" in FLAT
    assert f"a factor of {read['factors']['H200 rollout']:.2f}" in FLAT
    assert pace(steps) in FLAT.replace("\n", " ")
    stops = []
    for name in ("beside", "third"):
        (kind,) = decode((READINGS / f"calibration-{name}-2xh200.json").read_text()).kinds
        (update,) = kind.updates
        stops.append(f"{update.swap_s * 1e3:.0f} ms")
    assert f"New weights stopped the engine for {stops[0]}" in FLAT
    assert f"smaller KV cache; {stops[1]} in the profile before" in FLAT


def pace(steps: list[dict[str, Any]]) -> str:
    """Of plain decode steps after the first ones."""
    plain = [r["engine_step_s"] * 1e3 for r in steps[12:] if "engine_step_s" in r]
    tenths = statistics.quantiles(plain, n=10)
    mean, fast, slow = (f"{x:.1f} ms" for x in (statistics.fmean(plain), tenths[0], tenths[-1]))
    return f"{mean} in the mean, {fast} in the fastest tenth of the steps, more than {slow} in the slowest"


def test_the_step_of_the_larger_shape_is_told_beside_its_prediction() -> None:
    read, steps = still_run("large-2xh200", "large-2xh200", steps=32, periods=2)
    assert_told(read, ", 1.5B")
    rollout_s = read["at_lengths"]["rollout_s"]
    assert (
        f"predicted to take {rollout_s:.2f} s and took {read['step_s']:.2f} ({rollout_s / read['step_s'] - 1:.0%}".replace(
            "%", " %"
        )
        in FLAT
    )
    assert f"its factor was {read['factors']['H200 rollout']:.2f}" in FLAT
    plain = statistics.fmean(r["engine_step_s"] for r in steps[12:] if "engine_step_s" in r)
    (kind,) = decode((READINGS / "calibration-large-2xh200.json").read_text()).kinds
    full = max((r for r in kind.engine if r.phase == "decode"), key=lambda r: r.running)
    profiled = full.running / full.tokens_per_s
    assert f"took {plain * 1e3:.1f} ms in the mean where the profile had seen {profiled * 1e3:.1f} ms" in FLAT
    by = read["learnt"]
    off = f"{by['step_s'] / by['measured_s'] - 1:+.1%}".replace("%", " %")
    known = f"after {by['after_steps']} steps was {by['step_s']:.3f} s"
    assert f"{known}, the {by['steps']} steps after that took {by['measured_s']:.3f} s: {off}" in FLAT
    apart = statistics.fmean(r["engine_trainer_logprob_diff"] for r in steps if "engine_trainer_logprob_diff" in r)
    most = max(r.get("engine_trainer_logprob_diff_max", 0.0) for r in steps)
    assert f"{apart:.3f} apart in a token's logprob, at most {most:.2f}" in FLAT
    stood = [r["checkpoint_s"] for r in (steps[15], steps[31])]
    assert f"the first checkpoint stood still for {stood[0]:.1f} s, the second for {stood[1]:.1f}" in FLAT
    long = [r["publish_s"] for r in steps[2:] if r["publish_s"] > 1]
    assert f"still took {long[0]:.1f} and {long[1]:.1f} s" in FLAT
    written = sorted(r["checkpoint_write_s"] for r in steps if r["checkpoint_write_s"])
    assert f"in {written[0]:.0f} to {written[1]:.0f} s, beside" in FLAT
    turns = [r["train_s"] + r["publish_s"] for r in steps[16:27] + steps[32:41]]
    assert max(turns) < 1.1, "whether a checkpoint is written beside or not"
    assert f"turn took {statistics.median(turns):.1f} s whether" in FLAT


def test_commits_beside_a_large_file_are_told_as_read() -> None:
    read = json.loads((READINGS / "disk-h200-host.json").read_text())
    for key, name in (("at_once", "in one go"), ("by_portions", "by portions")):
        way = read[key]
        rate = way["bytes"] / way["seconds"] / 1e9
        assert f"| {name} | {rate:.2f} GB/s | {way['median_ms']:.1f} ms | {way['max_ms']:.0f} ms |" in PAGE
    steps = [json.loads(line) for line in (READINGS / "beside-smollm2-2xh200.jsonl").read_text().splitlines()]
    assert all(0.8 < steps[i]["flow_commit_s"] < 0.95 for i in (35, 66))
    assert statistics.median(r["flow_commit_s"] for r in steps) == pytest.approx(0.1, abs=0.05)
    lock = read["lock_8_gib"]
    touched, locked, before = (lock[k] for k in ("touched_first_s", "lock_touched_s", "lock_untouched_s"))
    assert f"{touched:.1f} + {locked:.1f} s instead of {before:.1f}" in FLAT


def test_the_summary_is_of_the_newest_readings() -> None:
    """Each row of docs/gpu.md's table that has readings here."""
    summary = " ".join((ROOT / "docs" / "gpu.md").read_text().split())

    def read(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((READINGS / f"{name}.json").read_text())
        return found

    live = read("live-third-smollm2-2xh200")
    took = {k: live[f"{k}_in_service_s"] for k in DISTURBANCES}
    roles = [f"{took[k]:.0f} s" for k in ("swap", "swap_back", "kill_rollout", "kill_train")]
    assert f"filled again after {', '.join(roles)}, {took['kill_daemon']:.1f} s;" in summary
    assert f"{live['daemon_core_share_a_device']:.2%}, no GPU memory".replace("%", " %", 1) in summary
    assert f"at most {live['logprob_difference_max']:.2f} |" in summary
    weights = read("weights-2xh200")
    told = [
        f"{n} {(w := weights[f'vllm_{n.lower()}'])['update_s'] * 1e3:.1f} ms of {w['goal_s'] * 1e3:.1f} ms"
        for n in ("1.5B", "7B")
    ]
    assert ", ".join(told) in summary
    beside, large = (read(f"predicted-{n}-2xh200") for n in ("beside", "large"))
    off = [f"{r['at_lengths']['step_s'] / r['step_s'] - 1:+.1%}".replace("%", " %") for r in (beside, large)]
    assert f"SmolLM2-135M {off[0]}; the 1.5B shape, profiled on another machine: **{off[1]}**" in summary
    generation = read("generation-h200")
    ratio = generation["hexctl_1.5b_256_sequences_tokens_per_s"] / generation["vllm_1.5b_256_sequences_tokens_per_s"]
    assert f"1.5B, 256 sequences: {ratio:.2f} x on one H200" in summary


def test_where_the_engines_thread_spends_its_time_is_told_as_read() -> None:
    read = json.loads((READINGS / "engine-thread-2xh200.json").read_text())
    share = {k: f"{v * 100:.0f}" for k, v in read["shares"].items()}
    assert (
        f"{share['VllmCore.step']} % are steps of vLLM ({share['GPUModelRunner.execute_model']} % the launches" in FLAT
    )
    assert (
        f"{share['VllmCore.swap']} % new weights from the second buffer, of which {share['load_weights']} went" in FLAT
    )
    assert f"and {share['reset_prefix_cache']} gave the prefix cache up, and {share['VllmCore.load']} %" in FLAT
    assert f"And {share['execute_model without a CUDA graph']} % were launched without" in FLAT
    assert read["samples"] / read["of_all_threads"] > 0.95


def test_the_pace_of_one_hardware_thread_is_told_as_read() -> None:
    """Of each second's processor the pace of the step that it lies in."""
    steps = [json.loads(line) for line in (READINGS / "again-smollm2-2xh200.jsonl").read_text().splitlines()]
    seconds = [json.loads(line) for line in (READINGS / "host-seconds-2xh200.jsonl").read_text().splitlines()]
    times = [r["time_unix_s"] for r in steps]
    paces: dict[int, list[float]] = {}
    for s in seconds:
        at = steps[bisect.bisect(times, s["time_unix_s"])]
        if "engine_step_s" in at:
            paces.setdefault(s["engine_cpu"], []).append(at["engine_step_s"] * 1e3)
    most = max(paces.values(), key=len)
    assert f"steps took {min(most):.1f} ms at one time and {max(most):.1f} ms at another" in FLAT


def test_two_ranks_over_nccl_do_what_one_does() -> None:
    read = json.loads((READINGS / "ranks-2xh200.json").read_text())
    for one, two, loss, norm in zip(read["one"], read["several"], (1e-8, 5e-5), (3e-5, 4e-4), strict=True):
        assert abs(one["loss"] - two["loss"]) / abs(one["loss"]) == pytest.approx(loss, rel=3)
        assert abs(one["grad_norm"] / two["grad_norm"] - 1) == pytest.approx(norm, rel=0.2)
        assert abs(one["loss"] - two["loss"]) < 1e-4 * abs(one["loss"])
