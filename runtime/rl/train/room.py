"""What fits on the trainer's device: tokens of a row, layers whose activations are computed again, rows of a head's chunk.

All is counted from shapes and from the size of the device, never from what happens to be free: the same run cuts its rows
alike each time.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from planner.record import record
from runtime.rl.model import DecoderConfig

USABLE_SHARE = 0.88  # of a card: the rest is the driver's, the allocator's gaps and what libraries hold
ROW_FLOOR = 8192  # tokens of a row that keep a GPU busy: below, layers are rather computed again
ROW_CEILING = 32768  # and beyond which it is no faster
ROW_STEP = 1024
_LARGE_CARD = 64 * 2**30
_LOGIT_BYTES = {"large": 2**31, "small": 2**29, "cpu": 2**26}  # of one chunk's logits


@record
class Room:
    """`row_tokens`: most tokens of a row (a longer sample has a row of its own)."""

    row_tokens: int
    head_rows: int
    layers: int
    kept_bytes: int  # a token and layer, kept for the backward pass
    input_bytes: int  # the same of a layer that is computed again: its input
    free_bytes: float | None  # for activations; None: no limit is known
    checkpointing: Literal["auto", "on", "off"]

    def recomputed(self, tokens: int) -> int:
        """How many layers of a row of so many tokens are computed again."""
        if self.checkpointing != "auto":
            return self.layers if self.checkpointing == "on" else 0
        if self.free_bytes is None:
            return 0
        # One layer's activations exist in full while it is computed again.
        over = tokens * (self.layers + 1) * self.kept_bytes - self.free_bytes
        if over <= tokens * self.kept_bytes:
            return 0
        saved = tokens * (self.kept_bytes - self.input_bytes)
        return min(self.layers, int(-(-over // saved)))


def device_room(
    config: DecoderConfig,
    *,
    parameters: Sequence[Tensor],
    masters: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype,
    micro_batch_tokens: int,
    compiled: bool,
    checkpointing: Literal["auto", "on", "off"],
    card_bytes: int | None = None,
) -> Room:
    """The room on `device`; `card_bytes` stands in for the size of its memory. A CPU has no limit."""
    if card_bytes is None and device.type == "cuda":
        card_bytes = int(part_of_card(device) * torch.cuda.get_device_properties(device).total_memory)
    size = "cpu" if card_bytes is None else "large" if card_bytes >= _LARGE_CARD else "small"
    head_rows = max(16, _LOGIT_BYTES[size] // (config.vocab * dtype.itemsize))
    if head_rows > 256:
        head_rows -= head_rows % 256
    kept, inputs = layer_bytes(config, dtype, compiled=compiled)
    free = None
    if card_bytes is not None:
        held = state_bytes(parameters, masters) + head_bytes(config, dtype, head_rows, compiled=compiled)
        held += gathered_bytes(config, parameters, dtype)
        if compiled:
            held += config.layers * joined_bytes(config, dtype)
        free = max(0.0, USABLE_SHARE * card_bytes - held)
    rows = micro_batch_tokens
    if free is not None:
        # One layer exists in full beside the inputs of all while it is computed again.
        each = config.layers * inputs + kept if checkpointing == "on" else (config.layers + 1) * kept
        fitting = int(free / each)
        fitting -= fitting % ROW_STEP
        rows = min(rows, ROW_CEILING, max(fitting, ROW_FLOOR))
    return Room(
        row_tokens=rows,
        head_rows=head_rows,
        layers=config.layers,
        kept_bytes=kept,
        input_bytes=inputs,
        free_bytes=free,
        checkpointing=checkpointing,
    )


def part_of_card(device: torch.device) -> float:
    """The share of a card's memory that this process may take: all of it, unless it was told to share the card."""
    return float(torch.cuda.get_per_process_memory_fraction(device))


def layer_bytes(config: DecoderConfig, dtype: torch.dtype, *, compiled: bool) -> tuple[int, int]:
    """Bytes a token of one layer's activations until its backward pass, and of its input alone.

    Kept: both residuals and both normed inputs, rotated q, k and v, attention's output, gate, up and their product.
    Uncompiled, q and k of before the rotation and the gate behind its silu too.
    """
    query, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    values = 4 * config.hidden + 2 * query + 2 * kv + 3 * config.intermediate
    if not compiled:
        values += query + kv + config.intermediate
    return values * dtype.itemsize + 4 * (config.heads + 2), config.hidden * dtype.itemsize


def state_bytes(parameters: Sequence[Tensor], masters: Sequence[Tensor]) -> int:
    """Parameters, masters that are not parameters, gradient sums and AdamW's two moments; what this rank holds of each."""
    own = {id(p) for p in parameters}
    held = sum(_local(p) * p.element_size() for p in parameters)
    held += sum(_local(m) * m.element_size() for m in masters if id(m) not in own)
    return held + 3 * sum(_local(m) * m.element_size() for m in masters)


def head_bytes(config: DecoderConfig, dtype: torch.dtype, rows: int, *, compiled: bool) -> int:
    """A chunk's logits and their gradient, and the output embedding's gradient: wide, scaled, and as it is handed on."""
    wide = max(4, dtype.itemsize)
    chunk = rows * config.vocab * (2 * dtype.itemsize + (0 if compiled else 4 * wide))
    return chunk + config.vocab * config.hidden * (2 * wide + 2 * dtype.itemsize)


def joined_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The three projections of a layer behind each other, which its backward pass keeps."""
    return (config.heads + 2 * config.kv_heads) * config.head_dim * config.hidden * dtype.itemsize


def gathered_bytes(config: DecoderConfig, parameters: Sequence[Tensor], dtype: torch.dtype) -> int:
    """What sharded parameters take while they are whole: the embeddings for all of a pass and two layers at a time, each
    with its gradient and the float32 copy of it that ranks sum. 0 where nothing is sharded."""
    if not any(hasattr(p, "to_local") for p in parameters):
        return 0
    root = config.vocab * config.hidden * (1 if config.tied else 2)
    total = sum(p.numel() for p in parameters)
    return int((root + 2 * (total - root) / config.layers) * (2 * dtype.itemsize + 4))


def _local(tensor: Tensor) -> int:
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(local.numel())
