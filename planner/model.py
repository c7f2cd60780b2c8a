"""Shapes of a language model, read from a Hugging Face `config.json`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import InvalidInput
from planner.record import record

_DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


@record
class ModelSpec:
    """A decoder-only transformer with grouped-query attention and a gated MLP. heads * head_dim need not equal hidden."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False  # output embedding shares the input's
    qkv_bias: bool = False
    qk_norm: bool = False
    dtype_bytes: int = 2  # of weights and KV cache while generating

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"model {self.name!r}: {name} must be at least 1", got=getattr(self, name))
        if self.heads % self.kv_heads:
            raise InvalidInput(f"model {self.name!r}: kv_heads must divide heads", got=(self.heads, self.kv_heads))

    @property
    def layer_params(self) -> int:
        """Parameters of one transformer layer, norms and biases included."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = self.hidden * q + 2 * self.hidden * kv + q * self.hidden
        bias = (q + 2 * kv) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        return attention + bias + norms + 3 * self.hidden * self.intermediate

    @property
    def params(self) -> int:
        """All parameters; a tied embedding counts once."""
        return self.layers * self.layer_params + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights an engine holds."""
        return self.params * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV cache one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes


def from_hf_config(config: Mapping[str, Any], *, name: str, where: str = "config.json") -> ModelSpec:
    """Read the shapes out of a decoded Hugging Face config (Qwen2, Qwen3 and Llama families)."""

    def need(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{key} is missing or not a positive whole number", where=where, got=value)
        return value

    hidden, heads = need("hidden_size"), need("num_attention_heads")
    kind = str(config.get("model_type", "llama"))
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    if dtype not in _DTYPE_BYTES:
        raise InvalidInput("unknown dtype", where=where, got=dtype, expected=", ".join(_DTYPE_BYTES))
    return ModelSpec(
        name=name,
        hidden=hidden,
        intermediate=need("intermediate_size"),
        layers=need("num_hidden_layers"),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        vocab=need("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
        qk_norm=kind == "qwen3",
        dtype_bytes=_DTYPE_BYTES[dtype],
    )


def load_model_spec(path: Path) -> ModelSpec:
    """Read `path` (a config.json or a folder that holds one)."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except OSError as e:
        raise InvalidInput(
            "cannot read the model's config",
            where=str(file),
            got=e.strerror,
            hint="give a config.json of a Hugging Face model, or the folder that holds one",
        ) from e
    except ValueError as e:
        raise InvalidInput("the model's config is not JSON", where=str(file), got=str(e)) from e
    if not isinstance(config, dict):
        raise InvalidInput("the model's config is not a JSON object", where=str(file))
    return from_hf_config(
        config, name=str(config.get("_name_or_path") or (path.name if path.is_dir() else path.stem)), where=str(file)
    )
