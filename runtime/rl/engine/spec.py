"""What an engine is told once, when it is made. Pure: no torch."""

from collections.abc import Mapping
from typing import Any

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


def vllm_capabilities(max_tp: int) -> EngineCapabilities:
    """What the vLLM engine declares: tensor parallel within a node, up to what the configuration allows."""
    return EngineCapabilities(name="vllm", max_tp=max_tp, max_pp=1, kv_on_update=("recompute", "keep"))


@record
class VllmSpec:
    """What the vLLM engine is told once. Plain values: it travels to the engine's process as JSON."""

    model: Mapping[str, Any]  # a decoded config.json of a family we know
    slots: int
    max_length: int  # longest prompt and response together, in tokens
    eos_ids: frozenset[int]
    seed: int  # another for every incarnation of every replica: equal ones would draw equal samples
    temperature: float = 1.0
    dtype: str = "float32"  # float32 | bfloat16
    device: str = "cpu"  # "cpu" or "cuda"
    tp: int = 1
    max_tp: int = 1
    kv_on_update: str = "recompute"  # | "keep"
    gpu_memory_share: float = 0.85  # of the card, or of the part of it, for weights, KV cache and activations
    card_part: float = 1.0  # of the card's memory that is this engine's; below 1 others compute there too
    kv_cache_bytes: float = 2**30  # on a CPU, whole GiB
    batched_tokens: int = 8192  # most tokens of one step, prefill and decode
    threads: int = 1  # of a CPU
    eager: bool = False  # no compiling, no CUDA graphs
    second_buffer: bool = False  # leave room on a GPU for weights that come while it generates
    sleep: bool = False  # allocate so that memory can be given back while the engine lives
    direct: bool = True  # past vLLM's output processor where the release allows
    start_s: float = 600.0  # for the engine to come up with a generated token
    load_s: float = 600.0  # for a generation to be verified and laid in
    token_s: float = 60.0  # without any token while samples run: it hangs
    hold: bool = True  # let waiting requests in together where that is faster; else each at once
    ahead: int = 2  # steps the engine may be ahead of the replica

    def __post_init__(self) -> None:
        for name in ("slots", "max_length", "temperature", "tp", "batched_tokens", "ahead"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"engine: {name} must be positive", got=getattr(self, name))
        if self.dtype not in ("float32", "bfloat16"):
            raise ConfigError("vllm has no such dtype", where="model.rollout_dtype", got=self.dtype)
        if self.kv_on_update not in ("recompute", "keep"):
            raise ConfigError("engine: kv_on_update", got=self.kv_on_update, expected="recompute or keep")

    def plain(self) -> dict[str, Any]:
        """As JSON values."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return values | {"model": dict(self.model), "eos_ids": sorted(self.eos_ids)}
