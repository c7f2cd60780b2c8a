"""Rates of the product's own engine and trainer: at reference sizes on a card or CPU, and as paced devices are held to."""

import gc
import statistics
import time
from collections.abc import Callable

import torch

from planner.calibration import EngineRate, TrainerRate
from planner.calibration.sizes import REFERENCE_MODELS
from planner.model import ModelSpec, load_model_spec
from runtime.config.schema import AlgorithmSection, Config
from runtime.errors import ConfigError, RunError
from runtime.profile.bench import Drive, decode, random_batch, train
from runtime.profile.fit import Decoded, StepCost, step_cost
from runtime.profile.flowing import flow_turn_s
from runtime.rl.engine.spec import EngineSpec
from runtime.rl.engine.torch_engine import TorchEngine
from runtime.rl.model import DTYPES, Decoder, DecoderConfig
from runtime.rl.pacing import KindPacing, load_pacing
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import WeightsRef
from runtime.scratch import scratch

Stop = Callable[[], bool]
_REF = WeightsRef(lineage=0, version=0, path="", digest="profile")
_NO_EOS = frozenset({-1})  # samples end at their length


def decoder_config(spec: ModelSpec, positions: int = 8192) -> DecoderConfig:
    """A decoder of a reference model's shapes."""
    return DecoderConfig.from_hf(
        {
            "model_type": "qwen3",
            "hidden_size": spec.hidden,
            "intermediate_size": spec.intermediate,
            "num_hidden_layers": spec.layers,
            "num_attention_heads": spec.heads,
            "num_key_value_heads": spec.kv_heads,
            "head_dim": spec.head_dim,
            "vocab_size": spec.vocab,
            "tie_word_embeddings": spec.tied,
            "max_position_embeddings": positions,
        },
        where=spec.name,
    )


def engine_rates(
    model: str, device: torch.device, *, seconds: float, quick: bool, stop: Stop
) -> tuple[EngineRate, ...]:
    """Decode rates of the torch engine at some batches, and its prefill rate. Weights are random: time does not care.

    A rate is of the median step without prefill: one step that the machine held up for a second would halve a mean. In a hurry
    there are two batches, so that a floor can be told from an efficiency (`planner.calibrated`).
    """
    spec = REFERENCE_MODELS[model]
    gpu = device.type == "cuda"
    levels = ((16, 256) if quick else (1, 16, 64, 256)) if gpu else ((1, 32) if quick else (1, 8, 32))
    prompt, new = (512, 1024) if gpu else (64, 512)
    dtype = "bfloat16" if gpu else "float32"
    config = decoder_config(spec)
    with torch.device("meta"):
        shapes = {n: tuple(p.shape) for n, p in Decoder(config, torch.float32).named_parameters()}
    weights = {n: _noise(shape, device, dtype) for n, shape in shapes.items()}
    each = seconds / (len(levels) + 1)

    def bench(running: int, prompt: int, new: int) -> Decoded:
        engine = TorchEngine(
            config,
            EngineSpec(
                slots=running,
                max_length=prompt + new + 1,
                kv_tokens=running * (prompt + new + 64),
                eos_ids=_NO_EOS,
                seed=0,
                dtype=dtype,
                device=str(device),
            ),
            lambda _: weights,
        )
        drive = Drive(running=running, prompt_tokens=prompt, new_tokens=new, vocab=spec.vocab)
        return decode(engine, _REF, drive, seconds=each, should_stop=stop)

    out: list[EngineRate] = []
    for running in levels:
        # A cache is copied when it grows: twice its size, for what a short bench decodes beyond the prompts.
        if gpu and 2 * running * (prompt + 512) * spec.kv_bytes_per_token > torch.cuda.mem_get_info(device)[0] / 2:
            break
        done = bench(running, prompt, new)
        _release(device)
        if stop() or not done.steps:
            return tuple(out)
        step_s = done.step_s or done.busy_s / done.steps
        out.append(_decode_rate(spec, running, prompt + min(new, done.steps) // 2, done.running / step_s))
    # Samples of one token: almost all of a step is the prefill of the next ones.
    some = min(levels[-1], 16)
    cost = step_cost([bench(some, prompt, 1), bench(some, prompt, 16)])
    if not stop() and cost.prefill_s > 0:
        out.append(_prefill_rate(spec, some, prompt, cost))
    return tuple(out)


def _release(device: torch.device) -> None:
    """Give the memory of an engine that is gone back to the card."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def _decode_rate(spec: ModelSpec, running: int, context: int, tokens_per_s: float) -> EngineRate:
    return EngineRate(
        phase="decode",
        model=spec.name,
        params=spec.params,
        tp=1,
        running=running,
        context=context,
        tokens_per_s=tokens_per_s,
    )


def _prefill_rate(spec: ModelSpec, running: int, prompt: int, cost: StepCost) -> EngineRate:
    return EngineRate(
        phase="prefill",
        model=spec.name,
        params=spec.params,
        tp=1,
        running=running,
        context=prompt,
        tokens_per_s=1 / cost.prefill_s,
    )


def trainer_rates(
    model: str, device: torch.device, *, seconds: float, quick: bool, stop: Stop
) -> tuple[TrainerRate, ...]:
    """Tokens a second of optimiser steps of the torch trainer, without its files."""
    spec = REFERENCE_MODELS[model]
    gpu = device.type == "cuda"
    lengths: tuple[tuple[int, int], ...] = ((512, 512),) if gpu else ((32, 32),)
    if gpu and not quick:
        lengths = (*lengths, (512, 1536))
    samples = 16 if gpu else 8
    dtype = torch.bfloat16 if gpu else torch.float32
    out: list[TrainerRate] = []
    with scratch() as folder:
        for prompt, response in lengths:
            sequence = prompt + response
            algorithm = AlgorithmSection(micro_batch_tokens=4 * sequence)
            decoder = Decoder(decoder_config(spec), dtype).to(device)
            with torch.no_grad():
                for p in decoder.parameters():
                    p.normal_(0.0, 0.02) if p.ndim > 1 else p.fill_(1.0)
            trainer = TorchTrainer(
                decoder,
                algorithm=algorithm,
                temperature=1.0,
                checkpoints=folder / "checkpoints",
                weights=folder / "weights",
                device=device,
            )
            done = _steps(trainer, spec, samples, prompt, response, seconds, device, stop)
            del trainer, decoder
            if done is None:
                break
            out.append(
                TrainerRate(
                    model=spec.name,
                    params=spec.params,
                    devices=1,
                    sequence_tokens=sequence,
                    micro_batch=4,
                    recompute=False,
                    tokens_per_s=samples * sequence / done,
                )
            )
    return tuple(out)


def _steps(  # noqa: PLR0917 - one bench
    trainer: TorchTrainer,
    spec: ModelSpec,
    samples: int,
    prompt: int,
    response: int,
    seconds: float,
    device: torch.device,
    stop: Stop,
) -> float | None:
    """Median seconds of a step after the first; None when it was stopped before."""
    spent: list[float] = []
    while not stop() and (len(spent) < 2 or sum(spent) < seconds / 2):
        batch = random_batch(trainer.version, samples=samples, prompt_tokens=prompt, tokens=response, vocab=spec.vocab)
        began = time.perf_counter()
        trainer.train_step(batch)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        if trainer.version > 1:
            spent.append(time.perf_counter() - began)
    return statistics.median(spent) if spent else None


def _noise(shape: tuple[int, ...], device: torch.device, dtype: str) -> torch.Tensor:
    made = torch.empty(shape, device=device, dtype=DTYPES[dtype])
    return made.normal_(0.0, 0.02) if len(shape) > 1 else made.fill_(1.0)


def paced_rates(
    config: Config, kind: str, *, seconds: float, quick: bool, stop: Stop
) -> tuple[tuple[EngineRate, ...], tuple[TrainerRate, ...]]:
    """What a paced kind of the configuration really does: its engine and trainer at work, held to the device's clock.

    The file of declared speeds is read by the device alone; nothing of it comes back but how long the work took.
    """
    from runtime.rl.engine.factory import build_engine
    from runtime.rl.train.factory import build_model

    pacing = _pacing_of(config, kind)
    spec = load_model_spec(config.model.path)
    prompt, new = round(config.lengths.prompt_mean), max(2, round(config.lengths.response_mean))
    weights = {n: p.detach().clone() for n, p in build_model(config).named_parameters()}
    slots = config.sampling.max_running
    levels = sorted({max(1, slots // 8), slots} if quick else {max(1, slots // 16), max(1, slots // 4), slots})
    each = seconds / (len(levels) + 2)
    # The last drive's samples end at once, so that nearly all of its steps is prefill.
    lengths = [(n, new) for n in levels] + [(slots, 1)]
    benches: list[Decoded] = []
    for running, tokens in lengths:
        engine = build_engine(config, read=lambda _: weights)
        drive = Drive(running=running, prompt_tokens=prompt, new_tokens=tokens, vocab=spec.vocab)
        benches.append(decode(engine, _REF, drive, seconds=each, pacing=pacing, should_stop=stop))
        if stop() or not benches[-1].steps:
            return (), ()
    cost = step_cost(benches)
    rates = [_decode_rate(spec, n, prompt + new // 2, cost.decode_tokens_per_s(n)) for n in levels]
    if cost.prefill_s > 0:
        rates.append(_prefill_rate(spec, slots, prompt, cost))
    return tuple(rates), (_paced_trainer(config, spec, kind, each, stop),)


def _pacing_of(config: Config, kind: str) -> KindPacing:
    if config.fleet.pacing is None:
        raise ConfigError("a paced kind without declared speeds", where="fleet.pacing", got=kind)
    return load_pacing(config.fleet.pacing).kind(kind, where=str(config.fleet.pacing))


def _paced_trainer(config: Config, spec: ModelSpec, kind: str, seconds: float, stop: Stop) -> TrainerRate:
    from runtime.paths import RunPaths
    from runtime.rl.train.factory import build_trainer

    prompt, new = round(config.lengths.prompt_mean), max(1, round(config.lengths.response_mean))
    samples = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    with scratch() as folder:
        paths = RunPaths(folder=folder, short=folder)
        done = train(
            build_trainer(config, paths),
            lambda step: random_batch(step, samples=samples, prompt_tokens=prompt, tokens=new, vocab=spec.vocab),
            seconds=seconds,
            weights=paths.weights,
            pacing=_pacing_of(config, kind),
            should_stop=stop,
        )
        flow_s = flow_turn_s(config, folder, seconds=seconds, stop=stop)
    if not done.steps:
        raise RunError("the paced trainer made no step in time", got=kind)
    sequence = prompt + new
    return TrainerRate(
        model=spec.name,
        params=spec.params,
        devices=1,
        sequence_tokens=sequence,
        micro_batch=max(1, config.algorithm.micro_batch_tokens // sequence),
        recompute=False,
        tokens_per_s=done.tokens / (done.busy_s + done.steps * flow_s),
    )
