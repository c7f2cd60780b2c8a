"""Models from a seed, and from and to folders of safetensors in the layout of Hugging Face."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from runtime.errors import ConfigError
from runtime.rl.model.config import DecoderConfig
from runtime.rl.model.decoder import Decoder

DTYPES: Mapping[str, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
}
MAKERS = 8  # threads that draw tensors; each holds one in float64
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


def load_config(path: Path, *, scale_logits: bool | None = None) -> DecoderConfig:
    """Read a config.json, or the one in folder `path`."""
    file = path / "config.json" if path.is_dir() else path
    return DecoderConfig.from_hf(_read_json(file), scale_logits=scale_logits, where=str(file))


def build_seeded(config: DecoderConfig, seed: int, dtype: torch.dtype) -> Decoder:
    """A decoder with normal weights of std `config.init_std`, each tensor from its own stream of (seed, name).

    Values are drawn in float64 and rounded, so models of two dtypes agree to rounding; no global generator is touched.
    Norm weights are one, biases zero, and projections into the residual are smaller by sqrt(2 * layers). Tensors are drawn beside
    each other, as one core takes half a minute for 1.5B parameters.
    """
    decoder = Decoder(config, dtype)
    residual = 1.0 / math.sqrt(2.0 * config.layers)

    @torch.no_grad()
    def fill(named: tuple[str, Tensor]) -> None:
        name, parameter = named
        if name.endswith("bias"):
            parameter.zero_()
        elif parameter.dim() == 1:
            parameter.fill_(1.0)
        else:
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            std = config.init_std * (residual if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64).mul_(std))

    with ThreadPoolExecutor(max_workers=min(MAKERS, len(os.sched_getaffinity(0)))) as pool:
        list(pool.map(fill, decoder.named_parameters()))
    return decoder


def load_pretrained(folder: Path, dtype: torch.dtype, *, scale_logits: bool | None = None) -> Decoder:
    """A decoder with the weights of `folder` (config.json and one or several safetensors files), cast to `dtype`.

    Raises ConfigError naming the file and the tensor for anything missing, unknown or of another shape.
    """
    config = load_config(folder, scale_logits=scale_logits)
    decoder = Decoder(config, dtype)
    wanted = dict(decoder.named_parameters())
    found: set[str] = set()
    for file in _weight_files(folder):
        found |= _copy_from(file, wanted, tied=config.tied)
    missing = sorted(wanted.keys() - found)
    if missing:
        raise ConfigError(f"{len(missing)} tensors are missing", where=str(folder), got=f"no {missing[0]}")
    return decoder


def save_pretrained(decoder: Decoder, folder: Path) -> None:
    """Write config.json (with hexctl's own keys) and model.safetensors; `load_pretrained` reads them back bit by bit."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = str(decoder.model.norm.weight.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(decoder.config.to_hf(dtype=dtype), indent=2) + "\n")
    tensors = {name: p.detach().cpu().contiguous() for name, p in decoder.named_parameters()}
    save_file(tensors, folder / _SINGLE, metadata={"format": "pt"})


def _copy_from(file: Path, wanted: Mapping[str, Tensor], *, tied: bool) -> set[str]:
    """Copy the tensors of one file into `wanted`; returns their names."""
    names: set[str] = set()
    try:
        with safe_open(file, framework="pt") as data, torch.no_grad():
            for name in data.keys():  # noqa: SIM118 - not a mapping
                if name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight"):
                    continue
                target = wanted.get(name)
                if target is None:
                    raise ConfigError("unknown tensor", where=str(file), got=name)
                tensor = data.get_tensor(name)
                if tensor.shape != target.shape:
                    raise ConfigError(
                        f"tensor {name} has another shape",
                        where=str(file),
                        got=tuple(tensor.shape),
                        expected=str(tuple(target.shape)),
                    )
                target.copy_(tensor)
                names.add(name)
    except (OSError, SafetensorError) as e:
        raise ConfigError("cannot read the weights", where=str(file), got=str(e)) from e
    return names


def _weight_files(folder: Path) -> Iterable[Path]:
    """The safetensors of a folder: those of the index when there is one, else the single file."""
    index = folder / _INDEX
    if index.exists():
        names = _read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(v, str) and Path(v).name == v for v in names.values()):
            raise ConfigError("weight_map is not a table of file names", where=str(index))
        return [folder / name for name in sorted(set(names.values()))]
    if not (folder / _SINGLE).exists():
        raise ConfigError(
            "no weights here", where=str(folder), expected=f"{_SINGLE} or {_INDEX}", hint="only safetensors are read"
        )
    return [folder / _SINGLE]


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text())
    except OSError as e:
        raise ConfigError("cannot read", where=str(file), got=e.strerror) from e
    except ValueError as e:
        raise ConfigError("not JSON", where=str(file), got=str(e)) from e
    if not isinstance(value, dict):
        raise ConfigError("not a JSON object", where=str(file))
    return value
