"""A copy of a rank's state in host memory: whoever writes it does not stop whoever trains."""

import logging
import math
import os
import weakref
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

ALIGN_BYTES = 64
TOUCH_BYTES = 2**28
TOUCHERS = min(8, os.cpu_count() or 1)
_log = logging.getLogger(__name__)


class Snapshot:
    """Room for tensors of always the same names, shapes and dtypes; one copy at a time.

    Page-locked where the tensors are on a GPU, so that the copy runs at the speed of its link. Locking takes about a second
    for some GB: the room is made once and used again. It is registered with CUDA rather than taken from torch's allocator of
    locked memory, which rounds every piece up to a power of two.
    """

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        """Room for tensors like these, `bytes_of(like)`."""
        self._flat = torch.empty(bytes_of(like), dtype=torch.uint8)
        if any(t.is_cuda for t in like.values()):
            _touch(self._flat)
            _lock(self, self._flat)
        self.tensors: dict[str, Tensor] = {}  # what `take` copied last
        at = 0
        for name, t in like.items():
            end = at + t.numel() * t.element_size()
            self.tensors[name] = self._flat[at:end].view(t.dtype).view(t.shape)
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


def _touch(flat: Tensor) -> None:
    """Have the system find the memory for `flat`, by several threads. Locking would do it by one."""
    with ThreadPoolExecutor(TOUCHERS) as pool:
        for _ in pool.map(Tensor.zero_, torch.split(flat, TOUCH_BYTES)):
            pass


def _lock(owner: Snapshot, flat: Tensor) -> None:
    """Page-lock `flat` for as long as its owner lives. Where CUDA refuses, copies are slower and as right."""
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1  # cudaHostRegisterPortable: for every context of the process
    refused = int(cuda.cudaHostRegister(flat.data_ptr(), flat.numel(), portable))
    if refused:
        _log.warning("host memory of a snapshot could not be page-locked (CUDA error %d): copies are slower", refused)
        return
    weakref.finalize(owner, cuda.cudaHostUnregister, flat.data_ptr()).atexit = False
