"""An exported folder is a plain Hugging Face model with the same logits."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.record import replace
from runtime.errors import RefusedError, RunError, WeightsError
from runtime.rl.export import export_hf, export_run, main
from runtime.rl.model import Decoder, DecoderConfig, build_seeded
from runtime.rl.weights import write_generation

SHAPES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def a_decoder(family: str, *, tied: bool, scale: bool, dtype: torch.dtype = torch.float32) -> Decoder:
    raw = SHAPES | {"model_type": family, "tie_word_embeddings": tied}
    return build_seeded(DecoderConfig.from_hf(raw, scale_logits=scale), 3, dtype)


def generation(folder: Path, decoder: Decoder, *, version: int = 7):
    return write_generation(folder, dict(decoder.named_parameters()), lineage=0, version=version)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scale", [False, True])
def test_transformers_loads_it_with_equal_logits(tmp_path, family, tied, scale):
    transformers = pytest.importorskip("transformers")
    decoder = a_decoder(family, tied=tied, scale=scale)
    out = export_hf(generation(tmp_path / "w", decoder), decoder.config, None, tmp_path / "out")
    assert sorted(p.name for p in out.iterdir()) == ["config.json", "model.safetensors"]
    model = transformers.AutoModelForCausalLM.from_pretrained(str(out), dtype=torch.float32)
    tokens = torch.randint(0, 16, (3, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, decoder(tokens), atol=2e-5, rtol=1e-4)


def test_a_folder_with_something_in_it_is_refused_and_left_alone(tmp_path):
    decoder = a_decoder("qwen3", tied=False, scale=True)
    ref = generation(tmp_path / "w", decoder)
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes").write_text("mine")
    with pytest.raises(RefusedError, match="not an empty folder"):
        export_hf(ref, decoder.config, None, out)
    with pytest.raises(RefusedError):
        export_hf(ref, decoder.config, None, out / "notes")
    assert [p.name for p in out.iterdir()] == ["notes"]
    (tmp_path / "empty").mkdir()
    export_hf(ref, decoder.config, None, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_weights_that_do_not_verify_or_fit_leave_nothing(tmp_path):
    decoder = a_decoder("qwen3", tied=False, scale=False)
    ref = generation(tmp_path / "w", decoder)
    for bad, config, words in (
        (replace(ref, digest="0" * 64), decoder.config, "another digest"),
        (ref, replace(decoder.config, layers=1), "another model"),
        (ref, replace(decoder.config, intermediate=64), "does not fit"),
    ):
        with pytest.raises(WeightsError, match=words):
            export_hf(bad, config, None, tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["w"]


def test_tokenizer_files_come_along(tmp_path):
    tokenizer = tmp_path / "tok"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "model.safetensors").write_bytes(b"other weights")
    decoder = a_decoder("qwen3", tied=False, scale=False)
    out = export_hf(generation(tmp_path / "w", decoder), decoder.config, tokenizer, tmp_path / "out")
    assert (out / "tokenizer.json").read_text() == "{}"
    assert (out / "model.safetensors").read_bytes() != b"other weights"


CONFIG = """
[model]
source = "seeded"
path = "model"
scale_logits = true

[task]
source = "copy"

[fleet]
source = "cpu"
"""


def a_run(folder: Path) -> Decoder:
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(SHAPES | {"model_type": "qwen3"}))
    (folder / "config.toml").write_text(CONFIG)
    return a_decoder("qwen3", tied=False, scale=True)


def test_a_run_exports_its_newest_generation(tmp_path):
    run = tmp_path / "run"
    decoder = a_run(run)
    with pytest.raises(RunError, match="no weights are published"):
        export_run(run, tmp_path / "out")
    for version in (9, 12, 11):
        generation(run / "weights", decoder, version=version)
    assert export_run(run, tmp_path / "out").version == 12


def test_the_command_speaks_on_stderr_and_exits_with_the_error_s_code(tmp_path, capfd):
    run = tmp_path / "run"
    generation(run / "weights", a_run(run))
    assert main(["--run-folder", str(run), "--out", str(tmp_path / "out")]) == 0
    assert main(["--run-folder", str(run), "--out", str(tmp_path / "out")]) == 4
    assert main(["--run-folder", str(tmp_path / "none"), "--out", str(tmp_path / "o2")]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "not an empty folder" in err


def test_as_a_module(tmp_path):
    run = tmp_path / "run"
    generation(run / "weights", a_run(run))
    command = [sys.executable, "-m", "runtime.rl.export", "--run-folder", str(run), "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "model.safetensors").is_file()
