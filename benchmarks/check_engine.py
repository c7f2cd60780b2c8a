"""What the vLLM engine keeps true on this machine, in one short run: `python -m benchmarks.check_engine` (GPU; no network).

Weights of a generation on disk are verified and laid in; logprobs are compared with our own decoder's forward over the whole
sequence; weights are swapped under running samples; a wrong hash is refused; memory is given back asleep, taken again, and
given back by a kill -9. Prints one JSON object; exit code 1 when anything is not as it must be.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from planner.record import replace
from runtime.errors import RunError, WeightsError
from runtime.rl.engine.spec import VllmSpec
from runtime.rl.engine.vllm_engine import VllmEngine
from runtime.rl.model import DTYPES, Decoder, DecoderConfig
from runtime.rl.types import Append, Lease, SampleId, WeightsRef
from runtime.rl.weights import write_generation

MODELS = Path(__file__).resolve().parents[1] / "configs" / "models"
MEAN_CLOSE = {"bfloat16": 0.02, "float32": 1e-4}  # mean of |difference| of logprobs between two implementations
TEMPERATURE = 0.7  # not 1: whether logprobs are of the distribution sampled from shows only then
BACK_S = 30.0


def decoder_of(config: DecoderConfig, seed: int, device: str, dtype: str) -> Decoder:
    """Random weights of a plausible size, made where they are fast to make."""
    decoder = Decoder(config, DTYPES[dtype]).to(device)
    generator = torch.Generator(device=device).manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
    return decoder


def differences(decoder: Decoder, one: Lease, appends: list[Append], version: int, device: str) -> list[float]:
    """|engine - forward| for each token of that version."""
    tokens = [*one.prompt_tokens, *(t for a in appends for t in a.tokens)]
    with torch.no_grad():
        logits = decoder(torch.tensor([tokens], device=device))[0].float()
        logprobs = torch.log_softmax(logits / TEMPERATURE, -1)
    found, at = [], len(one.prompt_tokens)
    for append in appends:
        for token, logprob in zip(append.tokens, append.logprobs, strict=True):
            if append.version == version:
                found.append(abs(logprob - float(logprobs[at - 1, token])))
            at += 1
    return found


def free_bytes(device: str) -> int:
    """Of the card, whoever has the rest; 0 on a CPU."""
    return torch.cuda.mem_get_info()[0] if device == "cuda" else 0


def drive(engine: VllmEngine, trace: dict[SampleId, list[Append]], steps: int | None = None) -> None:
    while engine.held() and steps != 0:
        for append in engine.step():
            trace.setdefault(append.sample, []).append(append)
        steps = None if steps is None else steps - 1


def check(given: argparse.Namespace, root: Path) -> dict[str, Any]:
    """Facts by name; those that begin with "ok_" must be true."""
    raw = json.loads((MODELS / f"{given.shape}.json").read_text())
    config = DecoderConfig.from_hf(raw)
    facts: dict[str, Any] = {"shape": given.shape, "device": given.device, "dtype": given.dtype, "tp": given.tp}
    empty = free_bytes(given.device)
    decoders = {v: decoder_of(config, v, given.device, given.dtype) for v in (0, 1)}
    refs = {v: write_generation(root, dict(d.named_parameters()), lineage=0, version=v) for v, d in decoders.items()}
    spec = VllmSpec(
        model=raw,
        slots=32,
        max_length=1024,
        eos_ids=frozenset(),
        seed=3,
        temperature=TEMPERATURE,
        dtype=given.dtype,
        device=given.device,
        gpu_memory_share=given.share,
        tp=given.tp,
        max_tp=given.tp,
        threads=2,
        eager=given.device == "cpu",
        sleep=given.device == "cuda",
    )
    began = time.perf_counter()
    engine = VllmEngine(spec)
    facts |= {"start_s": time.perf_counter() - began, **engine.facts}
    began = time.perf_counter()
    engine.load_weights(refs[0])
    facts["load_s"] = time.perf_counter() - began
    _generate(engine, decoders, refs, facts, given)
    _refuse(engine, refs, facts)
    _give_back(engine, refs, facts, given.device, empty)
    return facts


def _generate(
    engine: VllmEngine,
    decoders: dict[int, Decoder],
    refs: dict[int, WeightsRef],
    facts: dict[str, Any],
    given: argparse.Namespace,
) -> None:
    """Samples that live through an update; each token against the weights its version names."""
    leases = [
        Lease(sample=SampleId(g, 0), epoch=1, prompt_tokens=tuple(range(20, 40 + g)), max_new_tokens=64)
        for g in range(16)
    ]
    trace: dict[SampleId, list[Append]] = {}
    engine.add(leases)
    drive(engine, trace, steps=20)
    began = time.perf_counter()
    engine.load_weights(refs[1])
    facts["update_under_load_s"] = time.perf_counter() - began
    drive(engine, trace)
    for version, decoder in decoders.items():
        found = [d for one in leases for d in differences(decoder, one, trace[one.sample], version, given.device)]
        facts[f"logprob_difference_version_{version}"] = {
            "tokens": len(found),
            "mean": sum(found) / max(1, len(found)),
            "max": max(found, default=0.0),
        }
        facts[f"ok_logprobs_version_{version}"] = bool(found) and sum(found) / len(found) < MEAN_CLOSE[given.dtype]
    facts["ok_all_tokens"] = all(sum(len(a.tokens) for a in trace[one.sample]) == 64 for one in leases)


def _refuse(engine: VllmEngine, refs: dict[int, WeightsRef], facts: dict[str, Any]) -> None:
    try:
        engine.load_weights(replace(refs[0], digest="0" * 64))
    except WeightsError:
        facts["ok_wrong_hash_refused"] = engine.version is None
    engine.load_weights(refs[0])


def _give_back(engine: VllmEngine, refs: dict[int, WeightsRef], facts: dict[str, Any], device: str, empty: int) -> None:
    """Asleep, awake with weights verified anew, killed."""
    before = free_bytes(device)
    began = time.perf_counter()
    facts["sleep_frees"] = engine.sleep()
    facts |= {"sleep_s": time.perf_counter() - began, "sleep_freed_gb": (free_bytes(device) - before) / 1e9}
    began = time.perf_counter()
    engine.wake()
    facts["wake_s"] = time.perf_counter() - began
    facts["ok_no_version_awake"] = engine.version is None
    engine.load_weights(refs[1])
    engine.add([Lease(sample=SampleId(99, 0), epoch=1, prompt_tokens=(5, 6, 7), max_new_tokens=900)])
    trace: dict[SampleId, list[Append]] = {}
    drive(engine, trace, steps=5)
    facts["ok_generates_after_waking"] = bool(trace)
    held = free_bytes(device)
    began = time.perf_counter()
    os.killpg(engine.process_group, signal.SIGKILL)
    try:
        drive(engine, trace)
    except RunError:
        facts["ok_kill_noticed"] = True
    facts["kill_noticed_s"] = time.perf_counter() - began
    if device == "cuda":
        while free_bytes(device) - held < 0.5 * (empty - held) and time.perf_counter() - began < BACK_S:
            time.sleep(0.05)
        facts |= {"memory_back_s": time.perf_counter() - began, "memory_back_gb": (free_bytes(device) - held) / 1e9}
        facts["ok_memory_back"] = facts["memory_back_s"] < BACK_S


def main() -> int:
    """Print the facts."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.check_engine", description=__doc__)
    parser.add_argument("--shape", default="qwen2.5-0.5b", help="a file of configs/models")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--tp", type=int, default=1, help="GPUs of the engine")
    given = parser.parse_args()
    with TemporaryDirectory() as root:
        facts = check(given, Path(root))
    print(json.dumps(facts, indent=1))
    return 0 if all(v is True for k, v in facts.items() if k.startswith("ok_")) else 1


if __name__ == "__main__":
    sys.exit(main())
