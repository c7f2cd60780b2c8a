"""New weights for an engine that is measured, on the way that the run's take: straight from a sender, or by disk."""

import contextlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path

import torch

from runtime.config.schema import Config
from runtime.profile.steady import Make, Publishing, Steady
from runtime.rl.model import DTYPES
from runtime.rl.types import WeightsRef
from runtime.rl.weights import GenerationWriter, collect
from runtime.rl.weights.layout import TensorSpec, spec_of
from runtime.rl.weights.sender import WeightsSender

LEAST_UPDATES = 3
LEAST_STEPS = 8  # from one update to the next
MOST_SHARE = 0.25  # of a bench's seconds from one update to the next, however long the run's steps are
DEADLINE_S = 20.0  # of a transfer


class Weights:
    """A model's weights in the rollout's dtype on one device: `WeightsSource`. Every version has the same."""

    lineage = 0

    def __init__(self, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.tensors, self.dtype, self.version = tensors, dtype, 0

    def weight_specs(self) -> list[TensorSpec]:
        """Of `full_weights`, in its order."""
        return [spec_of(n, t) for n, t in self.tensors.items()]

    def full_weights(self) -> Generator[tuple[str, torch.Tensor], None, None]:
        """Every tensor."""
        yield from self.tensors.items()


def weights_of(config: Config, device: torch.device) -> Weights:
    """The run's first weights."""
    from runtime.rl.train.factory import build_model

    dtype = DTYPES[config.model.rollout_dtype or config.model.dtype]
    tensors = {n: p.detach().to(device=device, dtype=dtype) for n, p in build_model(config).named_parameters()}
    return Weights(tensors, dtype)


def period_tokens(config: Config, plain: Steady, seconds: float) -> float:
    """Tokens that the engine decodes from one update to the next: those of a step of the run, or of a share of a bench of `seconds`
    if they are fewer; and never so few that what is computed anew is not over."""
    samples = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    tokens = samples * max(2.0, config.lengths.response_mean)
    return max(LEAST_STEPS * plain.running, min(tokens, MOST_SHARE * seconds * plain.running / plain.step_s))


@contextlib.contextmanager
def published(
    config: Config,
    source: Weights,
    first: WeightsRef,
    root: Path,
    plain: Steady,
    *,
    seconds: float,
    one_card: bool = False,
) -> Iterator[Publishing]:
    """Generations after `first`, one a period, for as long as the context lasts: straight to the engine where the run's would go
    so; `failed` says why they ended early. `one_card`: the engine's GPU is that of `source`."""
    tokens = period_tokens(config, plain, seconds)
    way, device = config.weights.path, next(iter(source.tensors.values())).device
    sender: WeightsSender | None = None
    if way == "store" or (way == "auto" and device.type != "cuda"):
        weights = Publishing(first, _to_disk(config, source, root), period_tokens=tokens)
    else:
        sender = WeightsSender(
            host="127.0.0.1",
            trainer_epoch=1,
            device=device,
            bucket_bytes=int(config.weights.bucket),
            deadline_s=DEADLINE_S,
            one_card=one_card,
        )
        weights = Publishing(first, _straight(sender, source), period_tokens=tokens, channel=sender.offer)
    try:
        yield weights
    finally:
        weights.close()
        if sender is not None:
            sender.close()


def _straight(sender: WeightsSender, source: Weights) -> Make:
    def make(version: int) -> WeightsRef | None:
        source.version = version
        sent = sender.transfer(source)
        return None if sent is None else WeightsRef(lineage=0, version=version, path="", digest=sent.digest)

    return make


def _to_disk(config: Config, source: Weights, root: Path) -> Make:
    store = GenerationWriter(root, full_every=config.weights.full_every)

    def make(version: int) -> WeightsRef:
        ref = store.write(source.tensors, lineage=0, version=version, dtype=source.dtype)
        collect(root, version - 2)
        return ref

    return make
