"""Models of known shapes that engines and trainers are measured with, so that a rate can be held against the cost model."""

import types
from collections.abc import Mapping

from planner.model import ModelSpec


def _spec(  # noqa: PLR0917 - a table's columns
    name: str, hidden: int, intermediate: int, layers: int, heads: int, kv: int, dim: int, vocab: int
) -> ModelSpec:
    return ModelSpec(
        name=name,
        hidden=hidden,
        intermediate=intermediate,
        layers=layers,
        heads=heads,
        kv_heads=kv,
        head_dim=dim,
        vocab=vocab,
        tied=True,
        qk_norm=True,
    )


REFERENCE_MODELS: Mapping[str, ModelSpec] = types.MappingProxyType(
    {
        s.name: s
        for s in (
            _spec("reference-1m", 128, 384, 4, 4, 2, 32, 1024),
            _spec("reference-10m", 384, 1024, 6, 6, 2, 64, 4096),
            # The shapes of Qwen3-0.6B and Qwen3-1.7B (their config.json on Hugging Face).
            _spec("reference-0.6b", 1024, 3072, 28, 16, 8, 128, 151936),
            _spec("reference-1.7b", 2048, 6144, 28, 16, 8, 128, 151936),
        )
    }
)
"""By name; dtype bf16, which a measurement on a CPU replaces by fp32."""
