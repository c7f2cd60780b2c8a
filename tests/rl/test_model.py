"""The decoder: files, seeds, options, the cached path and the export. The reference is Hugging Face's own code."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from runtime.errors import ConfigError
from runtime.rl.model import (
    Decoder,
    DecoderConfig,
    KVCache,
    build_seeded,
    load_config,
    load_pretrained,
    save_pretrained,
)

TINY = Path(__file__).parents[2] / "configs" / "models" / "tiny-qwen3"

BASE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 20,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
}


def config(**changes: Any) -> DecoderConfig:
    return DecoderConfig.from_hf(BASE | changes)


def tokens(batch: int, length: int, vocab: int = 20) -> torch.Tensor:
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(3))


# ---- configuration


def test_the_shipped_model_is_readable_and_small() -> None:
    decoder = build_seeded(load_config(TINY), 0, torch.float32)
    assert decoder.config.family == "qwen3"
    assert sum(p.numel() for p in decoder.parameters()) < 200_000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": None}, "vocab_size"),
        ({"num_key_value_heads": 3}, "must divide"),
        ({"head_dim": 15}, "even"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type"),
        ({"rope_scaling": {"type": "linear"}}, "factor"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
    ],
)
def test_a_config_it_cannot_compute_is_refused_by_key(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        config(**changes)


def test_theta_is_read_from_old_and_new_places() -> None:
    assert config(rope_theta=5e5).rope_theta == 5e5
    assert config(rope_parameters={"rope_theta": 7e5, "rope_type": "default"}, rope_theta=1.0).rope_theta == 7e5
    assert config().rope_theta == 10000.0


def test_config_survives_a_round_trip_with_its_option() -> None:
    first = config(eos_token_id=1, hexctl_scale_logits=True)
    again = DecoderConfig.from_hf(json.loads(json.dumps(first.to_hf(dtype="float32"))))
    assert again.scale_logits
    assert again.raw["eos_token_id"] == 1
    assert (again.hidden, again.layers, again.rope_theta) == (first.hidden, first.layers, first.rope_theta)


# ---- seeds


def test_seeded_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    torch.manual_seed(1)
    one = build_seeded(config(), 5, torch.float64).state_dict()
    before = torch.get_rng_state()
    same = build_seeded(config(), 5, torch.float64).state_dict()
    other = build_seeded(config(), 6, torch.float64).state_dict()
    single = build_seeded(config(), 5, torch.float32).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    for name, tensor in one.items():
        assert torch.equal(tensor, same[name])
        assert torch.equal(tensor.float(), single[name])
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other[name])
            assert 0.5 < tensor.std() / 0.15 < 1.2 or name.endswith(("o_proj.weight", "down_proj.weight"))


# ---- function


def test_padding_on_the_right_changes_nothing() -> None:
    decoder = build_seeded(config(), 0, torch.float64)
    short = tokens(3, 7)
    padded = torch.cat([short, torch.zeros(3, 5, dtype=torch.long)], dim=1)
    torch.testing.assert_close(decoder(padded)[:, :7], decoder(short), rtol=0, atol=1e-12)


def test_head_of_chosen_positions_is_the_forward_there() -> None:
    decoder = build_seeded(config(hexctl_scale_logits=True), 0, torch.float64)
    t = tokens(2, 6)
    torch.testing.assert_close(decoder.head(decoder.hidden_states(t)[:, 2:4]), decoder(t)[:, 2:4], rtol=0, atol=1e-13)


def test_positions_are_relative() -> None:
    decoder = build_seeded(config(), 0, torch.float64)
    t = tokens(2, 6)
    shifted = decoder(t, torch.arange(6)[None] + 100)
    torch.testing.assert_close(shifted, decoder(t), rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_cached_decoding_equals_the_full_forward(family: str) -> None:
    """Rows of different lengths, prefilled together, then decoded token by token, one row ending on the way."""
    decoder = build_seeded(config(model_type=family, hexctl_scale_logits=True), 0, torch.float64)
    t = tokens(3, 40)
    full = decoder(t)
    cache = KVCache(decoder.config, dtype=torch.float64, device=torch.device("cpu"))
    with torch.inference_mode():
        lengths = [2, 9, 5]
        cache.ensure(3, 10)
        decoder.prefill(
            torch.stack([torch.cat([t[i, :n], torch.zeros(10 - n).long()]) for i, n in enumerate(lengths)]), cache, 0
        )
        rows = [0, 1, 2]
        for step in range(20):
            if step == 8:  # row 0 ends, the last one takes its place
                cache.move(2, 0)
                rows, lengths = [2, 1], [lengths[2], lengths[1]]
            cache.ensure(len(rows), max(lengths) + 1)
            logits = decoder.decode(
                torch.stack([t[r, n] for r, n in zip(rows, lengths, strict=True)]), torch.tensor(lengths), cache
            )
            for at, (r, n) in enumerate(zip(rows, lengths, strict=True)):
                torch.testing.assert_close(logits[at], full[r, n], rtol=0, atol=1e-11)
            lengths = [n + 1 for n in lengths]


def test_the_cache_grows_without_forgetting_and_gives_back_beyond_its_limit() -> None:
    cache = KVCache(config(), dtype=torch.float64, device=torch.device("cpu"), keep_tokens=64 * 40)
    cache.ensure(40, 20)
    with torch.inference_mode():
        cache.k.fill_(1.5)
    cache.ensure(40, 50)
    assert (cache.slots, cache.length) == (40, 64)
    assert (cache.k[:, :, :, :32] == 1.5).all()
    assert (cache.k[:, :, :, 32:] == 0).all()
    cache.ensure(3, 200)
    assert (cache.slots, cache.length) == (8, 224)
    assert (cache.k[:, :3, :, :32] == 1.5).all()


def test_training_after_inference_with_the_same_module() -> None:
    """What inference mode makes and keeps must not reach autograd."""
    decoder = build_seeded(config(), 0, torch.float32)
    with torch.inference_mode():
        decoder(tokens(1, 4))
    decoder(tokens(1, 4)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in decoder.parameters())


def test_a_cast_to_bfloat16_keeps_exact_angles() -> None:
    decoder = build_seeded(config(), 0, torch.float64)
    exact, _ = decoder._rotation(torch.tensor([[200]]), torch.float64)
    cast, _ = decoder.to(torch.bfloat16)._rotation(torch.tensor([[200]]), torch.float64)
    assert torch.equal(exact, cast)


# ---- files


def test_saved_weights_come_back_bit_by_bit(tmp_path: Path) -> None:
    decoder = build_seeded(config(hexctl_scale_logits=True), 2, torch.bfloat16)
    save_pretrained(decoder, tmp_path / "m")
    again = load_pretrained(tmp_path / "m", torch.bfloat16)
    assert again.config.scale_logits
    assert again.state_dict().keys() == decoder.state_dict().keys()
    assert all(
        torch.equal(a, b) for a, b in zip(again.state_dict().values(), decoder.state_dict().values(), strict=True)
    )


def sharded(folder: Path, state: dict[str, torch.Tensor]) -> None:
    """The same model in two files and an index."""
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: state[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    decoder = build_seeded(config(), 2, torch.float32)
    save_pretrained(decoder, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    sharded(tmp_path, dict(decoder.state_dict()))
    assert torch.equal(load_pretrained(tmp_path, torch.float32)(tokens(1, 5)), decoder(tokens(1, 5)))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s: s.pop("model.norm.weight"), "missing.*model.norm.weight"),
        (lambda s: s.update({"extra.weight": torch.zeros(1)}), "unknown tensor.*extra.weight"),
        (lambda s: s.update({"model.norm.weight": torch.zeros(7)}), "another shape"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(tmp_path: Path, spoil: Any, words: str) -> None:
    decoder = build_seeded(config(), 2, torch.float32)
    save_pretrained(decoder, tmp_path)
    state = dict(decoder.state_dict())
    spoil(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=words) as raised:
        load_pretrained(tmp_path, torch.float32)
    assert str(tmp_path) in str(raised.value)


def test_folders_without_weights_or_with_broken_ones_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_pretrained(tmp_path / "absent", torch.float32)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not JSON"):
        load_pretrained(tmp_path, torch.float32)
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    with pytest.raises(ConfigError, match="no weights here"):
        load_pretrained(tmp_path, torch.float32)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(ConfigError, match="cannot read the weights"):
        load_pretrained(tmp_path, torch.float32)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../elsewhere"}}')
    with pytest.raises(ConfigError, match="weight_map"):
        load_pretrained(tmp_path, torch.float32)


# ---- against Hugging Face

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"tie_word_embeddings": True, "hexctl_scale_logits": True}),
        ("qwen3", {"hexctl_scale_logits": True, "attention_bias": True}),
        ("qwen2", {"rope_theta": 1e6}),
        ("llama", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
        ("llama", {"attention_bias": True, "rope_scaling": LLAMA3_ROPE}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ],
)
def test_exported_models_give_the_logits_of_transformers(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM  # slow to import: only here

    decoder = perturbed(build_seeded(config(model_type=family, **changes), 1, torch.float32))
    hf_config, state = decoder.export_state()
    assert "hexctl_scale_logits" not in hf_config
    (tmp_path / "config.json").write_text(json.dumps(hf_config))
    save_file({n: t.contiguous() for n, t in state.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    theirs, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True, dtype=torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    t = tokens(3, 48)
    with torch.no_grad():
        torch.testing.assert_close(decoder(t), theirs.eval()(t).logits, rtol=0, atol=1e-5)

    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs", torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(t), decoder(t), rtol=0, atol=1e-5)


def perturbed(decoder: Decoder) -> Decoder:
    """Norm weights and biases that matter, so that mixing them up would show."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return decoder


def test_seeded_tensors_each_have_a_stream_of_their_own() -> None:
    """Whatever thread draws them, and in whatever order."""
    shape = config(tie_word_embeddings=False)
    made = dict(build_seeded(shape, 7, torch.bfloat16).named_parameters())
    for name, divided in (
        ("model.embed_tokens.weight", 1.0),
        ("model.layers.1.mlp.down_proj.weight", 2.0),
        ("lm_head.weight", 1.0),
    ):
        seed = int.from_bytes(hashlib.sha256(f"7/{name}".encode()).digest()[:8], "little") >> 1
        drawn = torch.randn(made[name].shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        assert torch.equal(made[name], (drawn * (shape.init_std / divided)).to(torch.bfloat16))
    assert torch.equal(made["model.norm.weight"], torch.ones(shape.hidden, dtype=torch.bfloat16))
    assert not any(p.grad_fn for p in made.values())
