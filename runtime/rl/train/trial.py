"""Whether torch.compile works on every rank, found out before the ranks depend on each other.

A rank whose compiler fails begins its batch anew without it. In a gang its collectives would then meet other ones of the other
ranks, of the same sizes, and gradients would be wrong without a word. So each rank tries a model of one layer for itself, and all
compile or none does.
"""

import logging

import torch

from planner.record import replace
from runtime.config.schema import TrainerSection
from runtime.rl.model import DecoderConfig, build_seeded
from runtime.rl.train.gang import Gang
from runtime.rl.train.gradients import GradientComputer
from runtime.rl.train.loss import Objective
from runtime.rl.types import SampleId, TrainSample

TRIAL_VOCAB = 1024
TRIAL_LENGTHS = (48, 65)  # two lengths: the second makes the compiler allow for any
_log = logging.getLogger(__name__)


def agree_on_compiling(
    config: DecoderConfig, dtype: torch.dtype, gang: Gang, options: TrainerSection | None
) -> TrainerSection:
    """The options with `compile` "on" or "off", the same at every rank. All ranks call it together."""
    options = options or TrainerSection()
    wanted = options.compile == "on" or (options.compile == "auto" and gang.device.type == "cuda")
    works = wanted and _compiles(config, dtype, gang.device, options)
    if wanted and gang.total((float(works),))[0] < gang.world:
        _log.warning("torch.compile fails on a rank; none compiles")
        works = False
    return options.model_copy(update={"compile": "on" if works else "off"})


def _compiles(config: DecoderConfig, dtype: torch.dtype, device: torch.device, options: TrainerSection) -> bool:
    small = replace(config, layers=1, vocab=min(config.vocab, TRIAL_VOCAB))
    model = build_seeded(small, 0, dtype).to(device)
    computer = GradientComputer(
        model,
        config=small,
        objective=Objective(),
        temperature=1.0,
        micro_batch_tokens=max(TRIAL_LENGTHS),
        masters=dict(model.named_parameters()),
        options=options,
        device=device,
    )
    samples = [_sample(i, length) for i, length in enumerate(TRIAL_LENGTHS)]
    computer.compute(samples, step=0, denominator=1.0)
    return computer.facts["compile"].startswith("on")


def _sample(number: int, length: int) -> TrainSample:
    made = length - 1
    return TrainSample(
        sample=SampleId(number, 0),
        prompt_tokens=(1,),
        tokens=tuple(i % 7 for i in range(made)),
        logprobs=(-2.0,) * made,
        versions=(0,) * made,
        weights=(1.0,) * made,
        reward=0.0,
        advantage=1.0,
        finish="eos",
    )
