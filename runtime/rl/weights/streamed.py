"""Sealed folders whose tensors come one at a time: the host never holds more than the one that is being written.

The file is plain safetensors: 8 bytes with the header's length, a JSON header padded with blanks to 8 bytes, then the tensors'
bytes one behind the other (https://github.com/huggingface/safetensors, section Format). Its header needs every shape before the
first byte, hence the layout.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError
from runtime.rl.weights.sealed import TensorEntry

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
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


def write_tensors(
    path: Path, layout: Mapping[str, TensorShape], tensors: Iterable[tuple[str, Tensor]]
) -> dict[str, TensorEntry]:
    """Write `tensors`, which come in the order of `layout`, to `path` and sync it; returns what a manifest says of each.

    Hashing of one tensor and writing it run side by side. WeightsError when a tensor is not what the layout says.
    """
    entries: dict[str, TensorEntry] = {}
    with path.open("wb") as file, ThreadPoolExecutor(1) as hasher:
        file.write(_header(layout))
        for (name, expected), (found, tensor) in zip(layout.items(), tensors, strict=True):
            if (name, expected.shape, expected.dtype) != (found, tuple(tensor.shape), tensor.dtype):
                got = (found, tuple(tensor.shape), tensor.dtype)
                raise WeightsError(
                    "a tensor is not as announced", where=str(path), got=got, expected=f"{name} {expected}"
                )
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            digest = hasher.submit(hashlib.sha256, flat)
            file.write(flat)
            entries[name] = TensorEntry(
                shape=expected.shape,
                dtype=str(expected.dtype).removeprefix("torch."),
                sha256=digest.result().hexdigest(),
            )
        file.flush()
        os.fsync(file.fileno())
    return entries


def _header(layout: Mapping[str, TensorShape]) -> bytes:
    header: dict[str, object] = {}
    at = 0
    for name, t in layout.items():
        end = at + t.size_bytes
        header[name] = {"dtype": _DTYPES[t.dtype], "shape": list(t.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
