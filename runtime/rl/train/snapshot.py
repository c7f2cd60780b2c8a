"""A copy of a rank's state in host memory: whoever writes it does not stop whoever trains."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from runtime.rl.host_room import HostRoom

ALIGN_BYTES = 64


class Snapshot:
    """Room for tensors of always the same names, shapes and dtypes; one copy at a time.

    Page-locked where the tensors are on a GPU (`HostRoom`): it is made once and used again.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Room for tensors like these, `bytes_of(like)`."""
        self._room = HostRoom(bytes_of(like), locked=any(t.is_cuda for t in like.values()))
        self.tensors: dict[str, Tensor] = {}  # what `take` copied last
        at = 0
        for name, t in like.items():
            end = at + t.numel() * t.element_size()
            self.tensors[name] = self._room.flat[at:end].view(t.dtype).view(t.shape)
            at = _aligned(end)

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy them; when this returns they may change. Whoever reads the copy before must have ended."""
        devices = {t.device for t in tensors.values() if t.is_cuda}
        for name, t in tensors.items():
            self.tensors[name].copy_(t, non_blocking=True)
        for device in devices:
            torch.cuda.synchronize(device)


def bytes_of(tensors: Mapping[str, Tensor]) -> int:
    """What a snapshot of them takes."""
    return sum(_aligned(t.numel() * t.element_size()) for t in tensors.values())


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGN_BYTES) * ALIGN_BYTES
