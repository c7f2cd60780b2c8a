"""Room in host memory for what comes from a GPU, page-locked where there is one, so that copies run at the speed of its link."""

import logging
import os
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

TOUCH_BYTES = 2**28
TOUCHERS = min(8, os.cpu_count() or 1)
_log = logging.getLogger(__name__)


class HostRoom:
    """Bytes in `flat`, locked for as long as this lives.

    Locking takes seconds for some GB: a room is made once and used again. It is registered with CUDA rather than taken from torch's
    allocator of locked memory, which rounds every piece up to a power of two and has the system find the memory by one thread.
    """

    def __init__(self, size: int, *, locked: bool) -> None:
        """`locked`: for copies from a GPU. Where CUDA refuses, copies are slower and as right."""
        self.flat = torch.empty(size, dtype=torch.uint8)
        if locked and size:
            _touch(self.flat)
            _lock(self, self.flat)


def _touch(flat: Tensor) -> None:
    """Have the system find the memory for `flat`, by several threads. Locking would do it by one."""
    with ThreadPoolExecutor(TOUCHERS) as pool:
        for _ in pool.map(Tensor.zero_, torch.split(flat, TOUCH_BYTES)):
            pass


def _lock(owner: HostRoom, flat: Tensor) -> None:
    cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    portable = 1  # cudaHostRegisterPortable: for every context of the process
    refused = int(cuda.cudaHostRegister(flat.data_ptr(), flat.numel(), portable))
    if refused:
        _log.warning("host memory could not be page-locked (CUDA error %d): copies are slower", refused)
        return
    weakref.finalize(owner, cuda.cudaHostUnregister, flat.data_ptr()).atexit = False
