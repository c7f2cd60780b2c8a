"""The engine that a run's configuration asks for."""

from pathlib import Path
from typing import Any

import pytest

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.rl.engine.factory import build_engine
from runtime.rl.types import Lease, SampleId
from runtime.rl.weights import write_generation

MODELS = Path(__file__).parents[2] / "configs" / "models"


def config(*, max_running: int = 4, **model: Any) -> Config:
    return Config.model_validate(
        {
            "run": {"seed": 5},
            "model": {"source": "seeded", "path": MODELS / "tiny-qwen3", "scale_logits": True} | model,
            "sampling": {"temperature": 0.8, "max_new_tokens": 6, "max_running": max_running},
            "lengths": {"prompt_max": 10},
        }
    )


def test_limits_come_from_the_configuration() -> None:
    spec = build_engine(config(rollout_dtype="bfloat16")).spec
    assert (spec.slots, spec.dtype, spec.seed, spec.temperature) == (4, "float32", 5, 0.8)
    assert spec.kv_tokens == 4 * (10 + 6)
    assert spec.max_length == 128
    assert spec.eos_ids == {1}


def test_it_serves_what_the_trainer_would_publish(tmp_path: Path) -> None:
    """Weights on disk in, tokens out; the scale of the logits is the run's, not the file's."""
    import torch

    from runtime.rl.model import build_seeded, load_config

    decoder = build_seeded(load_config(MODELS / "tiny-qwen3", scale_logits=True), 5, torch.float32)
    engine = build_engine(config(max_running=2))
    engine.load_weights(write_generation(tmp_path, dict(decoder.named_parameters()), lineage=0, version=0))
    engine.add([Lease(sample=SampleId(0, 0), epoch=1, prompt_tokens=(3, 4, 12), max_new_tokens=6)])
    (append,) = engine.step()
    with torch.no_grad():
        wanted = torch.log_softmax(decoder(torch.tensor([[3, 4, 12]]))[0, -1].double() / 0.8, -1)
    assert append.logprobs[0] == pytest.approx(float(wanted[append.tokens[0]]), abs=1e-5)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    small = (MODELS / "tiny-qwen3" / "config.json").read_text().replace('"vocab_size": 16', '"vocab_size": 15')
    assert '"vocab_size": 15' in small
    (tmp_path / "config.json").write_text(small)
    with pytest.raises(ConfigError, match="vocabulary is smaller"):
        build_engine(config(path=tmp_path))
