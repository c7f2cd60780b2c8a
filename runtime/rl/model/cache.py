"""The KV cache: one row (slot) a running sample, rows 0..n-1 in use, so that a decode step reads views, not gathers.

Shapes: K and V are [layers, slots, kv_heads, length, head_dim]. Both middle sizes grow on demand.
"""

import torch

from runtime.rl.model.config import DecoderConfig

LENGTH_BLOCK = 32  # positions, and
ROW_BLOCK = 8  # rows: growth is rounded up to them so that it is rare


class KVCache:
    """Keys and values of the running samples of one engine.

    What has grown stays, unless rows * positions would then exceed `keep_tokens`: many short rows and, later, few long
    ones must not add up to many long ones.
    """

    def __init__(
        self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device, keep_tokens: int | None = None
    ) -> None:
        self._keep_tokens = keep_tokens
        shape = (config.layers, 0, config.kv_heads, 0, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        return self.k.shape[1]

    @property
    def length(self) -> int:
        return self.k.shape[3]

    @torch.inference_mode()
    def ensure(self, slots: int, length: int) -> None:
        """Make room for rows 0..slots-1 of `length` positions; what these hold stays."""
        if slots <= self.slots and length <= self.length:
            return
        needed_rows, needed = _rounded(slots, ROW_BLOCK), _rounded(length, LENGTH_BLOCK)
        rows, positions = max(needed_rows, self.slots), max(needed, self.length)
        if self._keep_tokens is not None and rows * positions > self._keep_tokens:
            rows, positions = needed_rows, needed
        self.k, self.v = _grown(self.k, rows, positions), _grown(self.v, rows, positions)

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        self.k[:, target].copy_(self.k[:, source])
        self.v[:, target].copy_(self.v[:, source])

    def write_prefix(self, layer: int, first_row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store positions 0..T-1 of rows `first_row`.. ; k and v are [rows, kv_heads, T, head_dim]."""
        rows, _, length, _ = k.shape
        self.k[layer, first_row : first_row + rows, :, :length] = k
        self.v[layer, first_row : first_row + rows, :, :length] = v


def _rounded(count: int, block: int) -> int:
    return -(-count // block) * block


def _grown(old: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
    """A zeroed tensor of the wanted size with `old` in its corner. Zeros, not garbage: masked values still meet 0 * v."""
    layers, had_rows, heads, had_positions, dim = old.shape
    new = old.new_zeros((layers, rows, heads, positions, dim))
    both_rows, both_positions = min(rows, had_rows), min(positions, had_positions)
    new[:, :both_rows, :, :both_positions] = old[:, :both_rows, :, :both_positions]
    return new
