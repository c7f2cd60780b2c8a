"""Tokens per second of hexctl's training step beside a plain Hugging Face step and the floor of the card, in one run.

    python -m benchmarks.bench_trainer                                    # on a GPU: 0.5B and 1.5B shapes at 2k and 8k
    python -m benchmarks.bench_trainer --ours auto attention=sdpa compile=off --shapes 0.5b --skip-hf
    python -m benchmarks.bench_trainer --shapes 7b --layers 8             # cut in depth, so that its optimiser fits
    python -m benchmarks.bench_trainer --shapes 1.5b 7b --ranks 2         # both sides over FSDP2 on two GPUs
    python -m benchmarks.bench_trainer --shapes 0.5b --lengths 2048 --profile 25
    python -m benchmarks.bench_trainer --device cpu --dtype float32 --shapes tiny --lengths 32 --tokens 256 --in-process

A step is forward, backward and AdamW over `--tokens` tokens in samples of one length (`--mixed`: of 1/8 of it to all of it), all
response tokens trained, weights random. Ours is `TorchTrainer.train_step` whole, float32 masters and metrics included. The other is
`transformers` with bfloat16 weights and moments, its own attention (sdpa), logits of all positions, a policy loss on them;
its micro-batch is halved, then checkpointed, when memory runs out. The floor is the time of the products at the rate of a large
one on this card and of the optimiser's bytes at the rate of a large copy, shared by the ranks. Needs torch, transformers, numpy,
pydantic, safetensors.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.plain_step import plain
from benchmarks.trainer_work import (
    PROMPT_SHARE,
    SEED,
    batch,
    fresh,
    model_config,
    peak_bytes,
    print_kernels,
    sizes,
    sync,
    timed,
)

LAST = "figures "  # begins a line of a child's stdout that holds figures


def ours(shape: str, length: int, given: argparse.Namespace, variant: str, gang: Any = None) -> dict[str, Any]:
    """Our trainer, with the options that `variant` names ("auto" or key=value,...); one rank of it where there is a gang."""
    import torch

    from runtime.config.schema import AlgorithmSection, TrainerSection
    from runtime.rl.model import DTYPES, Decoder, DecoderConfig
    from runtime.rl.train.trainer import TorchTrainer

    options = dict(part.split("=", 1) for part in variant.split(",") if "=" in part)
    micro = options.pop("micro_batch_tokens", None) or given.micro_tokens
    algorithm = AlgorithmSection(**({"micro_batch_tokens": int(micro)} if micro else {}), learning_rate=1e-6)
    device = torch.device(given.device) if gang is None else gang.device
    fresh(device)
    config = DecoderConfig.from_hf(model_config(shape, given.layers))
    torch.manual_seed(SEED)  # every rank makes the same weights
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
            gang=gang,
        )
        batches = [batch(i, lengths, config.vocab) for i in range(given.warm_up + given.steps + 1)]
        losses: list[float] = []
        began = time.perf_counter()
        seconds = timed(lambda i: losses.append(trainer.train_step(batches[i])["loss"]), device, given)
        whole_s = time.perf_counter() - began
        facts = trainer._gradients.facts
        if given.profile:
            print_kernels(lambda: trainer.train_step(batches[-1]), device, given.profile)
    extra = {"facts": facts, "loss": losses[-1], "first_s": whole_s - sum(seconds)}
    return {"seconds": seconds, "tokens": sum(lengths), "peak_bytes": peak_bytes(device), **extra}


def hugging_face(shape: str, length: int, given: argparse.Namespace, variant: str, gang: Any = None) -> dict[str, Any]:
    """The plain step."""
    del variant
    return plain(shape, length, given, gang)


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
            sync(device)
            began = time.perf_counter()
            for _ in range(8):
                work()
            sync(device)
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


WAYS: dict[str, Callable[[str, int, argparse.Namespace, str, Any], dict[str, Any]]] = {"ours": ours, "hf": hugging_face}


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
    flops, least_s = (x / given.ranks for x in floor_s(shape, length, given, rates))  # of one rank's part
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


def _all_lengths(
    way: str, variant: str, shape: str, given: argparse.Namespace, gang: Any = None
) -> list[dict[str, Any]]:
    """Figures of every length; what fails is a row with its error."""
    import torch

    out: list[dict[str, Any]] = []
    for length in given.lengths:
        try:
            torch._dynamo.reset() if given.device == "cuda" else None
            out.append({"length": length, **WAYS[way](shape, length, given, variant, gang)})
        except Exception as e:  # noqa: BLE001 - one variant must not end the table
            words = [line for line in str(e).strip().splitlines() if line.strip()] or [""]
            out.append({"length": length, "error": f"{type(e).__name__}: {' | '.join(words[:3])[:300]}"})
            import traceback

            traceback.print_exc()
    return out


def _child(way: str, variant: str, shape: str, given: argparse.Namespace) -> list[dict[str, Any]]:
    """One shape and variant in processes of their own, one a rank: a crash or leftover memory is its own."""
    command = [sys.executable, "-m", "benchmarks.bench_trainer", "--one", way, "--ours", variant, "--shapes", shape]
    for name in ("device", "dtype", "tokens", "steps", "warm_up", "hf_micro_tokens", "profile", "ranks"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    for name in ("layers", "micro_tokens"):
        if getattr(given, name):
            command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    command += ["--mixed"] if given.mixed else []
    command += ["--hf-checkpointing"] if given.hf_checkpointing else []
    command += ["--lengths", *map(str, given.lengths)]
    failed = [{"length": n, "error": "the process ended early"} for n in given.lengths]
    with tempfile.TemporaryDirectory(prefix="bench-ranks-") as folder:
        several = given.ranks > 1 and way in WAYS
        others = []
        if several:
            command += ["--meeting", str(Path(folder) / "meeting.json")]
            others = [
                subprocess.Popen([*command, "--rank", str(r)], env=_environment(r), stdout=subprocess.DEVNULL)
                for r in range(1, given.ranks)
            ]
        try:
            done = subprocess.run(
                [*command, "--rank", "0"],
                env=_environment(0) if several else None,
                stdout=subprocess.PIPE,
                text=True,
                timeout=given.deadline,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return [{**f, "error": f"not done after {given.deadline:.0f} s"} for f in failed]
        finally:
            for process in others:
                process.kill() if process.poll() is None else None
                process.wait()
    lines = done.stdout.splitlines()
    print(
        "\n".join(line for line in lines if not line.startswith(LAST) and line.strip()),
        end="\n" if given.profile else "",
    )
    found = [json.loads(line.removeprefix(LAST)) for line in lines if line.startswith(LAST)]
    return found[0] if found else failed


def _environment(rank: int) -> dict[str, str]:
    """Each rank sees the one GPU it has."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return os.environ | {"CUDA_VISIBLE_DEVICES": seen.split(",")[rank] if seen else str(rank)}


def _gang(given: argparse.Namespace) -> Any:
    """This rank's gang; None where there is one rank only."""
    if given.meeting is None:
        return None
    import torch

    from runtime.rl.train.gang import Gang, GangSpec
    from runtime.rl.train.meeting import Meeting

    shares = (1 / given.ranks,) * given.ranks
    device = torch.device("cuda:0" if given.device == "cuda" else "cpu")
    return Gang(GangSpec(rank=given.rank, shares=shares, meeting=Meeting(file=given.meeting)), device)


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
    parser.add_argument(
        "--hf-checkpointing", action="store_true", help="the plain step computes layers twice from the start"
    )
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
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share a step, over FSDP2")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--one", choices=["card", *WAYS], help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, or be one of the measured."""
    given = _parser().parse_args(argv)
    if given.one:
        if given.one == "card":
            done: list[Any] = [card(given)]
        else:
            done = _all_lengths(given.one, given.ours[0], given.shapes[0], given, _gang(given))
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
