"""From a batch of samples to padded micro-batches of tensors.

A sample's sequence is prompt + response, padded on the right: under causal attention padding behind a token never reaches it,
so no attention mask is needed. Only trained tokens (weight > 0) are listed; masked ones still serve as context.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from planner.record import record
from runtime.rl.types import TrainBatch, TrainSample


@record
class MicroBatch:
    """B sequences of padded length T with N trained response tokens."""

    tokens: Tensor  # [B, T] int64
    rows: Tensor  # [N] row of the position whose logits predict the token
    columns: Tensor  # [N] its column: one before the token
    targets: Tensor  # [N] the sampled tokens
    behaviour: Tensor  # [N] their logprobs as the engine reported them
    advantages: Tensor  # [N]
    weights: Tensor  # [N] > 0
    ages: Tensor  # [N] int64: step - version


def order(batch: TrainBatch) -> list[TrainSample]:
    """The batch's samples by (length, sample): like lengths share a micro-batch, and the order is a function of the batch."""
    return sorted(batch.samples, key=lambda s: (len(s.prompt_tokens) + len(s.tokens), s.sample))


def micro_batches(
    batch: TrainBatch, *, max_tokens: int, dtype: torch.dtype, device: torch.device
) -> Iterator[MicroBatch]:
    """Cut the batch so that each piece holds at most `max_tokens` padded tokens (or a single longer sample).

    Samples without a trained token take no part. `dtype` is that of the per-token floats.
    """
    piece: list[TrainSample] = []
    for sample in order(batch):
        if not any(sample.weights):
            continue
        width = len(sample.prompt_tokens) + len(sample.tokens)  # the longest so far, by the order
        if piece and (len(piece) + 1) * width > max_tokens:
            yield _pack(piece, batch.step, dtype, device)
            piece = []
        piece.append(sample)
    if piece:
        yield _pack(piece, batch.step, dtype, device)


def _pack(samples: Sequence[TrainSample], step: int, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    sequences = [s.prompt_tokens + s.tokens for s in samples]
    width = max(len(s) for s in sequences)
    rows: list[int] = []
    columns: list[int] = []
    targets: list[int] = []
    behaviour: list[float] = []
    advantages: list[float] = []
    weights: list[float] = []
    ages: list[int] = []
    for row, s in enumerate(samples):
        offset = len(s.prompt_tokens) - 1
        kept = [j for j, w in enumerate(s.weights) if w > 0]
        rows += [row] * len(kept)
        columns += [offset + j for j in kept]
        targets += [s.tokens[j] for j in kept]
        behaviour += [s.logprobs[j] for j in kept]
        advantages += [s.advantage] * len(kept)
        weights += [s.weights[j] for j in kept]
        ages += [step - s.versions[j] for j in kept]
    floats = torch.tensor([behaviour, advantages, weights], dtype=dtype, device=device)
    whole = torch.tensor([rows, columns, targets, ages], dtype=torch.int64, device=device)
    padded = torch.tensor([s + (0,) * (width - len(s)) for s in sequences], dtype=torch.int64, device=device)
    return MicroBatch(
        tokens=padded,
        rows=whole[0],
        columns=whole[1],
        targets=whole[2],
        ages=whole[3],
        behaviour=floats[0],
        advantages=floats[1],
        weights=floats[2],
    )


def empty_micro_batch(*, dtype: torch.dtype, device: torch.device) -> MicroBatch:
    """One token and nothing to train: a rank without work of its own takes part in the others' gathers with it."""
    whole, floats = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, dtype=dtype, device=device)
    return MicroBatch(
        tokens=torch.zeros(1, 1, dtype=torch.int64, device=device),
        rows=whole,
        columns=whole,
        targets=whole,
        ages=whole,
        behaviour=floats,
        advantages=floats,
        weights=floats,
    )
