"""Attention over packed rows: each sample sees itself alone, causally.

Shapes: T tokens of a row, S samples in it, Q query heads, K KV heads, D head_dim. Every way takes q [T,Q,D], k and v [T,K,D]
and returns [T,Q,D]; which ways a machine has is found by trying them.
"""

import inspect
import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from planner.record import record
from runtime.errors import first_line

Mix = Callable[[Tensor, Tensor, Tensor], Tensor]
ALIKE = 0.75  # samples of at least this share of the longest are padded to it and go through one kernel
LONG = 2048  # tokens from which attention's share of a step is worth a kernel of its own
ROUND = 512  # cuDNN plans anew for each length it meets; rounded ones recur
_log = logging.getLogger(__name__)


@record
class Row:
    """Samples one behind the other. A row that is padded has its padding as one more sample at the end."""

    tokens: Tensor  # [T] int64
    positions: Tensor  # [T] int64, from 0 in each sample
    bounds: Tensor  # [S + 1] int32: sample s is tokens bounds[s] .. bounds[s + 1] - 1
    lengths: tuple[int, ...]  # of the samples, on the host


@record
class PackedAttention:
    """One way to compute attention of packed rows. `note`: why it is this one."""

    name: str
    prepare: Callable[[Row], Mix]  # once a row, before the first layer
    note: str = ""


def choose_attention(
    wanted: str, device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int
) -> PackedAttention:
    """The way called `wanted`; "auto": "by_length" from the Hopper generation on, else "varlen", else "sdpa": the first whose
    trial is right.

    A way that was asked for and fails its trial is replaced by "sdpa" too; the note says why.
    """
    if wanted == "auto" and (device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16)):
        return PackedAttention(name="sdpa", prepare=grouped, note=f"{dtype} on {device.type}".replace("torch.", ""))
    if wanted == "sdpa":
        return PackedAttention(name="sdpa", prepare=grouped, note="asked for")
    found: list[PackedAttention] = []
    for name in _candidates(device) if wanted == "auto" else (wanted,):
        found.append(_tried(name, device, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim))
        if found[-1].name == name:
            break
    return found[-1]


def _candidates(device: torch.device) -> tuple[str, ...]:
    """The flash attention that torch brings has kernels of the generation before Hopper; cuDNN's are faster there."""
    return ("by_length", "varlen") if torch.cuda.get_device_capability(device) >= (9, 0) else ("varlen",)


def _tried(
    name: str, device: torch.device, dtype: torch.dtype, *, heads: int, kv_heads: int, head_dim: int
) -> PackedAttention:
    """The way called `name`, or "sdpa" with the reason why not."""
    try:
        prepare = _WAYS[name]()
        off = _trial(prepare, device, dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
    except (RuntimeError, ImportError, TypeError, ValueError, NotImplementedError) as e:
        text = first_line(e)
        _log.warning("attention %s does not work here, another is used: %s", name, text)
        return PackedAttention(name="sdpa", prepare=grouped, note=f"{name} failed: {text}")
    limit = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    if not off < limit:
        _log.warning("attention %s is wrong here by %.3g, another is used", name, off)
        return PackedAttention(name="sdpa", prepare=grouped, note=f"{name} is off by {off:.3g}")
    return PackedAttention(name=name, prepare=prepare, note=f"trial off by {off:.2g}")


def grouped(row: Row, multiple: int = 1) -> Mix:
    """torch's scaled_dot_product_attention over runs of samples of like lengths, padded on the right to the longest, and that
    to a multiple of `multiple`.

    Causal attention never sees padding behind a token, so this is exact. Rows sorted by length have few runs.
    """
    device = row.tokens.device
    groups = [_Group.of(row.lengths[a:b], device=device, multiple=multiple) for a, b in _runs(row.lengths)]

    def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs: list[Tensor] = []
        begin = 0
        for group in groups:
            end = begin + group.tokens
            queries, keys, values = (group.batched(x[begin:end]) for x in (q, k, v))
            shared = q.shape[1] != k.shape[1]
            out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=shared)
            outs.append(group.flat(out))
            begin = end
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    return mix


@record
class _Group:
    """`count` samples, padded to `longest`. `slots` [tokens]: where each token lies in [count * longest]; None: no padding."""

    count: int
    longest: int
    tokens: int
    slots: Tensor | None

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device, multiple: int) -> "_Group":
        longest, slots = -(-max(lengths) // multiple) * multiple, None
        if min(lengths) < longest:
            places = np.concatenate([np.arange(n) + i * longest for i, n in enumerate(lengths)])
            slots = to_device(torch.from_numpy(places), device)
        return cls(count=len(lengths), longest=longest, tokens=sum(lengths), slots=slots)

    def batched(self, x: Tensor) -> Tensor:
        """[tokens,heads,D] -> [count,heads,longest,D]."""
        if self.slots is not None:
            x = x.new_zeros((self.count * self.longest, *x.shape[1:])).index_copy(0, self.slots, x)
        return x.view(self.count, self.longest, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: Tensor) -> Tensor:
        """[count,heads,longest,D] -> [tokens,heads,D]."""
        x = x.transpose(1, 2).reshape(self.count * self.longest, x.shape[1], x.shape[3])
        return x if self.slots is None else x.index_select(0, self.slots)


def _runs(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Runs [a, b) of neighbours whose shortest is at least ALIKE of their longest."""
    runs: list[tuple[int, int]] = []
    a, low, high = 0, lengths[0], lengths[0]
    for i, n in enumerate(lengths):
        low, high = min(low, n), max(high, n)
        if low < ALIKE * high:
            runs.append((a, i))
            a, low, high = i, n, n
    runs.append((a, len(lengths)))
    return runs


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the device without a wait of the host: a copy from pageable memory would wait for all work before it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def varlen_kernel() -> Callable[..., Any]:
    """Flash attention for variable lengths (torch.nn.attention.varlen, from torch 2.10), causal, of (q, k, v, bounds of the
    queries, of the keys, longest of each, `scale`). Its signature moved: 2.10 has `is_causal`, later releases `window_size` =
    (-1, 0) for the same, and some ask for `enable_gqa`."""
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        how["enable_gqa"] = True
    return partial(varlen_attn, **how)


def _varlen() -> Callable[[Row], Mix]:
    kernel = varlen_kernel()

    def prepare(row: Row) -> Mix:
        longest = max(row.lengths)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = kernel(q, k, v, row.bounds, row.bounds, longest, longest)
            assert isinstance(out, Tensor), "only the output was asked for"
            return out

        return mix

    return prepare


def _flex() -> Callable[[Row], Mix]:
    """torch's flex_attention, compiled, with a mask of (same sample) and (not later)."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)

    def prepare(row: Row) -> Mix:
        length = row.tokens.shape[0]
        at = torch.arange(length, dtype=torch.int32, device=row.tokens.device)
        owner = torch.searchsorted(row.bounds[1:], at, right=True)

        def seen(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
            del b, h
            return (query >= key) & (owner[query] == owner[key])

        # Compiled, or [T, T] booleans would be made first.
        mask = create_block_mask(seen, None, None, length, length, device=str(row.tokens.device), _compile=True)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
            out = compiled(queries, keys, values, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
            assert isinstance(out, Tensor), "only the output was asked for"
            return out[0].transpose(0, 1)

        return mix

    return prepare


def _cudnn(multiple: int = 1) -> Callable[[Row], Mix]:
    """As "sdpa", by cuDNN's kernel where it takes the shapes."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    def prepare(row: Row) -> Mix:
        inner = grouped(row, multiple)

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                return inner(q, k, v)

        return mix

    return prepare


def by_length(long: Callable[[Row], Mix], short: Callable[[Row], Mix], long_from: int = LONG) -> Callable[[Row], Mix]:
    """Samples of at least `long_from` tokens go one way, the others another; neighbours of one kind together."""

    def prepare(row: Row) -> Mix:
        pieces: list[tuple[int, int, Mix]] = []
        begin, a = 0, 0
        for is_long, run in itertools.groupby(row.lengths, key=lambda n: n >= long_from):
            lengths = tuple(run)
            end, b = begin + sum(lengths), a + len(lengths)
            bounds = row.bounds[a : b + 1] - row.bounds[a]
            part = Row(tokens=row.tokens[begin:end], positions=row.positions[begin:end], bounds=bounds, lengths=lengths)
            pieces.append((begin, end, (long if is_long else short)(part)))
            begin, a = end, b

        def mix(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outs = [inner(q[at:to], k[at:to], v[at:to]) for at, to, inner in pieces]
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return mix

    return prepare


_WAYS: dict[str, Callable[[], Callable[[Row], Mix]]] = {
    "varlen": _varlen,
    "flex": _flex,
    "cudnn": _cudnn,
    "by_length": lambda: by_length(_cudnn(ROUND), _varlen()),
}


def _trial(
    prepare: Callable[[Row], Mix],
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> float:
    """Largest difference of outputs and gradients from `grouped` on samples long and short."""
    lengths = (LONG + 52, LONG, 256, 128)
    begins = [0, *itertools.accumulate(lengths)]
    positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    bounds = torch.tensor(begins, dtype=torch.int32, device=device)
    row = Row(tokens=positions, positions=positions, bounds=bounds, lengths=lengths)
    made = torch.Generator().manual_seed(0)
    given = [
        torch.randn(begins[-1], h, head_dim, generator=made).to(device, dtype)
        for h in (heads, kv_heads, kv_heads, heads)
    ]

    def results(way: Callable[[Row], Mix]) -> list[Tensor]:
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        out = way(row)(q, k, v)
        out.backward(given[3])  # type: ignore[no-untyped-call]
        return [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]

    pairs = zip(results(prepare), results(grouped), strict=True)
    # Relative to each tensor's largest value: gradients of shared KV heads are sums over many queries.
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
