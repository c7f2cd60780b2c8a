"""Weights as a Hugging Face folder: config.json, model.safetensors and, for a Hugging Face tokenizer, its files.

    python -m runtime.rl.export --run-folder runs/<id> --out DIR

The command line starts this module as a child, so that it needs no torch itself.
"""

import argparse
import json
import shutil
import sys
import uuid
from pathlib import Path

from safetensors.torch import save_file

from planner.errors import HexError
from runtime.config.load import load_config
from runtime.config.schema import Config
from runtime.errors import ConfigError, RefusedError, RunError, WeightsError
from runtime.rl.model import Decoder, DecoderConfig, build_seeded
from runtime.rl.model import load_config as load_model_config
from runtime.rl.tokenizer import BUILTIN_CHARS
from runtime.rl.types import WeightsRef
from runtime.rl.weights import list_generations, read_generation

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def export_hf(ref: WeightsRef, model: DecoderConfig, tokenizer: Path | None, out: Path) -> Path:
    """Write generation `ref` of a model with shapes `model` into `out`, which must be empty or absent. Returns `out`.

    A plain Hugging Face model gives the same logits: a logit scale is folded into the output embedding. `tokenizer` is
    a folder whose tokenizer files are copied; None: the built-in vocabulary, which has none. Everything appears at once:
    an export that fails leaves `out` as it was.

    Raises RefusedError for a folder with something in it, WeightsError for weights that do not verify or do not fit.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RefusedError("not an empty folder", where=str(out), hint="name a new one; nothing is overwritten")
    config, state = _filled(ref, model).export_state()
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.parent / f".{out.name}-{uuid.uuid4().hex[:8]}"
    temporary.mkdir()
    try:
        tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})
        (temporary / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
        for name in TOKENIZER_FILES if tokenizer is not None else ():
            if tokenizer is not None and (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, temporary / name)
        temporary.rename(out)  # replaces an empty folder
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def export_run(run_folder: Path, out: Path) -> WeightsRef:
    """Export the newest generation of a run, going on or ended. Returns which it was.

    Raises ConfigError when the run's configuration does not load, RunError when nothing was published yet.
    """
    config = load_config(run_folder / "config.toml", check_files=False).config
    model = _shapes(config)
    refs = list_generations(run_folder / "weights")
    if not refs:
        raise RunError("no weights are published yet", where=str(run_folder / "weights"))
    try:
        export_hf(refs[-1], model, _tokenizer_folder(config), out)
    except WeightsError:
        # A run that goes on removes old generations; only a newer one is worth a second try.
        newer = list_generations(run_folder / "weights")
        if not newer or newer[-1] == refs[-1]:
            raise
        export_hf(newer[-1], model, _tokenizer_folder(config), out)
        return newer[-1]
    return refs[-1]


def main(argv: list[str] | None = None) -> int:
    """Entry point of the child: messages on stderr, the error's exit code."""
    parser = argparse.ArgumentParser(prog="python -m runtime.rl.export", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(argv)
    try:
        ref = export_run(given.run_folder, given.out)
    except HexError as e:
        print(f"error: {e}", file=sys.stderr)  # noqa: T201 - this is a command
        return int(getattr(e, "exit_code", 1))
    except OSError as e:
        print(f"error: {given.out}: cannot write the export, got {e.strerror!r}", file=sys.stderr)  # noqa: T201
        return 1
    print(f"version {ref.version} of lineage {ref.lineage} is in {given.out}", file=sys.stderr)  # noqa: T201
    return 0


def _filled(ref: WeightsRef, model: DecoderConfig) -> Decoder:
    """A decoder that holds the generation, in its dtype."""
    tensors = read_generation(ref)
    dtypes = {t.dtype for t in tensors.values()}
    if len(dtypes) != 1:
        raise WeightsError("the generation mixes dtypes", where=ref.path, got=sorted(map(str, dtypes)))
    decoder = build_seeded(model, 0, dtypes.pop())
    wanted = dict(decoder.named_parameters())
    for name in sorted(wanted.keys() ^ tensors.keys()):
        raise WeightsError("the generation is of another model", where=ref.path, got=name)
    for name, parameter in wanted.items():
        if parameter.shape != tensors[name].shape:
            got, expected = tuple(tensors[name].shape), str(tuple(parameter.shape))
            raise WeightsError(f"tensor {name} does not fit the model", where=ref.path, got=got, expected=expected)
        parameter.data.copy_(tensors[name])
    return decoder


def _shapes(config: Config) -> DecoderConfig:
    scale = config.model.scale_logits if config.model.source == "seeded" else None
    return load_model_config(config.model.path, scale_logits=scale)


def _tokenizer_folder(config: Config) -> Path | None:
    spec = config.model.tokenizer
    if spec == BUILTIN_CHARS:
        return None
    folder = Path(spec)  # absolute: the configuration is resolved
    if not folder.is_dir():
        raise ConfigError("tokenizer folder not found", where="model.tokenizer", got=str(folder))
    return folder


if __name__ == "__main__":
    raise SystemExit(main())
