"""The trainer of a run's configuration. Importing this module imports torch."""

import torch

from runtime.config.schema import Config
from runtime.errors import ConfigError
from runtime.paths import RunPaths
from runtime.rl.model import DTYPES, Decoder, build_seeded, load_config, load_pretrained
from runtime.rl.train.gang import Gang
from runtime.rl.train.trainer import TorchTrainer


def build_trainer(
    config: Config, paths: RunPaths, *, device: torch.device | str = "cpu", gang: Gang | None = None
) -> TorchTrainer:
    """A trainer at version 0, or this process's rank of one. Paths of `config` must be resolved.

    Raises ConfigError for a model that cannot be trained here (planning shapes, missing files).
    """
    model = config.model
    return TorchTrainer(
        build_model(config),
        algorithm=config.algorithm,
        compute=config.trainer,
        temperature=config.sampling.temperature,
        checkpoints=paths.checkpoints,
        weights=paths.weights,
        rollout_dtype=DTYPES[model.rollout_dtype] if model.rollout_dtype is not None else None,
        full_every=config.weights.full_every,
        device=device,
        seed=config.run.seed,
        gang=gang,
    )


def build_model(config: Config) -> Decoder:
    """The model of version 0: random weights of the run's seed, or those of the folder."""
    model = config.model
    dtype = DTYPES[model.dtype]
    if model.source == "seeded":
        return build_seeded(load_config(model.path, scale_logits=model.scale_logits), config.run.seed, dtype)
    if model.source == "pretrained":
        return load_pretrained(model.path, dtype)
    raise ConfigError(
        'model.source = "shape" is for planning only',
        where=str(model.path),
        hint='use "seeded" or "pretrained" to train',
    )
