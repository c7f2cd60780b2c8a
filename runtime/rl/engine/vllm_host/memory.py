"""What of a card's memory the vLLM engine is told to take. Pure: the size of the card is asked of the caller."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from runtime.errors import ConfigError
from runtime.rl.engine.vllm_host.model_folder import expected_shapes

# Of a card: what the driver and the engine use beyond its share, and the second buffer's slack.
BESIDE_BYTES = 4 * 2**30
PART_BESIDE_BYTES = 4 * 2**30  # beside weights and KV: activations, logits, graphs; about
FAR_SHARE = 0.5  # of what is left then: below it what the engine takes beside may be twice as much, and more
LEAST_SHARE = 0.1
# No block of the KV cache holds more on a GPU. The last one of a sample may be nearly empty, and one is vLLM's own.
BLOCK_TOKENS = 64


def card_memory(spec: Mapping[str, Any], card_bytes: Callable[[], int]) -> dict[str, Any]:
    """Arguments of vLLM's: less than was asked for where the second buffer would not fit beside it.

    The KV cache is told where its slots, each at its longest, are far from filling the card: vLLM would take all there is, and goes
    through every block of it whenever the prefix cache is given up, which is at every generation. On a part of a card it is always
    told: vLLM would find its size by what is used while it starts, and count what others take there in that time as its own.
    ConfigError when weights and KV do not fit the part.
    """
    share, part = float(spec["gpu_memory_share"]), float(spec["card_part"])
    if spec["device"] == "cpu":
        return {"gpu_memory_utilization": share}
    mine, weights = part * card_bytes(), _weight_bytes(spec)
    if spec["second_buffer"]:
        share = min(share, max(LEAST_SHARE, 1 - (weights + BESIDE_BYTES) / mine))
    room = share * mine - weights - PART_BESIDE_BYTES
    blocks = spec["slots"] * math.ceil(spec["max_length"] / BLOCK_TOKENS) + 1
    most = blocks * BLOCK_TOKENS * _kv_bytes_a_token(spec)
    if part == 1:
        told = {"kv_cache_memory_bytes": int(most)} if most <= room * FAR_SHARE else {}
        return {"gpu_memory_utilization": share, **told}
    if room <= 0:
        raise ConfigError(
            "the model does not fit the engine's part of the card",
            where="fleet.gpu_parts",
            got=f"{mine / 1e9:.1f} GB for {weights / 1e9:.1f} GB of weights, the second buffer and KV",
            hint='use fewer parts or a smaller model, or weights.path = "store"',
        )
    return {"gpu_memory_utilization": share * part, "kv_cache_memory_bytes": int(min(room, most))}


def _item_bytes(spec: Mapping[str, Any]) -> int:
    return 2 if spec["dtype"] == "bfloat16" else 4


def _weight_bytes(spec: Mapping[str, Any]) -> int:
    return _item_bytes(spec) * sum(math.prod(shape) for _, shape in expected_shapes(spec["model"]))


def _kv_bytes_a_token(spec: Mapping[str, Any]) -> int:
    model = spec["model"]
    heads, hidden = model["num_attention_heads"], model["hidden_size"]
    wide = (model.get("num_key_value_heads") or heads) * (model.get("head_dim") or hidden // heads)
    return int(2 * model["num_hidden_layers"] * wide * _item_bytes(spec))
