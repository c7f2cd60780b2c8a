"""Tokens per second of the vLLM engine whose samples come and go, requests let in together or each at once.

    python -m benchmarks.bench_admission                                   # on a GPU: the 135M, 1.5B and 7B shapes
    python -m benchmarks.bench_admission --device cpu --dtype float32 --shapes smollm2-135m --slots 8 --prompt 64 --tokens 32

Samples of half to one and a half times `--tokens` tokens are each replaced when they end, as in a run between two weight updates;
weights are vLLM's own random ones. Each way has an engine of its own, one after the other. Needs vllm (docs/gpu.md).
"""

import argparse
import json
import sys
from pathlib import Path

from benchmarks.bench_generation import engine_spec, model_config
from runtime.profile.bench import Drive, decode
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.types import WeightsRef

WAYS = {"together": True, "at once": False}
REF = WeightsRef(lineage=0, version=0, path="", digest="random")


def measured(shape: str, given: argparse.Namespace, *, hold: bool) -> dict[str, float]:
    """Figures of one engine over `given.seconds` at work."""
    model = model_config(shape)
    longest = given.tokens + given.tokens // 2
    engine = VllmEngine(engine_spec(model, given, slots=given.slots, longest=longest, hold=hold))
    # Random weights: what is measured does not depend on them.
    engine._version, engine._digest = REF.version, REF.digest
    drive = Drive(
        running=given.slots, prompt_tokens=given.prompt, new_tokens=given.tokens, vocab=model["vocab_size"], spread=True
    )
    try:
        done = decode(engine, REF, drive, seconds=given.seconds)
    finally:
        engine.close()
    return {
        "tokens_per_s": done.tokens / done.busy_s,
        "running": done.running,
        "step_ms": done.busy_s / done.steps * 1e3,
        "plain_step_ms": done.step_s * 1e3,
        "prompts_per_s": done.prefill_tokens / (given.prompt - 1) / done.busy_s,
    }


def main() -> int:
    """Both ways for every shape, side by side."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_admission", description=__doc__)
    parser.add_argument("--shapes", nargs="+", default=["smollm2-135m", "1.5b", "7b"])
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=130)
    parser.add_argument("--tokens", type=int, default=150, help="mean of a sample")
    parser.add_argument("--seconds", type=float, default=12.0, help="at work, of each engine")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--share", type=float, default=0.85, help="of the card's memory")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for shape in given.shapes:
        figures[shape] = {way: measured(shape, given, hold=hold) for way, hold in WAYS.items()}
        for way, f in figures[shape].items():
            print(f"{shape:16} {way:10}", "  ".join(f"{k} {v:,.2f}" for k, v in f.items()), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
