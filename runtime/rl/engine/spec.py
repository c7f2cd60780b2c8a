"""What an engine is told once, when it is made. Pure: no torch."""

from planner.record import record
from runtime.errors import ConfigError
from runtime.rl.protocols import EngineCapabilities

TORCH_CAPABILITIES = EngineCapabilities(name="torch", max_tp=1, max_pp=1, kv_on_update=("recompute",))
"""What the torch engine declares to the planner."""


PREFILL_TOKENS = 16384


@record
class EngineSpec:
    """Limits and sampling of one engine.

    `kv_tokens` bounds the KV cache: rows in use times the longest they may grow.
    """

    slots: int
    max_length: int  # longest prompt and response together, in tokens
    kv_tokens: int
    eos_ids: frozenset[int]
    seed: int
    temperature: float = 1.0
    dtype: str = "float32"  # of weights and KV cache: float64 | float32 | bfloat16
    device: str = "cpu"
    prefill_tokens: int = PREFILL_TOKENS  # most padded tokens that one step prefills; a lone sample always fits

    def __post_init__(self) -> None:
        for name in ("slots", "max_length", "kv_tokens", "temperature", "prefill_tokens"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"engine: {name} must be positive", got=getattr(self, name))
