"""What a decoder is made of, read from a Hugging Face `config.json`. Pure: no torch."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from planner.record import record
from runtime.errors import ConfigError

FAMILIES = ("llama", "qwen2", "qwen3")
SCALE_LOGITS_KEY = "hexctl_scale_logits"
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@record
class RopeScaling:
    """How rotary frequencies are stretched beyond the length a model was first trained on."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_positions: int = 8192


@record
class DecoderConfig:
    """Shapes and options of one decoder. `scale_logits` divides logits by sqrt(hidden); it is a hexctl option, folded
    into the output embedding when the model is exported. `raw` is the decoded config.json, kept for what we do not read."""

    family: str
    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    max_positions: int
    tied: bool
    qkv_bias: bool
    out_bias: bool
    qk_norm: bool
    init_std: float
    scale_logits: bool
    raw: Mapping[str, Any] = dataclasses.field(default_factory=dict, repr=False)

    @classmethod
    def from_hf(
        cls, config: Mapping[str, Any], *, scale_logits: bool | None = None, where: str = "config.json"
    ) -> "DecoderConfig":
        """Read a decoded config.json; `scale_logits` overrides the file's key.

        Raises ConfigError, naming the key, for a family or an option this decoder does not compute.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise ConfigError(
                "model_type is not supported by the torch engine", where=where, got=family, expected=", ".join(FAMILIES)
            )
        _refuse_options(config, where)
        hidden, heads = _whole(config, "hidden_size", where), _whole(config, "num_attention_heads", where)
        kv_heads = _whole(config, "num_key_value_heads", where, default=heads)
        head_dim = _whole(config, "head_dim", where, default=hidden // heads)
        if heads % kv_heads:
            raise ConfigError(
                "num_key_value_heads must divide num_attention_heads", where=where, got=f"{kv_heads} and {heads}"
            )
        if head_dim % 2:
            raise ConfigError("head_dim must be even for rotary embeddings", where=where, got=head_dim)
        bias = bool(config.get("attention_bias", False))
        theta, scaling = _rope(config, where)
        return cls(
            family=str(family),
            vocab=_whole(config, "vocab_size", where),
            hidden=hidden,
            intermediate=_whole(config, "intermediate_size", where),
            layers=_whole(config, "num_hidden_layers", where),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=_positive(config, "rms_norm_eps", where, default=1e-6),
            rope_theta=theta,
            rope_scaling=scaling,
            max_positions=_whole(config, "max_position_embeddings", where, default=32768),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=True if family == "qwen2" else bias,
            out_bias=False if family == "qwen2" else bias,
            qk_norm=family == "qwen3",
            init_std=_positive(config, "initializer_range", where, default=0.02),
            scale_logits=bool(config.get(SCALE_LOGITS_KEY, False)) if scale_logits is None else scale_logits,
            raw=dict(config),
        )

    def to_hf(self, *, dtype: str | None = None) -> dict[str, Any]:
        """The config.json of this decoder: what was read, plus what was overridden since."""
        config = dict(self.raw)
        config.setdefault("architectures", [_ARCHITECTURES[self.family]])
        config["tie_word_embeddings"] = self.tied
        config.pop(SCALE_LOGITS_KEY, None)
        if self.scale_logits:
            config[SCALE_LOGITS_KEY] = True
        if dtype is not None:
            config.pop("torch_dtype", None)
            config["dtype"] = dtype
        return config

    @property
    def logit_scale(self) -> float:
        """What logits are multiplied with."""
        return 1.0 / math.sqrt(self.hidden) if self.scale_logits else 1.0

    def inverse_frequencies(self) -> list[float]:
        """Rotary frequencies in radians a position, head_dim / 2 of them, scaled as the config says."""
        plain = [self.rope_theta ** (-2.0 * i / self.head_dim) for i in range(self.head_dim // 2)]
        scaling = self.rope_scaling
        if scaling is None:
            return plain
        if scaling.kind == "linear":
            return [f / scaling.factor for f in plain]
        return [_llama3_frequency(f, scaling) for f in plain]


def _llama3_frequency(frequency: float, scaling: RopeScaling) -> float:
    """Long waves are stretched by `factor`, short ones kept, those between are blended."""
    waves = scaling.original_positions * frequency / (2.0 * math.pi)  # turns within the original context
    if waves < scaling.low_freq_factor:
        return frequency / scaling.factor
    if waves > scaling.high_freq_factor:
        return frequency
    blend = (waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return (1.0 - blend) * frequency / scaling.factor + blend * frequency


def _refuse_options(config: Mapping[str, Any], where: str) -> None:
    """Options that would change the function without this decoder computing them."""
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ConfigError("hidden_act is not supported", where=where, got=config["hidden_act"], expected="silu")
    for key in ("mlp_bias", "use_sliding_window"):
        if config.get(key):
            raise ConfigError(f"{key} is not supported", where=where, got=config[key], expected="false")
    if config.get("quantization_config"):
        raise ConfigError(
            "quantised weights are not supported", where=where, hint="save the model in bfloat16 or float32 first"
        )


def _rope(config: Mapping[str, Any], where: str) -> tuple[float, RopeScaling | None]:
    """theta and scaling from `rope_parameters` (newer files) or `rope_theta` with `rope_scaling` (older ones)."""
    given = config.get("rope_parameters") or {}
    scaling = given or config.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise ConfigError("rope_scaling is not a table", where=where, got=scaling)
    theta = given.get("rope_theta", config.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ConfigError("rope_theta is not a positive number", where=where, got=theta)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3"):
        raise ConfigError("rope type is not supported", where=where, got=kind, expected="default, linear or llama3")
    return float(theta), RopeScaling(
        kind=kind,
        factor=_positive(scaling, "factor", where),
        low_freq_factor=_positive(scaling, "low_freq_factor", where, default=1.0),
        high_freq_factor=_positive(scaling, "high_freq_factor", where, default=4.0),
        original_positions=_whole(scaling, "original_max_position_embeddings", where, default=8192),
    )


def _whole(config: Mapping[str, Any], key: str, where: str, *, default: int | None = None) -> int:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} is missing or not a positive whole number", where=where, got=value)
    return value


def _positive(config: Mapping[str, Any], key: str, where: str, *, default: float | None = None) -> float:
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{key} is missing or not a positive number", where=where, got=value)
    return float(value)
