"""The direct path of a run's configuration. Importing this module imports torch."""

from pathlib import Path

import torch

from runtime.config.schema import Config
from runtime.rl.weights.publisher import DirectPublisher
from runtime.rl.weights.sender import WeightsSender


def open_direct(
    config: Config, root: Path, *, device: str, device_kind: str, epoch: int, host: str, one_card: bool = False
) -> DirectPublisher | None:
    """A publisher for rank 0 of a trainer on `device`, serving on `host`; None where weights go by disk alone. `one_card`: as for
    `WeightsSender`."""
    weights = config.weights
    if weights.path == "store" or (weights.path == "auto" and not device.startswith("cuda")):
        return None
    sender = WeightsSender(
        host=host,
        trainer_epoch=epoch,
        device=torch.device(device),
        bucket_bytes=int(weights.bucket),
        deadline_s=weights.deadline,
        one_kind=weights.path == "auto",
        kind=device_kind,
        one_card=one_card,
    )
    return DirectPublisher(root, sender, bucket_bytes=int(weights.bucket), full_every=weights.full_every)
