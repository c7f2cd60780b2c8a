"""Kernels of one device: matrix products, copies, attention, transfers to and from the host and between cards."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from planner.calibration import CopyPoint, DecodePoint, GemmPoint, LinkPoint, PrefillPoint
from runtime.profile.agenda import Shape
from runtime.profile.timing import seconds_of

# Operands rotate over so many bytes: more than any last-level cache, as weights of a model do.
ROTATE_BYTES = {"cuda": 2**28, "cpu": 2**27}
_HELD_SHARE = 0.6  # of the free memory of a card a point may take


def dtype_of(device: torch.device) -> tuple[torch.dtype, str]:
    """What the device computes in, and its name in a calibration."""
    return (torch.bfloat16, "bf16") if device.type == "cuda" else (torch.float32, "fp32")


def gemm(shapes: Sequence[Shape], device: torch.device, budget_s: float) -> tuple[GemmPoint, ...]:
    """C[m, n] = A[m, k] B[k, n] with B stored as a linear layer stores it, each call with another B."""
    dtype, name = dtype_of(device)
    out: list[GemmPoint] = []
    for m, n, k in shapes:
        copies = _copies(n * k * dtype.itemsize, device)
        a = torch.randn(m, k, device=device, dtype=dtype)
        weights = [torch.randn(n, k, device=device, dtype=dtype) for _ in range(copies)]

        def work(i: int, a: torch.Tensor = a, weights: list[torch.Tensor] = weights) -> object:
            return F.linear(a, weights[i % len(weights)])

        with torch.inference_mode():
            out.append(GemmPoint(m=m, n=n, k=k, dtype=name, seconds=seconds_of(work, device, budget_s)))
    return tuple(out)


def copy(sizes_bytes: Sequence[int], device: torch.device, budget_s: float) -> tuple[CopyPoint, ...]:
    """Bytes read plus bytes written a second of copies inside the device's memory."""
    out: list[CopyPoint] = []
    for size in sizes_bytes:
        pairs = [
            (torch.zeros(size, device=device, dtype=torch.uint8), torch.zeros(size, device=device, dtype=torch.uint8))
            for _ in range(_copies(2 * size, device))
        ]

        def work(i: int, pairs: list[Any] = pairs) -> object:
            source, target = pairs[i % len(pairs)]
            return target.copy_(source)

        out.append(CopyPoint(size_bytes=size, bytes_per_s=2 * size / seconds_of(work, device, budget_s)))
    return tuple(out)


def prefill(shapes: Sequence[Shape], device: torch.device, budget_s: float) -> tuple[PrefillPoint, ...]:
    """Causal attention as the torch engine's prefill computes it."""
    dtype, name = dtype_of(device)
    out: list[PrefillPoint] = []
    for batch, tokens, heads, kv_heads, dim in shapes:
        q = torch.randn(batch, heads, tokens, dim, device=device, dtype=dtype)
        k, v = (torch.randn(batch, kv_heads, tokens, dim, device=device, dtype=dtype) for _ in range(2))

        def work(i: int, q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v) -> object:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        with torch.inference_mode():
            seconds = seconds_of(work, device, budget_s)
        out.append(
            PrefillPoint(
                batch=batch, tokens=tokens, heads=heads, kv_heads=kv_heads, head_dim=dim, seconds=seconds, dtype=name
            )
        )
    return tuple(out)


def decode(shapes: Sequence[Shape], device: torch.device, budget_s: float) -> tuple[DecodePoint, ...]:
    """Attention of one new token a sample over its cache, by the fastest kernel torch has: what an engine does
    besides (masks of ragged rows, loops) is in its rates."""
    dtype, name = dtype_of(device)
    out: list[DecodePoint] = []
    for batch, context, heads, kv_heads, dim in shapes:
        size = 2 * batch * kv_heads * context * dim * dtype.itemsize
        if device.type == "cuda" and size > _HELD_SHARE * torch.cuda.mem_get_info(device)[0]:
            continue
        q = torch.randn(batch, heads, 1, dim, device=device, dtype=dtype)
        caches = [
            tuple(torch.randn(batch, kv_heads, context, dim, device=device, dtype=dtype) for _ in range(2))
            for _ in range(_copies(size, device))
        ]

        def work(i: int, q: torch.Tensor = q, caches: list[Any] = caches) -> object:
            k, v = caches[i % len(caches)]
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

        with torch.inference_mode():
            seconds = seconds_of(work, device, budget_s)
        out.append(
            DecodePoint(
                batch=batch, context=context, heads=heads, kv_heads=kv_heads, head_dim=dim, seconds=seconds, dtype=name
            )
        )
    return tuple(out)


def host_links(sizes_bytes: Sequence[int], device: torch.device, budget_s: float) -> tuple[LinkPoint, ...]:
    """Transfers from pinned host memory to the card and back."""
    out: list[LinkPoint] = []
    for size in sizes_bytes:
        host = torch.zeros(size, dtype=torch.uint8).pin_memory()
        card = torch.zeros(size, dtype=torch.uint8, device=device)
        down = seconds_of(lambda i, h=host, c=card: c.copy_(h, non_blocking=True), device, budget_s)  # type: ignore[misc]
        up = seconds_of(lambda i, h=host, c=card: h.copy_(c, non_blocking=True), device, budget_s)  # type: ignore[misc]
        out.append(LinkPoint(path="host_to_device", size_bytes=size, bytes_per_s=size / down))
        out.append(LinkPoint(path="device_to_host", size_bytes=size, bytes_per_s=size / up))
    return tuple(out)


def peer(
    sizes_bytes: Sequence[int], first: torch.device, second: torch.device, budget_s: float
) -> tuple[LinkPoint, ...]:
    """Transfers from one card to another of the machine, over whatever joins them."""
    out: list[LinkPoint] = []
    for size in sizes_bytes:
        source = torch.zeros(size, dtype=torch.uint8, device=first)
        target = torch.zeros(size, dtype=torch.uint8, device=second)

        def work(i: int, source: torch.Tensor = source, target: torch.Tensor = target) -> object:
            return target.copy_(source, non_blocking=True)

        with torch.cuda.device(first):
            out.append(LinkPoint(path="peer", size_bytes=size, bytes_per_s=size / seconds_of(work, first, budget_s)))
    return tuple(out)


def _copies(size_bytes: int, device: torch.device) -> int:
    return max(1, min(256, -(-ROTATE_BYTES[device.type] // size_bytes)))
