"""Tokens per second of hexctl's vLLM engine beside vLLM alone: the same prompts, batch, lengths and dummy weights.

    python -m benchmarks.bench_generation                                  # on a GPU: the 1.5B and 7B shapes
    python -m benchmarks.bench_generation --device cpu --dtype float32 --shapes smollm2-135m --sequences 8 --prompt 64 --tokens 32

Each engine and shape has a process of its own, one after the other. Both engines have vLLM's own random weights, temperature 1
and the logprob of each sampled token; a run is from the first prompt handed over to the last token. Needs vllm (docs/gpu.md);
where it is not, `python -m benchmarks` passes this one by.
"""

import argparse
import functools
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runtime.rl.engine.spec import VllmSpec

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
SHAPES = {"1.5b": "r1-distill-qwen-1.5b", "7b": "qwen2.5-7b"}
LAST = "figures "  # begins the line of a child's stdout that holds its figures


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    """Random tokens; no two runs share a prefix, so that no cache serves them."""
    rng = random.Random(seed)
    return [[rng.randrange(10, min(vocab, 50_000)) for _ in range(length)] for _ in range(count)]


def model_config(shape: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / f"{SHAPES.get(shape, shape)}.json").read_text())
    return config


def engine_spec(
    model: dict[str, Any], given: argparse.Namespace, *, slots: int, longest: int, **ways: Any
) -> "VllmSpec":
    """An engine for prompts of `given.prompt` tokens and answers of at most `longest`; `ways`: what a benchmark compares."""
    from runtime.rl.engine.spec import VllmSpec

    return VllmSpec(
        model=model,
        slots=slots,
        max_length=given.prompt + longest + 1,
        eos_ids=frozenset(),
        seed=1,
        dtype=given.dtype,
        device=given.device,
        gpu_memory_share=given.share,
        kv_cache_bytes=2 * 2**30,
        threads=given.threads,
        eager=given.device == "cpu",
        **ways,
    )


def hexctl_seconds(shape: str, given: argparse.Namespace, *, direct: bool = True) -> dict[str, Any]:
    """Seconds of each run, by number of sequences. Not `direct`: through vLLM's output processor."""
    from runtime.rl.engine.vllm_engine import VllmEngine
    from runtime.rl.types import Lease, SampleId

    model = model_config(shape)
    spec = engine_spec(model, given, slots=max(given.sequences), longest=given.tokens, direct=direct, ahead=given.ahead)
    began = time.perf_counter()
    engine = VllmEngine(spec)
    engine._version = 0  # dummy weights: what is measured does not depend on them
    up_s = time.perf_counter() - began
    seconds: dict[str, list[float]] = {}
    for count in given.sequences:
        for repeat in range(given.repeats + 1):
            leases = [
                Lease(sample=SampleId(repeat, i), epoch=1, prompt_tokens=tuple(p), max_new_tokens=given.tokens)
                for i, p in enumerate(prompts(count, given.prompt, model["vocab_size"], seed=repeat * 10_000 + count))
            ]
            began, tokens = time.perf_counter(), 0
            engine.add(leases)
            while engine.held():
                tokens += sum(len(a.tokens) for a in engine.step())
            if tokens != count * given.tokens:
                raise SystemExit(f"{tokens} tokens, expected {count * given.tokens}")
            if repeat:  # the first one warms up
                seconds.setdefault(str(count), []).append(time.perf_counter() - began)
    engine.close()
    return {"up_s": up_s, "seconds": seconds, "facts": engine.facts}


def bare_seconds(shape: str, given: argparse.Namespace) -> dict[str, Any]:
    """The same through `vllm.LLM`, its engine core in a process of its own as it comes."""
    import os
    import tempfile

    os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    cpu = given.device == "cpu"
    if cpu:
        os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        os.environ |= {"OMP_NUM_THREADS": str(given.threads), "TORCH_COMPILE_DISABLE": "1"}
    from vllm import LLM, SamplingParams

    from runtime.rl.engine.vllm_host.model_folder import write_folder

    model = model_config(shape)
    folder = tempfile.mkdtemp(prefix="bench-model-")
    write_folder(folder, model, dtype=given.dtype)
    began = time.perf_counter()
    llm = LLM(
        model=folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        generation_config="vllm",
        dtype=given.dtype,
        max_model_len=given.prompt + given.tokens + 1,
        max_num_seqs=max(given.sequences),
        max_num_batched_tokens=8192,
        gpu_memory_utilization=given.share,
        enforce_eager=cpu,
        logprobs_mode="processed_logprobs",
        seed=1,
        **({"block_size": 32} if cpu else {}),
    )
    up_s = time.perf_counter() - began
    params = SamplingParams(temperature=1.0, max_tokens=given.tokens, ignore_eos=True, logprobs=0, detokenize=False)
    seconds: dict[str, list[float]] = {}
    for count in given.sequences:
        for repeat in range(given.repeats + 1):
            asked = [
                {"prompt_token_ids": p}
                for p in prompts(count, given.prompt, model["vocab_size"], seed=repeat * 10_000 + count)
            ]
            began = time.perf_counter()
            outputs = llm.generate(asked, params, use_tqdm=False)
            taken = time.perf_counter() - began
            tokens = sum(len(o.outputs[0].token_ids) for o in outputs)
            if tokens != count * given.tokens:
                raise SystemExit(f"{tokens} tokens, expected {count * given.tokens}")
            if repeat:
                seconds.setdefault(str(count), []).append(taken)
    return {"up_s": up_s, "seconds": seconds}


ENGINES: dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]] = {
    "hexctl": hexctl_seconds,
    "hexctl-public": functools.partial(hexctl_seconds, direct=False),
    "vllm": bare_seconds,
}


def measure(given: argparse.Namespace) -> dict[str, float]:
    """Medians by engine, shape and number of sequences, printed as they come."""
    figures: dict[str, float] = {}
    for shape in given.shapes:
        for engine in given.engines:
            found = _child(engine, shape, given)
            figures[f"{engine}_{shape}_up_s"] = found["up_s"]
            for count, seconds in found["seconds"].items():
                rate = int(count) * given.tokens / statistics.median(seconds)
                figures[f"{engine}_{shape}_{count}_sequences_tokens_per_s"] = rate
                spread = f"{min(seconds):.2f}-{max(seconds):.2f} s"
                print(f"{engine:13} {shape:14} {count:>4} sequences {rate:10,.0f} tokens/s ({spread})", flush=True)
    return figures


def _child(engine: str, shape: str, given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.bench_generation", "--one", engine, "--shapes", shape]
    for name in ("device", "dtype", "prompt", "tokens", "repeats", "share", "threads", "ahead"):
        command += [f"--{name}", str(getattr(given, name))]
    command += ["--sequences", *map(str, given.sequences)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=given.deadline, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(LAST)]
    if done.returncode or not lines:
        raise SystemExit(f"{engine} {shape} failed with exit code {done.returncode}; its words are above")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(LAST))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_generation", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), help="1.5b, 7b, or a file of configs/models")
    parser.add_argument("--engines", nargs="+", default=["hexctl", "vllm"], choices=list(ENGINES))
    parser.add_argument("--sequences", nargs="+", type=int, default=[32, 256])
    parser.add_argument("--prompt", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each response")
    parser.add_argument("--repeats", type=int, default=3, help="runs counted, after one that is not")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--share", type=float, default=0.85, help="of the card's memory")
    parser.add_argument("--threads", type=int, default=2, help="of a CPU")
    parser.add_argument("--ahead", type=int, default=2, help="steps hexctl's engine may be ahead of the replica")
    parser.add_argument("--deadline", type=float, default=900.0, help="seconds for one engine and shape")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--one", choices=list(ENGINES), help=argparse.SUPPRESS)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure, or be one of the measured."""
    given = _parser().parse_args(argv)
    if given.one:
        print("\n" + LAST + json.dumps(ENGINES[given.one](given.shapes[0], given)), flush=True)
        return 0
    figures = measure(given)
    if given.json:
        given.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


def run() -> dict[str, float]:
    """A small case for `python -m benchmarks`: the 135M shape on a CPU."""
    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed: not measured (docs/gpu.md)", file=sys.stderr)
        return {}
    small = ["--device", "cpu", "--dtype", "float32", "--threads", "1", "--shapes", "smollm2-135m", "--sequences", "8"]
    return measure(_parser().parse_args([*small, "--prompt", "64", "--tokens", "32", "--repeats", "3"]))


if __name__ == "__main__":
    sys.exit(main())
