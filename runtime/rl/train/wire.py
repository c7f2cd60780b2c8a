"""What the first rank of a trainer tells the others, as bytes: a JSON head and a safetensors body. No pickle."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from runtime.rl.types import SampleId, TrainBatch, TrainSample

Head = Mapping[str, Any]
_LENGTH = 8  # bytes of the head's length, little-endian


def encode(head: Head, body: Mapping[str, Tensor] | None = None) -> bytes:
    """One message."""
    text = json.dumps(head).encode()
    return len(text).to_bytes(_LENGTH, "little") + text + (save(dict(body)) if body else b"")


def decode(message: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Head and body of a message."""
    end = _LENGTH + int.from_bytes(message[:_LENGTH], "little")
    head: dict[str, Any] = json.loads(message[_LENGTH:end])
    return head, load(message[end:]) if len(message) > end else {}


def batch_message(batch: TrainBatch) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Head and body that say a whole batch; numbers keep every bit."""
    head = {
        "step": batch.step,
        "ids_hash": batch.ids_hash,
        "samples": [
            [*s.sample, len(s.prompt_tokens), len(s.tokens), s.reward, s.advantage, s.finish] for s in batch.samples
        ],
    }
    body = {
        "prompts": torch.tensor([t for s in batch.samples for t in s.prompt_tokens], dtype=torch.int64),
        "tokens": torch.tensor([t for s in batch.samples for t in s.tokens], dtype=torch.int64),
        "versions": torch.tensor([v for s in batch.samples for v in s.versions], dtype=torch.int64),
        "logprobs": torch.tensor([x for s in batch.samples for x in s.logprobs], dtype=torch.float64),
        "weights": torch.tensor([x for s in batch.samples for x in s.weights], dtype=torch.float64),
    }
    return head, body


def batch_of(head: Head, body: Mapping[str, Tensor]) -> TrainBatch:
    """The batch that `batch_message` said."""
    flat = {name: tensor.tolist() for name, tensor in body.items()}
    samples, prompt_at, at = [], 0, 0
    for group, member, prompts, tokens, reward, advantage, finish in head["samples"]:
        prompt, mine = slice(prompt_at, prompt_at + prompts), slice(at, at + tokens)
        samples.append(
            TrainSample(
                sample=SampleId(group, member),
                prompt_tokens=tuple(flat["prompts"][prompt]),
                tokens=tuple(flat["tokens"][mine]),
                logprobs=tuple(flat["logprobs"][mine]),
                versions=tuple(flat["versions"][mine]),
                weights=tuple(flat["weights"][mine]),
                reward=reward,
                advantage=advantage,
                finish=finish,
            )
        )
        prompt_at, at = prompt_at + prompts, at + tokens
    return TrainBatch(step=head["step"], ids_hash=head["ids_hash"], samples=tuple(samples))
