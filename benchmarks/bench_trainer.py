"""Tokens per second of hexctl's training step beside a plain Hugging Face step and the floor of the card, in one run.

    python -m benchmarks.bench_trainer                                    # on a GPU: 0.5B and 1.5B shapes at 2k and 8k
    python -m benchmarks.bench_trainer --ours auto attention=sdpa compile=off --shapes 0.5b --skip-hf
    python -m benchmarks.bench_trainer --shapes 7b --layers 8             # cut in depth, so that its optimiser fits
    python -m benchmarks.bench_trainer --shapes 0.5b --lengths 2048 --profile 25
    python -m benchmarks.bench_trainer --device cpu --dtype float32 --shapes tiny --lengths 32 --tokens 256 --in-process

A step is forward, backward and AdamW over `--tokens` tokens in samples of one length (`--mixed`: of 1/8 of it to all of it), all
response tokens trained, weights random. Ours is `TorchTrainer.train_step` whole, float32 masters and metrics included. The other is
`transformers` with bfloat16 weights and moments, its own attention (sdpa), logits of all positions, a policy loss on them;
its micro-batch is halved, then checkpointed, when memory runs out. The floor is the time of the products at the rate of a large
one on this card and of the optimiser's bytes at the rate of a large copy. Needs torch, transformers, numpy, pydantic, safetensors.
"""

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
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
LAST = "figures "  # begins a line of a child's stdout that holds figures
PROMPT_SHARE = 1 / 16  # of a sample's length


def model_config(shape: str, layers: int | None) -> dict[str, Any]:
    """The shape's config.json, cut to `layers` layers where that is given."""
    config = dict(TINY) if shape == "tiny" else json.loads((MODELS / f"{SHAPES.get(shape, shape)}.json").read_text())
    if layers:
        config["num_hidden_layers"] = layers
    return config


def sizes(length: int, given: argparse.Namespace) -> list[int]:
    """Lengths of a step's samples; the same for all who are measured."""
    rng = random.Random(length)
    out: list[int] = []
    while not out or sum(out) < given.tokens:
        out.append(rng.randint(max(4, length // 8), length) if given.mixed else length)
    return out


def _sync(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(step: Callable[[int], Any], device: Any, given: argparse.Namespace) -> list[float]:
    """Seconds of the steps after `--warm-up` ones."""
    spent: list[float] = []
    for i in range(given.warm_up + given.steps):
        _sync(device)
        began = time.perf_counter()
        step(i)
        _sync(device)
        if i >= given.warm_up:
            spent.append(time.perf_counter() - began)
    return spent


def _peak_bytes(device: Any) -> int:
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _fresh(device: Any) -> None:
    """Memory given back and its peak forgotten."""
    import torch

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _batch(step: int, lengths: list[int], vocab: int) -> Any:
    """A global batch; logprobs near those of random weights, so that no importance weight is out of the way."""
    import math

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


def ours(shape: str, length: int, given: argparse.Namespace, variant: str) -> dict[str, Any]:
    """Our trainer, with the options that `variant` names ("auto" or key=value,...)."""
    import torch

    from runtime.config.schema import AlgorithmSection, TrainerSection
    from runtime.rl.model import DTYPES, Decoder, DecoderConfig
    from runtime.rl.train.trainer import TorchTrainer

    options = dict(part.split("=", 1) for part in variant.split(",") if "=" in part)
    micro = options.pop("micro_batch_tokens", None) or given.micro_tokens
    algorithm = AlgorithmSection(**({"micro_batch_tokens": int(micro)} if micro else {}), learning_rate=1e-6)
    device = torch.device(given.device)
    _fresh(device)
    config = DecoderConfig.from_hf(model_config(shape, given.layers))
    with device:
        model = Decoder(config, DTYPES[given.dtype])
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0.0, 0.02) if p.ndim > 1 else p.fill_(1.0)
    lengths = sizes(length, given)
    with tempfile.TemporaryDirectory(prefix="bench-trainer-") as folder:
        trainer = TorchTrainer(
            model,
            algorithm=algorithm,
            compute=TrainerSection.model_validate(options),
            temperature=1.0,
            checkpoints=Path(folder) / "checkpoints",
            weights=Path(folder) / "weights",
            device=device,
        )
        batches = [_batch(i, lengths, config.vocab) for i in range(given.warm_up + given.steps + 1)]
        losses: list[float] = []
        began = time.perf_counter()
        seconds = _timed(lambda i: losses.append(trainer.train_step(batches[i])["loss"]), device, given)
        whole_s = time.perf_counter() - began
        facts = trainer._gradients.facts
        if given.profile:
            _profile(lambda: trainer.train_step(batches[-1]), device, given.profile)
    extra = {"facts": facts, "loss": losses[-1], "first_s": whole_s - sum(seconds)}
    return {"seconds": seconds, "tokens": sum(lengths), "peak_bytes": _peak_bytes(device), **extra}


def _profile(step: Callable[[], Any], device: Any, rows: int) -> None:
    """Kernels of one step by the time they take, printed."""
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if gpu else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        step()
        _sync(device)
    order = "self_cuda_time_total" if gpu else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=70), flush=True)


def hugging_face(shape: str, length: int, given: argparse.Namespace, variant: str) -> dict[str, Any]:
    """The plain step. Micro-batches are halved on want of memory, and at one sample activations are checkpointed."""
    import torch

    del variant
    lengths = sorted(sizes(length, given), reverse=True)
    micro, checkpointing = given.hf_micro_tokens, False
    while True:
        try:
            return _hugging_face(shape, lengths, given, micro=micro, checkpointing=checkpointing)
        except torch.OutOfMemoryError:
            if micro <= max(lengths) and checkpointing:
                raise
            micro, checkpointing = (micro // 2, False) if micro > max(lengths) else (micro, True)
        _fresh(torch.device(given.device))


def _hugging_face(
    shape: str, lengths: list[int], given: argparse.Namespace, *, micro: int, checkpointing: bool
) -> dict[str, Any]:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from runtime.rl.model import DTYPES

    device, dtype = torch.device(given.device), DTYPES[given.dtype]
    _fresh(device)
    raw = {k: v for k, v in model_config(shape, given.layers).items() if k not in ("model_type", "architectures")}
    config = Qwen2Config(**{**raw, "max_position_embeddings": 32768}, attn_implementation="sdpa", use_cache=False)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6)
    groups: list[list[int]] = []
    for n in lengths:  # longest first: the first of a group is its width
        if groups and (len(groups[-1]) + 1) * groups[-1][0] <= micro:
            groups[-1].append(n)
        else:
            groups.append([n])
    pieces = []
    for group in groups:
        at = torch.arange(group[0], device=device)
        ends = torch.tensor(group, device=device)[:, None]
        tokens = torch.randint(4, config.vocab_size, (len(group), group[0]), device=device)
        pieces.append((tokens, (at < ends).to(dtype), torch.randn(len(group), 1, device=device)))
    count = sum(lengths)

    def step(i: int) -> None:
        del i
        for tokens, mask, advantages in pieces:
            # Padding is on the right and the loss leaves it out, so causal attention needs no mask.
            logits = model(input_ids=tokens).logits[:, :-1].float()
            logp = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
            ratio = torch.exp(logp - logp.detach())
            plain, bounded = ratio * advantages, ratio.clamp(0.8, 1.28) * advantages
            loss = -(torch.minimum(plain, bounded) * mask[:, 1:]).sum() / count
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)

    seconds = _timed(step, device, given)
    if given.profile:
        _profile(lambda: step(0), device, given.profile)
    facts = {"attention": "sdpa", "compile": "off", "micro_tokens": str(micro), "checkpointing": str(checkpointing)}
    return {"seconds": seconds, "tokens": count, "peak_bytes": _peak_bytes(device), "facts": facts}


def card(given: argparse.Namespace) -> dict[str, float]:
    """Rates of a large product and a large copy on this device, in what a step computes in."""
    import torch

    from runtime.rl.model import DTYPES

    device, dtype = torch.device(given.device), DTYPES[given.dtype]
    gpu = device.type == "cuda"
    n, size = (8192, 2**30) if gpu else (512, 2**24)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source, target = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))

    def rate(work: Callable[[], Any], amount: float) -> float:
        for _ in range(3):
            work()
        spent = []
        for _ in range(5):
            _sync(device)
            began = time.perf_counter()
            for _ in range(8):
                work()
            _sync(device)
            spent.append((time.perf_counter() - began) / 8)
        return amount / statistics.median(spent)

    found = {"matmul_flops": rate(lambda: a @ b, 2.0 * n**3)}
    found["copy_bytes"] = rate(lambda: target.copy_(source), 2.0 * size)
    return found


def floor_s(shape: str, length: int, given: argparse.Namespace, rates: dict[str, float]) -> tuple[float, float]:
    """(FLOPs of a step, its least seconds): forward and backward once, the vocabulary for trained tokens only, and each
    parameter's state moved once."""
    from planner.cost.flops import head_flops, layer_flops
    from planner.cost.memory import state_bytes_per_param
    from planner.model import from_hf_config

    model = from_hf_config(model_config(shape, given.layers), name=shape)
    lengths = sizes(length, given)
    trained = sum(n - max(1, int(n * PROMPT_SHARE)) for n in lengths)
    forward = model.layers * layer_flops(model, sum(lengths), sum(n * n for n in lengths)) + head_flops(model, trained)
    moved = 2 * model.params * state_bytes_per_param(model)
    return 3 * forward, 3 * forward / rates["matmul_flops"] + moved / rates["copy_bytes"]


WAYS: dict[str, Callable[[str, int, argparse.Namespace, str], dict[str, Any]]] = {"ours": ours, "hf": hugging_face}


def measure(given: argparse.Namespace) -> dict[str, float]:
    """Every row, printed as it comes; keys of the figures end in their unit."""
    rates = card(given) if given.in_process else _child("card", "auto", given.shapes[0], given)[0]
    if "error" in rates:
        raise SystemExit(f"the card's rates could not be measured: {rates['error']}")
    peak = _peak_flops(given)
    print(
        f"{_device_name(given)}: product {rates['matmul_flops'] / 1e12:,.2f} TFLOP/s, copy {rates['copy_bytes'] / 1e9:,.0f} GB/s"
    )
    print(
        f"{'shape':6} {'length':>6} {'what':34} {'tokens/s':>10} {'to hf':>6} {'MFU':>6} {'floor':>6} {'peak GB':>8} {'step s':>8}  how",
        flush=True,
    )
    figures: dict[str, float] = dict(rates)
    for shape in given.shapes:
        found: dict[int, dict[str, float]] = {}
        rows = ([] if given.skip_hf else [("hf", "auto")]) + [("ours", v) for v in given.ours]
        for way, variant in rows:
            label = way if way == "hf" else f"ours {variant}"
            for done in _run(way, variant, shape, given):
                _report(shape, label, done, given, rates, peak, found, figures)
    return figures


def _report(  # noqa: PLR0917 - one row of the table
    shape: str,
    label: str,
    done: dict[str, Any],
    given: argparse.Namespace,
    rates: dict[str, float],
    peak: float | None,
    found: dict[int, dict[str, float]],
    figures: dict[str, float],
) -> None:
    """Print one row and keep its figures."""
    length = done["length"]
    name = f"{shape}{f' x{given.layers}' if given.layers else ''}"
    if "error" in done:
        print(f"{name:6} {length:>6} {label:34} failed: {done['error']}", flush=True)
        return
    flops, least_s = floor_s(shape, length, given, rates)
    step_s = statistics.median(done["seconds"])
    rate = done["tokens"] / step_s
    found.setdefault(length, {})[label] = rate
    hf = found[length].get("hf")
    to_hf = f"{rate / hf:6.2f}" if hf else f"{'-':>6}"
    used = f"{flops / step_s / peak:6.1%}" if peak else f"{'-':>6}"
    facts = " ".join(f"{k}={v}" for k, v in done["facts"].items())
    spread = f"{min(done['seconds']):.3f}-{max(done['seconds']):.3f}"
    print(
        f"{name:6} {length:>6} {label:34} {rate:10,.0f} {to_hf} {used} {least_s / step_s:6.1%} {done['peak_bytes'] / 1e9:8.1f} "
        f"{step_s:8.3f}  ({spread}; first {done.get('first_s', 0):.0f} s) {facts}",
        flush=True,
    )
    key = f"{shape}_{length}_{label.replace(' ', '_')}"
    figures[f"{key}_tokens_per_s"] = rate
    figures[f"{key}_peak_bytes"] = float(done["peak_bytes"])
    figures[f"{key}_floor_share"] = least_s / step_s
    if hf:
        figures[f"{key}_to_hf"] = rate / hf
    if peak:
        figures[f"{key}_mfu"] = flops / step_s / peak


def _run(way: str, variant: str, shape: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    return _all_lengths(way, variant, shape, given) if given.in_process else _child(way, variant, shape, given)


def _all_lengths(way: str, variant: str, shape: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Figures of every length; what fails is a row with its error."""
    import torch

    out: list[dict[str, Any]] = []
    for length in given.lengths:
        try:
            torch._dynamo.reset() if given.device == "cuda" else None
            out.append({"length": length, **WAYS[way](shape, length, given, variant)})
        except Exception as e:  # noqa: BLE001 - one variant must not end the table
            words = [line for line in str(e).strip().splitlines() if line.strip()] or [""]
            out.append({"length": length, "error": f"{type(e).__name__}: {' | '.join(words[:3])[:300]}"})
            import traceback

            traceback.print_exc()
    return out


def _child(way: str, variant: str, shape: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One shape and variant in a process of its own: a crash or leftover memory is its own."""
    command = [sys.executable, "-m", "benchmarks.bench_trainer", "--one", way, "--ours", variant, "--shapes", shape]
    for name in ("device", "dtype", "tokens", "steps", "warm_up", "hf_micro_tokens", "profile"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    for name in ("layers", "micro_tokens"):
        if getattr(given, name):
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    command += ["--mixed"] if given.mixed else []
    command += ["--lengths", *map(str, given.lengths)]
    failed = [{"length": n, "error": "the process ended early"} for n in given.lengths]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=given.deadline, check=False)
    except subprocess.TimeoutExpired:
        return [{**f, "error": f"not done after {given.deadline:.0f} s"} for f in failed]
    lines = done.stdout.splitlines()
    print(
        "\n".join(line for line in lines if not line.startswith(LAST) and line.strip()),
        end="\n" if given.profile else "",
    )
    found = [json.loads(line.removeprefix(LAST)) for line in lines if line.startswith(LAST)]
    return found[0] if found else failed


def _device_name(given: argparse.Namespace) -> str:
    import torch

    return torch.cuda.get_device_name() if given.device == "cuda" else "CPU"


def _peak_flops(given: argparse.Namespace) -> float | None:
    """The data sheet's figure, where the planner's catalogue has the card."""
    from planner.catalogue import device_kind

    kind = next((k for k in ("H200", "H100") if given.device == "cuda" and k in _device_name(given)), None)
    return device_kind(kind).peak_flops if kind and given.dtype == "bfloat16" else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_trainer", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--shapes", nargs="+", default=["0.5b", "1.5b"], help="0.5b, 1.5b, 7b, tiny, or a file of configs/models"
    )
    parser.add_argument("--lengths", nargs="+", type=int, default=[2048, 8192], help="tokens of a sample")
    parser.add_argument("--ours", nargs="+", default=["auto"], help="variants: auto, or key=value,... of [trainer]; "
                        "micro_batch_tokens=N too")  # fmt: skip
    parser.add_argument("--tokens", type=int, default=131072, help="of a step, at least")
    parser.add_argument("--mixed", action="store_true", help="lengths from 1/8 of --lengths to all of it")
    parser.add_argument("--micro-tokens", type=int, help="most tokens of our rows; default: the configuration's")
    parser.add_argument("--hf-micro-tokens", type=int, default=16384, help="of the plain step, to begin with")
    parser.add_argument("--layers", type=int, help="cut models to so many layers")
    parser.add_argument("--steps", type=int, default=4, help="steps counted")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--skip-hf", action="store_true", help="ours alone")
    parser.add_argument("--profile", type=int, default=0, help="also print so many kernels of a step")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--deadline", type=float, default=300.0, help="seconds for one shape and variant")
    parser.add_argument("--in-process", action="store_true", help="no processes of their own")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", choices=["card", *WAYS], help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, or be one of the measured."""
    given = _parser().parse_args(argv)
    if given.one:
        done = [card(given)] if given.one == "card" else _all_lengths(given.one, given.ours[0], given.shapes[0], given)
        print("\n" + LAST + json.dumps(done), flush=True)
        return 0
    figures = measure(given)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def run() -> dict[str, float]:
    """A small case for `python -m benchmarks`: a tiny shape on a CPU."""
    small = ["--device", "cpu", "--dtype", "float32", "--shapes", "tiny", "--lengths", "128", "--tokens", "2048"]
    return measure(_parser().parse_args([*small, "--in-process", "--mixed"]))


if __name__ == "__main__":
    sys.exit(main())
