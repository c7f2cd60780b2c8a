"""`hexctl profile` as a command, and plans that count with its file."""

import json
from pathlib import Path

import pytest

from hexctl.cli.main import main
from hexctl.cli.render.profile import profile_text
from planner.calibration import Calibration, EngineRate, GemmPoint, KindTables, Provenance, TrainerRate, encode
from runtime.config.calibration import calibration_file, load_calibration
from runtime.config.load import load_config
from runtime.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(autouse=True)
def no_cards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("HEXCTL_RAY_ADDRESS", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(CONFIGS.parent))  # for the child, from another folder
    monkeypatch.chdir(tmp_path)


def measured(tmp_path: Path, step_s: float = 0.2, train: float = 3000.0) -> Path:
    """A file that says that `fast` decodes and trains at half of what the configuration declares."""
    engine = tuple(
        EngineRate(phase="decode", model="tiny", params=1, tp=1, running=n, context=14, tokens_per_s=n / step_s)
        for n in (16, 128)
    )
    trainer = TrainerRate(
        model="tiny", params=1, devices=1, sequence_tokens=17, micro_batch=8, recompute=False, tokens_per_s=train
    )
    tables = KindTables(
        kind="fast", provenance=Provenance(source="hexctl profile", how="paced"), engine=engine, trainer=(trainer,)
    )
    path = tmp_path / "measured.json"
    path.write_text(encode(Calibration(kinds=(tables,))))
    return path


def plan(capfd: pytest.CaptureFixture[str], *words: str, code: int = 0) -> tuple[dict[str, object], str]:
    capfd.readouterr()
    assert main(["plan", "local", "--output", "json", "--evaluations", "300", *words]) == code
    out, err = capfd.readouterr()
    return json.loads(out) if out else {}, err


def test_a_dry_run_says_what_and_how_long_and_writes_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "local", "--dry-run", "--output", "json"]) == 0
    document = json.loads(capfd.readouterr().out)
    [node] = document["nodes"]
    assert [i["kind"] for i in node["items"]] == ["fast", "wide", "old"]
    assert node["expected_s"] == pytest.approx(36.0)
    assert main(["profile", "--dry-run", "--quick"]) == 0
    out = capfd.readouterr().out
    assert "items, about" in out
    assert "gloo collectives over 2 ranks" in out
    assert not (tmp_path / "runs").exists()


def test_set_without_a_configuration_is_refused_where_cards_are(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "no-such-configuration", "--dry-run"]) == 2
    assert "no such configuration" in capfd.readouterr().err


def test_a_plan_counts_with_the_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    before, talk = plan(capfd)
    assert "counting with" not in talk
    after, talk = plan(capfd, "--calibration", str(measured(tmp_path)))
    assert "measured.json: fast" in talk
    train = {p["kind"]: p["rate_tokens_per_s"] for p in after["placements"] if p["role"] == "train"}  # type: ignore[index,attr-defined]
    assert after["tokens_per_s"] < before["tokens_per_s"]  # type: ignore[operator]
    if "fast" in train:
        # 256 samples of 17 tokens at 3,000 tokens/s are 1.45 s for 1,792 trained tokens.
        assert train["fast"] == pytest.approx(1792 / (4352 / 3000), rel=0.03)


def test_the_usual_place_the_configurations_word_and_none(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = measured(tmp_path)
    plain, _ = plan(capfd)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "calibration.json").write_text(file.read_text())
    usual, talk = plan(capfd)
    assert "runs/calibration.json: fast" in talk
    assert usual["step_s"] != plain["step_s"]
    none, talk = plan(capfd, "--calibration", "none")
    assert (none["step_s"], talk) == (plain["step_s"], "")
    off, _ = plan(capfd, "--set", 'planner.calibration="none"')
    assert off["step_s"] == plain["step_s"]
    named, _ = plan(capfd, "--set", f'planner.calibration="{file}"')
    assert named["step_s"] == usual["step_s"]


def test_a_file_that_is_none_is_told_with_its_place(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _, talk = plan(capfd, "--calibration", str(tmp_path / "absent.json"), code=2)
    assert "hint: hexctl profile writes one" in talk
    bad = tmp_path / "bad.json"
    bad.write_text('{"format": "hexctl-calibration", "version": 1, "kinds": [{"kind": 3}]}')
    _, talk = plan(capfd, "--calibration", str(bad), code=2)
    assert "kinds[0].kind" in talk
    with pytest.raises(ConfigError, match="cannot read"):
        load_calibration(tmp_path)


def test_which_file_by_the_configuration(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "local.toml").config
    assert calibration_file(config, root=tmp_path) is None
    (tmp_path / "calibration.json").write_text("{}")
    assert calibration_file(config, root=tmp_path) == tmp_path / "calibration.json"
    assert calibration_file(config, named="none", root=tmp_path) is None
    assert calibration_file(config, named="x.json", root=tmp_path) == Path("x.json")


def test_a_document_in_words() -> None:
    kind = {
        "kind": "H100", "how": "measured", "device": "NVIDIA H100", "points": 80, "gemm_flops": 7.1e14,
        "copy_bytes_per_s": 2.9e12, "decode_attention_bytes_per_s": 2.2e12, "all_reduce_bytes_per_s": 1.8e11,
        "all_reduce_ranks": 8, "links_bytes_per_s": {"host_to_device": 5.5e10},
        "engine": [{"phase": "decode", "model": "reference-0.6b", "running": 64, "tokens_per_s": 1234.0}],
        "trainer": [{"model": "reference-0.6b", "tokens_per_s": 56789.0}],
    }  # fmt: skip
    node = {"node": "a", "failure": "", "notes": ["left out: card to card"], "seconds": 91.0, "kinds": ["H100"]}
    lost = {"node": "b", "failure": "does not answer for 21 s", "notes": [], "seconds": None, "kinds": []}
    document = {"dry_run": False, "file": "x.json", "nodes": [node, lost], "kinds": [kind], "notes": ["slow"]}
    text = profile_text(document)
    for words in (
        "710.0 TFLOP/s",
        "2.9 TB/s",
        "180.0 GB/s over 8",
        "1,234",
        "56,789",
        "host to device",
        "b is left out: does not",
    ):
        assert words in text
    own = {"model": "own", "tokens_per_s": 7000.0, "samples": 128, "rows": 2, "step_s": 0.5, "recompute": True, "attention": "varlen",
           "compiled": True, "checkpoint_s": 2.5}  # fmt: skip
    update = {"path": "direct", "model": "own", "engine": "vllm", "swap_s": 0.0123}
    met = {"kind": "H100", "what": "decode at 64", "measured_tokens_per_s": 1000.0, "predicted_tokens_per_s": 1050.0}
    rate = {"phase": "decode", "model": "own", "running": 222, "held": 256, "tokens_per_s": 26000.0}
    engine = [rate, {**rate, "running": 220, "slowest": 0.71}, {**rate, "running": 221, "slowest": 0.95}]
    measured = {**kind, "engine": engine, "trainer": [own, own], "updates": [update]}
    text = profile_text({**document, "kinds": [measured], "met": [met]})
    assert "decode at 222 of 256  " in text
    assert "decode at 220 of 256, for seconds 29% slower" in text
    assert "decode at 221 of 256  " in text
    assert "new weights, direct (vllm)" in text
    assert "12.3 ms" in text
    assert text.count("2.50 s") == 1, "one checkpoint, though every rate tells it"
    assert "128 samples in 2 rows, 0.5 s (varlen, compiled, layers computed again)" in text
    assert "+5.0%" in text
    nothing = profile_text({"dry_run": False, "file": None, "nodes": [lost], "kinds": [], "notes": []})
    assert nothing.startswith("nothing was measured")


def test_kernels_count_for_every_plan_and_rates_for_our_own_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    card = Provenance(source="hexctl profile", how="measured", device="NVIDIA H100 80GB HBM3")
    slow = tuple(GemmPoint(m=m, n=4096, k=4096, dtype="bf16", seconds=1e-5 + m * 4e-7) for m in (16, 256, 4096))
    rate = EngineRate(
        phase="decode", model="reference-0.6b", params=1, tp=1, running=64, context=600, tokens_per_s=4000.0
    )
    for name, tables in (
        ("kernels", KindTables(kind="H100", provenance=card, gemm=slow)),
        ("rates", KindTables(kind="H100", provenance=card, engine=(rate,))),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(encode(Calibration(kinds=(tables,))))
        capfd.readouterr()
        found = {}
        for calibration in ("none", str(path)):
            assert main(["plan", "h100-7", "-o", "json", "--evaluations", "300", "--calibration", calibration]) == 0
            found[calibration] = json.loads(capfd.readouterr().out)["tokens_per_s"]
        if name == "kernels":
            assert found[str(path)] < found["none"]
        else:
            assert found[str(path)] == found["none"]
