"""Parameter counts and FLOPs of models whose totals are published."""

import json
from pathlib import Path

import pytest

from planner.cost.flops import attend_flops, head_flops, layer_flops, token_flops
from planner.cost.memory import (
    activation_bytes_per_token,
    replica_kv_bytes_per_token,
    replica_weight_bytes,
    stage_params,
    state_bytes_per_param,
)
from planner.errors import InvalidInput
from planner.model import ModelSpec, from_hf_config, load_model_spec

CONFIGS = Path(__file__).parents[2] / "configs" / "models"

# name, family, hidden, intermediate, layers, heads, kv_heads, head_dim, vocab, tied, parameters
MODELS = [
    ("R1-Distill-Qwen-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, False, 1777088000),
    ("R1-Distill-Qwen-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 7615616512),
    ("R1-Distill-Qwen-14B", "qwen2", 5120, 13824, 48, 40, 8, 128, 152064, False, 14770033664),
    ("Qwen2.5-0.5B", "qwen2", 896, 4864, 24, 14, 2, 64, 151936, True, 494032768),
    ("Qwen2.5-1.5B", "qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True, 1543714304),
    ("Qwen2.5-7B", "qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False, 7615616512),
    ("Qwen3-1.7B", "qwen3", 2048, 6144, 28, 16, 8, 128, 151936, True, 1720574976),
    ("Qwen3-4B", "qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True, 4022468096),
    ("Qwen3-8B", "qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False, 8190735360),
    ("Qwen3-14B", "qwen3", 5120, 17408, 40, 40, 8, 128, 151936, False, 14768307200),
    ("Llama-3.1-8B", "llama", 4096, 14336, 32, 32, 8, 128, 128256, False, 8030261248),
    ("Llama-3.1-70B", "llama", 8192, 28672, 80, 64, 8, 128, 128256, False, 70553706496),
    ("SmolLM2-135M", "llama", 576, 1536, 30, 9, 3, 64, 49152, True, 134515008),
]


def spec(row: tuple[object, ...]) -> ModelSpec:
    name, family, hidden, intermediate, layers, heads, kv, head_dim, vocab, tied, _ = row
    config = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    }
    return from_hf_config(config, name=str(name))


@pytest.mark.parametrize("row", MODELS, ids=lambda r: r[0])
def test_parameters_agree_with_the_published_totals(row: tuple[object, ...]) -> None:
    assert spec(row).params == row[-1]


@pytest.mark.parametrize("row", MODELS, ids=lambda r: r[0])
def test_a_token_costs_two_flops_for_each_multiplied_parameter(row: tuple[object, ...]) -> None:
    m = spec(row)
    vectors = m.layers * (2 * m.hidden + (2 * m.head_dim if m.qk_norm else 0)) + m.hidden
    bias = m.layers * (m.heads + 2 * m.kv_heads) * m.head_dim if m.qkv_bias else 0
    multiplied = m.params - vectors - bias - (0 if m.tied else m.vocab * m.hidden)  # the input embedding is a look-up
    assert token_flops(m) == 2 * multiplied


@pytest.mark.parametrize("size", ["1.5b", "7b", "14b"])
def test_shipped_shapes_are_those_models(size: str) -> None:
    row = next(r for r in MODELS if r[0] == f"R1-Distill-Qwen-{size.upper()}")
    assert load_model_spec(CONFIGS / f"r1-distill-qwen-{size}.json").params == row[-1]


def test_attention_flops_by_hand() -> None:
    """Two heads of size 4 over 10 causal tokens: 2 (QK and PV) x 2 FLOPs x 2 heads x 4 x 10 x 10 / 2, and projections."""
    m = ModelSpec(name="m", hidden=8, intermediate=16, layers=3, heads=2, kv_heads=1, head_dim=4, vocab=7)
    projections = 10 * 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8)
    mlp = 10 * 2 * 3 * 8 * 16
    assert layer_flops(m, 10, 100) == projections + mlp + 2 * 2 * 2 * 4 * 10 * 10 / 2
    assert head_flops(m, 10) == 2 * 10 * 8 * 7
    assert attend_flops(m, 10) == 3 * 2 * (2 * 2 * 4 * 10)  # one query row, not halved, three layers


def test_memory_by_hand() -> None:
    m = ModelSpec(name="m", hidden=8, intermediate=16, layers=4, heads=4, kv_heads=2, head_dim=2, vocab=10)
    layer = 8 * 8 + 2 * 8 * 4 + 8 * 8 + 2 * 8 + 3 * 8 * 16  # q, k and v, o, norms, MLP
    assert m.layer_params == layer
    assert m.params == 4 * layer + 8 + 2 * 80
    assert state_bytes_per_param(m) == 2 + 2 + 4 + 4 + 4
    assert replica_weight_bytes(m, 1, 1) == 2 * m.params
    assert replica_weight_bytes(m, 2, 1) == m.params
    assert replica_kv_bytes_per_token(m, 1, 1) == m.kv_bytes_per_token == 2 * 4 * 2 * 2 * 2
    assert replica_kv_bytes_per_token(m, 4, 2) == 2 * 2 * 1 * 2 * 2  # two layers, one replicated head
    assert stage_params(m, 4, first=True, last=True) == m.params
    assert stage_params(m, 2, first=True, last=False) + stage_params(m, 2, first=False, last=True) == m.params
    assert activation_bytes_per_token(m, 1) == 2 * (4 * 8 + 2 * 2 * (4 + 2) + 4 * 16)


def test_a_tied_table_is_held_at_both_ends_of_a_pipeline() -> None:
    m = ModelSpec(name="m", hidden=8, intermediate=16, layers=4, heads=4, kv_heads=2, head_dim=2, vocab=10, tied=True)
    assert stage_params(m, 4, first=True, last=True) == m.params
    two = stage_params(m, 2, first=True, last=False) + stage_params(m, 2, first=False, last=True)
    assert two == m.params + 80


def test_fp32_weights_need_no_master_copy() -> None:
    m = ModelSpec(
        name="m", hidden=8, intermediate=16, layers=4, heads=4, kv_heads=2, head_dim=2, vocab=10, dtype_bytes=4
    )
    assert state_bytes_per_param(m) == 16


@pytest.mark.parametrize(
    ("text", "word"),
    [("{", "JSON"), ("[]", "object"), ('{"hidden_size": -1, "num_attention_heads": 2}', "hidden_size")],
)
def test_a_broken_config_names_its_file(tmp_path: Path, text: str, word: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InvalidInput, match=word) as caught:
        load_model_spec(file)
    assert str(file) in str(caught.value)


def test_dtype_of_the_config_is_the_dtype_planned(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "r1-distill-qwen-1.5b.json").read_text())
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config, "torch_dtype": "float32"}))
    assert load_model_spec(tmp_path).dtype_bytes == 4
