"""`hexctl plan`, `config show` and `doctor`: offline, pure on stdout, and without what a run needs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hexctl.cli.found_fleet import found_cluster
from hexctl.cli.main import main
from runtime.backends.fleet import discover
from runtime.config.load import load_config

ABSENT = ("torch", "ray", "textual", "starlette", "uvicorn", "transformers")
PLAN_KEYS = {
    "feasible", "scheduler", "step_s", "tokens_per_s", "usd_per_h", "usd_per_mtok", "bound_tokens_per_s", "gap", "solve_s", "placements",
}  # fmt: skip
SMALL = """\
[model]
source = "shape"
path = "model.json"
[fleet]
source = "declared"
[[fleet.devices]]
kind = "card"
count = 3
[fleet.kinds.card]
peak_flops = "100 TFLOP/s"
hbm = "1 TB/s"
memory = "40 GB"
link = "50 GB/s"
"""
MODEL = {
    "model_type": "qwen2", "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


def without_the_workload(*argv: str) -> "subprocess.CompletedProcess[str]":
    """`hexctl argv` in a process that cannot import what only a run needs."""
    code = (
        "import sys\nfor m in sys.argv[1].split(','):\n    sys.modules[m] = None\n"
        "from hexctl.cli.main import main\nsys.exit(main(sys.argv[2:]))\n"
    )
    return subprocess.run(
        [sys.executable, "-c", code, ",".join(ABSENT), *argv], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture
def small(tmp_path: Path) -> Path:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "small.toml").write_text(SMALL)
    return tmp_path / "small.toml"


def call(capfd: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    got = main(list(argv))
    out, err = capfd.readouterr()
    assert got == code, err
    assert "Traceback" not in err
    return out, err


def test_cards_in_parts_are_planned_and_it_is_said_how(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    small.write_text(SMALL.replace("40 GB", "90 GB"))
    out, talk = call(capfd, "plan", str(small), "--set", "fleet.gpu_parts=2", "--output", "json")
    kinds = {p["kind"] for p in json.loads(out)["placements"]}
    assert kinds == {"card 1/2"}
    assert "card 1/2: not measured, with its part of the card for kernels and waits for turns assumed" in talk
    assert "card 1/2" not in call(capfd, "plan", str(small), "--output", "json")[1]


def test_plan_without_torch_ray_or_textual_writes_nothing_but_json() -> None:
    done = without_the_workload("plan", "local", "--output", "json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    assert document.keys() >= PLAN_KEYS
    assert document["feasible"] is True
    assert sum(len(p["devices"]) for p in document["placements"]) <= 4
    assert {p["role"] for p in document["placements"]} == {"train", "rollout"}
    assert all(set(p) >= {"role", "kind", "devices", "tp", "pp", "dp"} for p in document["placements"])
    numbers = ("step_s", "tokens_per_s", "usd_per_h", "usd_per_mtok", "bound_tokens_per_s", "gap", "solve_s")
    assert all(isinstance(document[k], float) for k in numbers)


def test_text_says_plan_prediction_bound_gap_and_why(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, "plan", str(small), "--evaluations", "50")
    for word in ("train", "rollout", "card", "throughput", "bound", "gap", "why"):
        assert word in out
    assert "$" not in out  # no price is configured
    assert err == ""


def test_unknown_prices_are_null(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = json.loads(call(capfd, "plan", str(small), "--output", "json")[0])
    assert document["usd_per_h"] is None
    assert document["usd_per_mtok"] is None


def test_a_model_larger_than_the_fleet(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, "plan", str(small), "--set", "fleet.kinds.card.memory=1 GB", "--output", "json", code=5)
    document = json.loads(out)
    assert document["feasible"] is False
    assert document["tokens_per_s"] is None
    assert document["conflicts"]
    assert "error: no plan: these limits cannot hold together" in err
    assert document["conflicts"][0]["limit"] in err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["--scheduler", "magic"], "magic"),
        (["--solve-time", "soon"], "not a duration"),
        (["--set", "lengths.response_mean=99"], "mean response length exceeds the longest"),
        (["--set", "model.path=nowhere.json"], "nowhere.json"),
        (["--set", "fleet.devices.0.kind=cart"], "unknown device kind"),
        (["--set", "fleet.kinds.card.price_usd_per_h=-1"], "got -1"),
    ],
)
def test_nonsense(small: Path, settings: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, "plan", str(small), *settings, code=2)
    assert out == ""
    assert says in err


def test_a_model_file_that_is_none(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (small.parent / "model.json").write_text("{}")
    assert "model.json" in call(capfd, "plan", str(small), code=2)[1]


def test_config_show_says_where_each_value_came_from(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, _ = call(capfd, "config", "show", str(small), "--set", "algorithm.eta=2", "--output", "json")
    values = json.loads(out)["values"]
    assert values["algorithm.eta"] == {"value": 2, "origin": "--set"}
    assert values["fleet.kinds.card.hbm"] == {"value": 1e12, "origin": f"{small}:11"}
    assert values["run.seed"] == {"value": 0, "origin": "default"}
    assert "fleet.kinds.card.hbm" in call(capfd, "config", "show", str(small))[0]


def test_a_run_without_its_packages_names_the_extra(tmp_path: Path) -> None:
    light = tmp_path / "light"  # stands for an environment with the core alone
    light.mkdir()
    folders = [Path(p) for p in sys.path if p]
    for name in ("click", "pydantic", "pydantic_core", "annotated_types", "typing_inspection", "typing_extensions.py"):
        (light / name).symlink_to(next(p / name for p in folders if (p / name).exists()))
    for name in ("hexctl", "runtime", "planner"):
        (light / name).symlink_to(Path(__file__).resolve().parents[2] / name)
    code = "import sys\nfrom hexctl.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code, "daemon", "local", "--root", str(tmp_path / "runs")],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "PYTHONPATH": str(light)},
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "without ray, torch" in done.stderr
    assert "hint: pip install 'hexctl[run]'" in done.stderr


def test_doctor_looks_and_changes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out, err = call(capfd, "doctor", "--root", str(tmp_path / "runs"), "--output", "json")
    found = {f["what"]: f for f in json.loads(out)}
    assert {"python", "packages for a run", "NVIDIA driver", "folder for sockets", "terminal"} <= found.keys()
    assert err == ""
    assert not (tmp_path / "runs").exists()


def test_schedulers_are_compared_best_first(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """One line each; as JSON the plan objects in the order asked for."""
    names = "areal-hex,hex,exhaustive"
    out, _ = call(capfd, "plan", str(small), "--compare", names)
    head, *rows = out.splitlines()
    assert head.split()[:3] == ["SCHEDULER", "STEP", "TOK/S"]
    assert {r.split()[0] for r in rows} == set(names.split(","))
    out, _ = call(capfd, "plan", str(small), "--compare", names, "--output", "json")
    documents = json.loads(out)
    assert [d["scheduler"] for d in documents] == names.split(",")
    assert all(d.keys() >= PLAN_KEYS for d in documents)
    assert min(d["step_s"] for d in documents) == pytest.approx(documents[1]["step_s"], rel=1e-6)
    _, err = call(capfd, "plan", str(small), "--compare", "hex", "--scheduler", "hex", code=2)
    assert "--compare" in err
    _, err = call(capfd, "plan", str(small), "--compare", "hex,nope", code=2)
    assert "no such scheduler" in err


def test_a_comparison_without_any_plan_says_so(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = ("--set", "fleet.kinds.card.memory=1 GB")
    out, _ = call(capfd, "plan", str(small), *settings, "--compare", "areal-hex,hex", code=5)
    assert out.count("no plan: ") == 2


def test_gpus_that_are_not_here_are_not_planned_from_the_file(
    small: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `hexctl up`: an error and a hint; the devices of the file only where the user says declared."""
    monkeypatch.setenv("HEXCTL_NVML", "/nowhere/libnvidia-ml.so.1")
    out, err = call(capfd, "plan", str(small), "--set", "fleet.source=gpus", code=2)
    assert out == ""
    assert err.startswith("error: fleet.source: no GPUs")
    assert '--set fleet.source="declared"' in err
    out, _ = call(capfd, "plan", str(small), "--set", "fleet.source=declared", "--evaluations", "50")
    assert "card" in out


def test_what_a_machine_has_comes_back_from_the_child_that_looks() -> None:
    """The CPU, which every machine has, as `hexctl up` would see it."""
    path = Path(__file__).parents[2] / "configs/local.toml"
    config = load_config(path, overrides={"fleet.source": "cpu", "fleet.devices": "[]"}).config
    cluster, notes = found_cluster(config)
    assert cluster == discover(config).cluster
    assert any("two devices" in n for n in notes)
