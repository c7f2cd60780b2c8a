"""The KV cache: one row (slot) a running sample, rows 0..n-1 in use, so that a decode step reads views, not gathers.

Shapes: K and V are [layers, slots, kv_heads, length, head_dim]. Both middle sizes grow on demand.
"""

import torch

from runtime.rl.model.config import DecoderConfig

LENGTH_BLOCK = 32  # positions; growth is rounded up to it so that it is rare


class KVCache:
    """Keys and values of the running samples of one engine."""

    def __init__(self, config: DecoderConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        shape = (config.layers, 0, config.kv_heads, 0, config.head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        return self.k.shape[1]

    @property
    def length(self) -> int:
        return self.k.shape[3]

    def ensure(self, slots: int, length: int) -> None:
        """Make room for `slots` rows of `length` positions; what is there stays."""
        if slots <= self.slots and length <= self.length:
            return
        rows = max(slots, self.slots)
        positions = max(-(-length // LENGTH_BLOCK) * LENGTH_BLOCK, self.length)
        self.k, self.v = _grown(self.k, rows, positions), _grown(self.v, rows, positions)

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        self.k[:, target].copy_(self.k[:, source])
        self.v[:, target].copy_(self.v[:, source])

    def write_prefix(self, layer: int, first_row: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store positions 0..T-1 of rows `first_row`.. ; k and v are [rows, kv_heads, T, head_dim]."""
        rows, _, length, _ = k.shape
        self.k[layer, first_row : first_row + rows, :, :length] = k
        self.v[layer, first_row : first_row + rows, :, :length] = v


def _grown(old: torch.Tensor, rows: int, positions: int) -> torch.Tensor:
    """A zeroed tensor of the wanted size with `old` in its corner. Zeros, not garbage: masked values still meet 0 * v."""
    layers, had_rows, heads, had_positions, dim = old.shape
    new = old.new_zeros((layers, rows, heads, positions, dim))
    new[:, :had_rows, :, :had_positions] = old
    return new
