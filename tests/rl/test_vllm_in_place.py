"""vLLM's own models, as it builds them before a CPU packs their weights: new weights are laid in by copies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.rl.test_engine_contract import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM]
ROOT = Path(__file__).parents[2]
MODELS = ROOT / "configs" / "models"
LAID_IN = """
import json, sys, tempfile
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from runtime.rl.engine.vllm_host.in_place import InPlace, load
from runtime.rl.engine.vllm_host.model_folder import expected_shapes, write_folder
from runtime.rl.weights.layout import lay_out, pieces, spec_of

shape = json.loads(sys.argv[1])
with tempfile.TemporaryDirectory() as folder:
    write_folder(folder, shape, dtype="bfloat16")
    config = EngineArgs(
        model=folder, skip_tokenizer_init=True, dtype="bfloat16", load_format="dummy", max_model_len=128, enforce_eager=True
    ).create_engine_config()
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, "file://" + sys.argv[2], 0, "gloo")
    initialize_model_parallel(1, 1)
    torch.set_default_dtype(torch.bfloat16)
    model = initialize_model(vllm_config=config)
made = {n: torch.randn(tuple(s)) for n, s in expected_shapes(shape)}
layout = lay_out((spec_of(n, t) for n, t in made.items()), 1024)
flat = torch.zeros(layout.total, dtype=torch.uint8)
way, reloads = InPlace(suits=lambda model: True), []

def reload():
    reloads.append(1)
    return load(model, given)

for version in range(4):
    made = {n: torch.randn_like(t) for n, t in made.items()}
    flat[:] = torch.cat([d for _, d in pieces(layout, made.items())])
    given = dict(layout.views(flat))
    way.lay_in(model, given, reload)
    laid = {n: p.detach().clone() for n, p in model.named_parameters()}
    load(model, given)
    assert all(torch.equal(laid[n], p) for n, p in model.named_parameters()), version
print(json.dumps([way.way, len(reloads)]))
"""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("smollm2-135m", {"num_hidden_layers": 2}),  # a tied head
        ("qwen2.5-0.5b", {"num_hidden_layers": 2}),  # biases
        ("r1-distill-qwen-1.5b", {"num_hidden_layers": 1, "vocab_size": 1001}),  # a vocabulary that is padded, twice
        ("qwen3-0.6b", {"num_hidden_layers": 1}),  # normed queries and keys
    ],
)
def test_weights_are_laid_in_by_copies(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    shape = json.loads((MODELS / f"{name}.json").read_text()) | changes
    done = subprocess.run(
        [sys.executable, "-c", LAID_IN, json.dumps(shape), str(tmp_path / "meet")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_LOGGING_LEVEL": "ERROR"},
        cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == ["copies", 1]
