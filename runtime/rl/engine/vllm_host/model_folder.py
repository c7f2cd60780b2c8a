"""The model as vLLM wants to be told of it: a folder with a config.json and no weights; and the tensors it must be given."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from runtime.rl.model import Decoder, DecoderConfig


def write_folder(folder: str, model: Mapping[str, Any], *, dtype: str) -> None:
    """Write the config.json of a decoded one, with the architecture's name and the rollout's dtype."""
    config = DecoderConfig.from_hf(model).to_hf(dtype=dtype)
    config["torch_dtype"] = dtype  # the older name of the same key
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True))


def expected_shapes(model: Mapping[str, Any]) -> list[tuple[str, list[int]]]:
    """Names and shapes of a generation's tensors."""
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_hf(model), torch.float32)
    return [(name, list(parameter.shape)) for name, parameter in decoder.named_parameters()]
