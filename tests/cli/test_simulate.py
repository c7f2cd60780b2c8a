"""`hexctl simulate` as people call it."""

import json
from pathlib import Path

import pytest

from hexctl.cli.main import main

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SMALL = ["simulate", "laptop", "--steps", "12"]


def test_the_answer_is_labelled_and_stands_beside_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(SMALL) == 0
    out = capsys.readouterr().out
    assert out.startswith("simulated: laptop, 12 steps")
    for word in ("predicted", "tokens/s", "$/Mtok", "staleness", "trainer", "rollout", "masked", "wasted"):
        assert word in out


def test_the_document_has_the_figures_and_the_timeline_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    timeline = tmp_path / "run.json"
    assert main([*SMALL, "--output", "json", "--seed", "3", "--timeline", str(timeline)]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["simulated"] is True
    assert (document["steps"], document["ended"]) == (12, "steps")
    there = document["trained_tokens"] + document["masked_tokens"] + document["in_flight_tokens"]
    assert document["generated_tokens"] == there + sum(document["wasted_tokens"].values())
    assert document["predicted"]["tokens_per_s"] > 0
    assert {e["ph"] for e in json.loads(timeline.read_text())["traceEvents"]} >= {"M", "X", "C"}


@pytest.mark.parametrize(
    ("lengths", "mean"), [("constant:10", 10), ("exponential:8", 8), ("lognormal:12,0.5", 12), ("file", 6)]
)
def test_lengths_of_its_own(lengths: str, mean: float, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if lengths == "file":
        lengths = str(tmp_path / "lengths.txt")
        Path(lengths).write_text("# tokens\n4\n8\n")
    assert main([*SMALL, "--output", "json", "--lengths", lengths]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["trained_tokens"] + document["masked_tokens"] > 0
    # The share of steps is what it was: tokens of a step over its samples are the mean length.
    local = json.loads(json.dumps(document))
    assert local["predicted"]["tokens_per_s"] * local["predicted"]["step_s"] == pytest.approx(
        mean * _samples(), rel=0.01
    )


def test_a_calibration_counts_as_in_a_plan(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Where every kind trains at a fifth of its speed, the prediction is slower, and the simulation follows it."""
    from planner.calibration import Calibration, EngineRate, KindTables, Provenance, TrainerRate, encode

    def kind(name: str, train: float) -> KindTables:
        shape = {"model": "m", "params": 1}
        engine = tuple(
            EngineRate(phase="decode", tp=1, running=n, context=14, tokens_per_s=n / (0.02 + 1e-4 * n), **shape)
            for n in (8, 32, 128)
        )
        first = EngineRate(phase="prefill", tp=1, running=128, context=10, tokens_per_s=5e4, **shape)
        trainer = TrainerRate(
            devices=1, sequence_tokens=17, micro_batch=8, recompute=False, tokens_per_s=train, **shape
        )
        how = Provenance(source="hexctl profile", how="paced")
        return KindTables(kind=name, provenance=how, engine=(*engine, first), trainer=(trainer,))

    steps = []
    for train in (3000.0, 600.0):
        path = tmp_path / f"{train}.json"
        path.write_text(encode(Calibration(kinds=tuple(kind(n, train) for n in ("fast", "wide", "old")))))
        told = ["--calibration", str(path), "--output", "json", "--set", "planner.scheduler=hex"]
        assert main(["simulate", "local", "--steps", "20", *told]) == 0
        out, err = capsys.readouterr()
        assert f"counting with {path}: fast, wide, old" in err
        document = json.loads(out)
        steps.append((document["predicted"]["step_s"], document["steady_step_s"]))
    (predicted, simulated), (slow_predicted, slow_simulated) = steps
    assert slow_predicted > 2 * predicted
    assert simulated == pytest.approx(predicted, rel=0.05)
    assert slow_simulated == pytest.approx(slow_predicted, rel=0.05)
    assert main(["simulate", "local", "--calibration", str(tmp_path / "absent.json")]) == 2
    assert "absent.json" in capsys.readouterr().err


def _samples() -> int:
    from runtime.config.load import load_config

    a = load_config(CONFIGS / "laptop.toml").config.algorithm
    return a.prompts_per_step * a.responses_per_prompt


@pytest.mark.parametrize("policy", ["elastic", "static", "checkpoint-restart"])
def test_the_shipped_trace_runs_under_every_policy(policy: str, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(CONFIGS / "traces" / "example.csv")
    words = ["simulate", "h800-8-h20-16", "--steps", "40", "--trace", trace, "--policy", policy, "-o", "json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--lengths", "normal:3"], "not a length distribution"),
        (["--lengths", "lognormal:3"], "not a length distribution"),
        (["--scheduler", "nobody"], "nobody"),
        (["--steps", "0"], "--steps"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (("--trace", "noise"), "noise: not a text file"),
        (("--trace", "nothing-there"), "nothing-there: cannot be read, got 'No such file or directory'"),
        (("--trace", "."), "cannot be read, got 'Is a directory'"),
        (("--lengths", "noise"), "noise: not a text file"),
        (("--lengths", "blank"), "blank: no lengths in it"),
        (("--lengths", "lognormal:-5,1"), "--lengths: not lengths that can be drawn"),
        (("--lengths", "lognormal:8,nan"), "--lengths: not lengths that can be drawn"),
        (("--lengths", "constant:1e9"), "lengths.response_max"),
        (("--growth", "nan"), "--growth: not a share"),
    ],
)
def test_what_cannot_be_simulated_is_told_by_its_option(
    told: tuple[str, str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noise").write_bytes(bytes(range(256)))
    Path("blank").write_text("# nothing\n")
    assert main([*SMALL, *told]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("growth", ["-0.3", "-3"])
def test_answers_that_shrink_end_at_one_token(growth: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--output", "json", "--growth", growth]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["steps"] == 12


def test_a_timeline_that_cannot_be_written_is_told_before_the_simulation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["simulate", "laptop", "--steps", "1000000000", "--timeline", str(tmp_path / "no" / "t.json")]) == 2
    assert "No such file" in capsys.readouterr().err
