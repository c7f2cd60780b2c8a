"""A safetensors file, brought to the disk while it is written.

8 bytes with the header's length, a JSON header padded with blanks to 8 bytes, then the tensors' bytes one behind the other
(https://github.com/huggingface/safetensors, section Format). Its header needs every shape before the first byte, hence the layout.

Who else syncs on the same disk waits for what lies in the page cache before it: some GB that were written at once and synced at the
end kept the ledger's commits waiting, and with them every replica. So a file is synced by portions, two of them at most on their way.
"""

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError

PORTION_BYTES = 2**24
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@record
class TensorShape:
    """What a tensor will be, before it is there."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of its data."""
        size = self.dtype.itemsize
        for n in self.shape:
            size *= n
        return size


class TensorFile:
    """A new file of tensors in the order of `layout`. On disk when its `with` ends without an error."""

    def __init__(
        self,
        path: Path,
        layout: Mapping[str, TensorShape],
        *,
        portion_bytes: int = PORTION_BYTES,
        sync: Callable[[int], None] = os.fsync,
    ) -> None:
        """WeightsError for a dtype that such a file cannot hold; OSError when the disk refuses, here and in each method.
        `sync`: brings what was written to a descriptor to its disk."""
        header = _header(layout)
        self._file = path.open("wb")
        self._portion_bytes, self._unsynced, self._sync = portion_bytes, 0, sync
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="sync")
        self._syncing: Future[None] | None = None
        self.write(memoryview(header))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._syncer.shutdown()
            if error is None:
                self._synced()
                self._file.flush()
                self._sync(self._file.fileno())
        finally:
            self._file.close()

    def write(self, data: memoryview) -> None:
        """A tensor's bytes, or some of them."""
        for at in range(0, data.nbytes, self._portion_bytes):
            part = data[at : at + self._portion_bytes]
            self._file.write(part)
            self._unsynced += part.nbytes
            if self._unsynced >= self._portion_bytes:
                self._file.flush()
                self._synced()
                self._syncing, self._unsynced = self._syncer.submit(self._sync, self._file.fileno()), 0

    def _synced(self) -> None:
        """The portion before is on disk."""
        if self._syncing is not None:
            self._syncing.result()


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """A whole file of tensors, on disk when this returns."""
    # Readers look at a tensor where it lies: the widest elements first, and each begins at a multiple of its own.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))
    layout = {name: TensorShape(shape=tuple(t.shape), dtype=t.dtype) for name, t in ordered}
    with TensorFile(path, layout) as file:
        for _, tensor in ordered:
            file.write(bytes_of(tensor))


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, row-major, on the CPU."""
    view: memoryview = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return view


def _header(layout: Mapping[str, TensorShape]) -> bytes:
    header: dict[str, object] = {}
    at = 0
    for name, t in layout.items():
        if t.dtype not in _DTYPES:
            raise WeightsError(f"tensor {name} is of a dtype that a file cannot hold", got=t.dtype)
        end = at + t.size_bytes
        header[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
