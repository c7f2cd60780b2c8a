"""From samples to packed rows of tensors.

A row holds several samples, prompt + response each, one behind the other: positions restart and attention stays within a
sample, so that no token is padding but for a few at the end of a row where a device likes round lengths. Only trained tokens
(weight > 0) are listed; masked ones still serve as context.
"""

import heapq
import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from planner.record import record
from runtime.rl.model.attention import Row, to_device
from runtime.rl.types import TrainBatch, TrainSample


@record
class MicroBatch:
    """One row with N trained response tokens."""

    row: Row
    index: Tensor  # [N] place in the row whose logits predict the token: one before it
    targets: Tensor  # [N] the sampled tokens
    behaviour: Tensor  # [N] their logprobs as the engine reported them
    advantages: Tensor  # [N]
    weights: Tensor  # [N] > 0
    ages: Tensor  # [N] int64: step - version


def size_of(sample: TrainSample) -> int:
    """Tokens of a sample's sequence."""
    return len(sample.prompt_tokens) + len(sample.tokens)


def trained(samples: Sequence[TrainSample]) -> list[TrainSample]:
    """The samples with a trained token; the others take no part in a step."""
    return [s for s in samples if any(s.weights)]


def plan_rows(samples: Sequence[TrainSample], max_tokens: int) -> list[tuple[TrainSample, ...]]:
    """Samples by row, at most `max_tokens` tokens a row (or one longer sample), longest row first.

    As few rows as first-fit decreasing needs (J. D. Johnson, 1973: at most 11/9 of the optimum + 6/9), then, where it fits,
    the same number of rows filled evenly, so that they are alike in length. A function of the batch's samples, not of
    their order.
    """
    ordered = sorted(samples, key=lambda s: (-size_of(s), s.sample))
    room: list[int] = []
    tight: list[list[TrainSample]] = []
    for sample in ordered:
        n = size_of(sample)
        at = next((i for i, left in enumerate(room) if left >= n), None)
        if at is None:
            at = len(room)
            room.append(max_tokens)
            tight.append([])
        room[at] -= n
        tight[at].append(sample)
    even = _even_rows(ordered, len(tight))
    fits = all(sum(map(size_of, r)) <= max_tokens or len(r) == 1 for r in even)
    rows = even if fits else tight
    return sorted((tuple(r) for r in rows), key=lambda r: (-sum(map(size_of, r)), r[0].sample))


def _even_rows(ordered: Sequence[TrainSample], count: int) -> list[list[TrainSample]]:
    """Each sample, longest first, to the row with the fewest tokens (R. L. Graham's rule)."""
    heap = [(0, i) for i in range(count)]
    rows: list[list[TrainSample]] = [[] for _ in range(count)]
    for sample in ordered:
        load, i = heapq.heappop(heap)
        rows[i].append(sample)
        heapq.heappush(heap, (load + size_of(sample), i))
    return rows


def pack(
    samples: Sequence[TrainSample],
    *,
    step: int,
    dtype: torch.dtype,
    device: torch.device,
    multiple: int = 1,
) -> MicroBatch:
    """The tensors of one row, padded at its end to a multiple of `multiple` tokens. No sample at all makes a row of
    padding: a rank whose rows are done takes part in the others' collectives with it.

    `dtype` is that of the per-token floats.
    """
    lengths = [size_of(s) for s in samples]
    total = sum(lengths)
    padding = max(-(-total // multiple), 1) * multiple - total
    if padding:
        lengths.append(padding)
    begins = [0, *itertools.accumulate(lengths)]
    tokens = np.zeros(begins[-1], dtype=np.int64)
    parts: list[tuple[np.ndarray, ...]] = []
    for begin, s in zip(begins, samples, strict=False):
        prompt, size = len(s.prompt_tokens), len(s.tokens)
        response = np.array(s.tokens, dtype=np.int64)
        tokens[begin : begin + prompt] = s.prompt_tokens
        tokens[begin + prompt : begin + prompt + size] = response
        weights = np.array(s.weights, dtype=np.float64)
        kept = np.flatnonzero(weights > 0)
        whole = np.stack((begin + prompt - 1 + kept, response[kept], step - np.array(s.versions, dtype=np.int64)[kept]))
        advantages = np.full(len(kept), s.advantage, dtype=np.float64)
        floats = np.stack((np.array(s.logprobs, dtype=np.float64)[kept], advantages, weights[kept]))
        parts.append((whole, floats))
    integers = [p[0] for p in parts] or [np.zeros((3, 0), dtype=np.int64)]
    numbers = [p[1] for p in parts] or [np.zeros((3, 0))]
    places = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    whole_ = to_device(torch.from_numpy(np.concatenate(integers, axis=1)), device)
    floats_ = to_device(torch.from_numpy(np.concatenate(numbers, axis=1)).to(dtype), device)
    both = to_device(torch.from_numpy(np.stack((tokens, places))), device)
    bounds = to_device(torch.tensor(begins, dtype=torch.int32), device)
    return MicroBatch(
        row=Row(tokens=both[0], positions=both[1], bounds=bounds, lengths=tuple(lengths)),
        index=whole_[0],
        targets=whole_[1],
        ages=whole_[2],
        behaviour=floats_[0],
        advantages=floats_[1],
        weights=floats_[2],
    )


def micro_batches(
    batch: TrainBatch, *, max_tokens: int, dtype: torch.dtype, device: torch.device, multiple: int = 1
) -> list[MicroBatch]:
    """The whole batch as micro-batches; `plan_rows` and `pack` in one."""
    rows = plan_rows(trained(batch.samples), max_tokens)
    return [pack(r, step=batch.step, dtype=dtype, device=device, multiple=multiple) for r in rows]
