"""What the trainer's benchmark gives its trainers to do: shapes, lengths and batches, the same for all who are measured."""

import argparse
import gc
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
SHAPES = {"0.5b": "qwen2.5-0.5b", "1.5b": "r1-distill-qwen-1.5b", "7b": "qwen2.5-7b"}
TINY = {
    "model_type": "qwen2",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "tie_word_embeddings": True,
}
PROMPT_SHARE = 1 / 16  # of a sample's length
SEED = 20  # of the weights, at every rank


def model_config(shape: str, layers: int | None) -> dict[str, Any]:
    """The shape's config.json, cut to `layers` layers where that is given."""
    config = dict(TINY) if shape == "tiny" else json.loads((MODELS / f"{SHAPES.get(shape, shape)}.json").read_text())
    if layers:
        config["num_hidden_layers"] = layers
    return config


def sizes(length: int, given: argparse.Namespace) -> list[int]:
    """Lengths of a step's samples."""
    rng = random.Random(length)
    out: list[int] = []
    while not out or sum(out) < given.tokens:
        out.append(rng.randint(max(4, length // 8), length) if given.mixed else length)
    return out


def batch(step: int, lengths: list[int], vocab: int) -> Any:
    """A global batch; logprobs near those of random weights, so that no importance weight is out of the way."""
    import numpy as np

    from runtime.rl.types import SampleId, TrainBatch, TrainSample

    rng = np.random.default_rng(step)
    samples = []
    for i, n in enumerate(lengths):
        prompt = max(1, int(n * PROMPT_SHARE))
        tokens = rng.integers(4, vocab, n).tolist()
        size = n - prompt
        samples.append(
            TrainSample(
                sample=SampleId(i // 8, i % 8),
                prompt_tokens=tuple(tokens[:prompt]),
                tokens=tuple(tokens[prompt:]),
                logprobs=(-math.log(vocab),) * size,
                versions=(step,) * size,
                weights=(1.0,) * size,
                reward=float(i % 2),
                advantage=1.0 if i % 2 else -1.0,
                finish="length",
            )
        )
    return TrainBatch(step=step, ids_hash=f"bench-{step}", samples=tuple(samples))


def sync(device: Any) -> None:
    """Wait for all work of the device."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(step: Callable[[int], Any], device: Any, given: argparse.Namespace) -> list[float]:
    """Seconds of the steps after `--warm-up` ones."""
    spent: list[float] = []
    for i in range(given.warm_up + given.steps):
        sync(device)
        began = time.perf_counter()
        step(i)
        sync(device)
        if i >= given.warm_up:
            spent.append(time.perf_counter() - began)
    return spent


def peak_bytes(device: Any) -> int:
    """Most memory that tensors took since `fresh`; 0 on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def fresh(device: Any) -> None:
    """Memory given back and its peak forgotten."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def print_kernels(step: Callable[[], Any], device: Any, rows: int) -> None:
    """Kernels of one step by the time they take."""
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        step()
        sync(device)
    order = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=70), flush=True)
