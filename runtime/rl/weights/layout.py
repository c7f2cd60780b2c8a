"""How tensors travel: one flat run of bytes, cut into buckets of equal size, a checksum for each. Both sides cut alike.

A tensor may lie across a bucket's edge. The checksum is two weighted sums of 64-bit words, modulo 2^64: cheap where the
bytes are, the same on any device and in any order of addition. Each word is weighted by its column in one and by its row in
the other, with odd weights, so that a changed word always shows and words that changed places do too. It tells damage and
mix-ups, not forgery: SHA-256 stays with the store.
"""

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from planner.record import record
from runtime.errors import WeightsError

ALIGN = 256  # bytes; every tensor and every bucket begins at a multiple
_COLUMNS = ALIGN // 8
_ODD = 0x9E3779B97F4A7C15 - 2**64  # 2^64 over the golden ratio, as a signed word; spreads indices over all bits


@record
class TensorSpec:
    """What a tensor is, without its bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without "torch."

    @property
    def torch_dtype(self) -> torch.dtype:
        """As torch has it. WeightsError for a name torch does not know."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise WeightsError(f"tensor {self.name} is of no dtype that torch knows", got=self.dtype)
        return found

    @property
    def bytes(self) -> int:
        """Without padding."""
        count = 1
        for n in self.shape:
            count *= n
        return count * self.torch_dtype.itemsize


@record
class Layout:
    """Where each tensor lies in the run of bytes."""

    tensors: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]  # in bytes
    total: int  # bytes, padding included
    bucket_bytes: int

    @property
    def buckets(self) -> tuple[tuple[int, int], ...]:
        """First byte and byte past the last of each bucket."""
        edges = [*range(0, self.total, self.bucket_bytes), self.total]
        return tuple(pairwise(edges))

    @property
    def payload(self) -> int:
        """Bytes of the tensors alone."""
        return sum(t.bytes for t in self.tensors)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The tensors as they lie in `flat` (uint8, [total]). Not copies."""
        for spec, begin in zip(self.tensors, self.offsets, strict=True):
            yield spec.name, flat[begin : begin + spec.bytes].view(spec.torch_dtype).view(spec.shape)

    def encode(self) -> dict[str, object]:
        """As JSON values."""
        return {"bucket": self.bucket_bytes, "tensors": [[t.name, list(t.shape), t.dtype] for t in self.tensors]}


def lay_out(tensors: Iterable[TensorSpec], bucket_bytes: int) -> Layout:
    """One after the other, in the order given; the bucket's size is rounded up to a multiple of ALIGN."""
    specs = tuple(tensors)
    offsets: list[int] = []
    end = 0
    for spec in specs:
        offsets.append(end)
        end += _aligned(spec.bytes)
    size = _aligned(max(1, bucket_bytes))
    return Layout(tensors=specs, offsets=tuple(offsets), total=end, bucket_bytes=size)


def decode_layout(raw: dict[str, object]) -> Layout:
    """The inverse of `Layout.encode`."""
    tensors, bucket = raw["tensors"], raw["bucket"]
    if not isinstance(tensors, list) or not isinstance(bucket, int):
        raise WeightsError("the layout does not decode", got=str(raw)[:80])
    return lay_out((TensorSpec(name=n, shape=tuple(s), dtype=d) for n, s, d in tensors), bucket)


def spec_of(name: str, tensor: Tensor) -> TensorSpec:
    """What `tensor` is."""
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))


def pieces(layout: Layout, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[int, Tensor]]:
    """(offset, bytes) of what fills the run from its first byte to its last: tensors, and the zeros between them.

    WeightsError when `tensors` are not those of the layout, in its order."""
    given = iter(tensors)
    for spec, begin in zip(layout.tensors, layout.offsets, strict=True):
        name, tensor = next(given, ("nothing", None))
        if tensor is None or spec_of(name, tensor) != spec:
            raise WeightsError("a tensor is not the one laid out", got=name, expected=f"{spec.name} {spec.shape}")
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        yield begin, data
        gap = _aligned(spec.bytes) - spec.bytes
        if gap:
            yield begin + spec.bytes, torch.zeros(gap, dtype=torch.uint8, device=data.device)
    if (odd := next(given, None)) is not None:
        raise WeightsError("a tensor was not laid out", got=odd[0])


def filled(
    layout: Layout, tensors: Iterable[tuple[str, Tensor]], buffers: Sequence[Tensor]
) -> Iterator[tuple[int, Tensor]]:
    """(number, bytes) of each bucket, packed into `buffers` (uint8, [bucket_bytes]) in turn. A bucket's bytes are
    overwritten when its buffer's turn comes again: the caller must be done with them before it asks for that one."""
    edges = layout.buckets
    number, at = 0, 0
    for begin, data in pieces(layout, tensors):
        done = 0
        while done < data.numel():
            low, high = edges[number]
            buffer = buffers[number % len(buffers)]
            take = min(data.numel() - done, high - at)
            buffer[at - low : at - low + take].copy_(data[done : done + take], non_blocking=True)
            done, at = done + take, at + take
            if at == high:
                yield number, buffer[: high - low]
                number += 1
        assert at == begin + data.numel()


def checksum(data: Tensor) -> Tensor:
    """Two int64 sums of a bucket's bytes (uint8, a multiple of ALIGN), on its device."""
    words = data.view(torch.int64).view(-1, _COLUMNS)
    columns, rows = words.sum(0), words.sum(1)
    return torch.stack((columns.mul_(_weights(columns)).sum(), rows.mul_(_weights(rows)).sum()))


def fingerprint(layout: Layout, sums: Sequence[Sequence[int]], *, lineage: int, version: int) -> str:
    """The digest of a generation whose buckets have these checksums."""
    body = {"kind": "packed", "lineage": lineage, "version": version, "layout": layout.encode(), "sums": list(sums)}
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fingerprint_of(layout: Layout, flat: Tensor, *, lineage: int, version: int) -> str:
    """The same of a whole run of bytes (uint8, [total])."""
    sums = [checksum(flat[low:high]).tolist() for low, high in layout.buckets]
    return fingerprint(layout, sums, lineage=lineage, version=version)


def _weights(like: Tensor) -> Tensor:
    return _weights_of(like.numel(), like.device)


@functools.lru_cache(maxsize=16)
def _weights_of(count: int, device: torch.device) -> Tensor:
    """Kept: buckets are of one size, and few operations on a GPU's thread leave more of it to the engine."""
    return (torch.arange(1, count + 1, device=device, dtype=torch.int64) * _ODD) | 1


def _aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN
