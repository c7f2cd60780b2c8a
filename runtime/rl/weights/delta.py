"""What changed between two generations, bit by bit: where, and the new bits. Pure.

Between two optimiser steps most bfloat16 weights keep their bits: the update is smaller than their last one. For each tensor
that changed there are two: `<name>#at`, the places, and `<name>#bits`, the new bits in their order. Places are a bitmap, or the
runs of unchanged elements before each changed one, a byte each (255: that many unchanged, and the run goes on), whichever is
smaller. Applying overwrites: doing it twice is doing it once.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from runtime.errors import WeightsError

AT, BITS = "#at", "#bits"
_LONG = 255
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
    """Tensors (on the CPU) that turn `old` into `new`; None when names, shapes or dtypes differ."""
    if old.keys() != new.keys():
        return None
    changes: dict[str, Tensor] = {}
    for name, tensor in new.items():
        if tensor.shape != old[name].shape or tensor.dtype != old[name].dtype:
            return None
        bits = _words(tensor)
        changed = bits != _words(old[name])
        at = np.flatnonzero(changed)
        if at.size:
            changes[name + AT] = torch.from_numpy(_places(at, changed))
            changes[name + BITS] = torch.from_numpy(bits[at])
    return changes


def apply(tensors: Mapping[str, Tensor], changes: Mapping[str, Tensor]) -> None:
    """Turn `tensors` (on the CPU, contiguous) into the newer ones, in place.

    WeightsError when the changes are not of them; some may be applied then."""
    for name in names(changes):
        if name not in tensors or name + AT not in changes or name + BITS not in changes:
            raise WeightsError("a delta is of another model", got=name)
        words, bits = _words(tensors[name]), changes[name + BITS].numpy()
        at = _read_places(changes[name + AT].numpy(), words.size, bits.size)
        if bits.dtype != words.dtype or bits.ndim != 1:
            raise WeightsError(f"the delta of tensor {name} does not fit it", got=bits.dtype, expected=str(words.dtype))
        words[at] = bits


def names(changes: Iterable[str]) -> list[str]:
    """Of the tensors that changed."""
    return sorted({key.rpartition("#")[0] for key in changes})


def size(tensors: Mapping[str, Tensor]) -> int:
    """Bytes."""
    return sum(t.numel() * t.element_size() for t in tensors.values())


def _words(tensor: Tensor) -> NDArray[Any]:
    """The bits of a tensor as integers; of one that is contiguous on the CPU, where they are."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    words: NDArray[Any] = flat.view(_WORDS[tensor.element_size()]).numpy()
    return words


def _places(at: NDArray[np.int64], changed: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """A mark (0: bitmap, 1: runs) and the places, whichever way is shorter."""
    gaps = np.diff(at, prepend=-1) - 1
    lengths = gaps // _LONG + 1
    if int(lengths.sum()) >= -(-changed.size // 8):
        return np.concatenate((np.zeros(1, np.uint8), np.packbits(changed)))
    runs = np.full(1 + int(lengths.sum()), _LONG, np.uint8)
    runs[0] = 1
    runs[np.cumsum(lengths)] = gaps % _LONG
    return runs


def _read_places(coded: NDArray[np.uint8], count: int, changed: int) -> NDArray[np.int64]:
    """The inverse of `_places`, for a tensor of `count` elements. WeightsError when it does not decode."""
    if coded.dtype != np.uint8 or coded.ndim != 1 or coded.size < 1 or coded[0] > 1:
        raise WeightsError("the places of a delta do not decode", got=str(coded[:4]))
    body = coded[1:]
    if coded[0] == 0:
        if body.size != -(-count // 8):
            raise WeightsError("the bitmap of a delta has another length", got=body.size, expected=f"{-(-count // 8)}")
        at = np.flatnonzero(np.unpackbits(body, count=count))
    else:
        steps = np.where(body == _LONG, _LONG, body.astype(np.int64) + 1)
        at = (np.cumsum(steps) - 1)[body != _LONG]
    if at.size != changed or (at.size and int(at[-1]) >= count):
        raise WeightsError("the places of a delta do not fit", got=at.size, expected=str(changed))
    return at.astype(np.int64)
