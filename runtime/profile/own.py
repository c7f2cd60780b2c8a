"""Rates of a run's own model, engine and trainer, as its configuration has them, at sizes that tell their costs apart.

The engine decodes at several batches up to the one of the run, and once with samples that come and go as in the run. The trainer
makes whole turns on the run's batch, on a quarter of it, and on the whole one in more rows (`planner.reached` says why).
"""

import contextlib
import gc
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from planner.calibration import EngineRate, TrainerRate
from planner.model import ModelSpec, load_model_spec
from planner.record import replace
from runtime.config.problem import engine_name
from runtime.config.schema import Config
from runtime.errors import RunError
from runtime.paths import RunPaths
from runtime.profile.bench import Drive, decode, random_batch
from runtime.profile.flowing import flow_turn_s
from runtime.profile.scratch import scratch_prefix
from runtime.profile.turns import Loopback, Turns, turns
from runtime.rl.model import DTYPES
from runtime.rl.types import WeightsRef
from runtime.rl.weights import GenerationWriter
from runtime.rl.weights.publisher import DirectPublisher

Stop = Callable[[], bool]
CHECKPOINTS, CHECKPOINT_BYTES = 4, 12  # on disk at once; of a parameter: in float32 with two moments
FLOW_S = 4.0  # most that flow is measured for
START_S = 150.0  # most that vLLM may take to come up
BETWEEN = 4  # most turns between two checkpoints here, however many the run makes: each is measured for itself
MOST_ROWS = 4  # times as many, for the floor of a row


def run_trainer_rates(
    config: Config, device: torch.device, *, seconds: float, quick: bool, stop: Stop, folder: Path
) -> tuple[TrainerRate, ...]:
    """Whole turns of the run's trainer. `folder`: on the disk that the run writes to."""
    spec = load_model_spec(config.model.path)
    every = config.trainer.checkpoint_every_steps
    samples = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    prompt, response = _lengths(config)
    _check_disk(folder, CHECKPOINTS * CHECKPOINT_BYTES * spec.params)
    each = seconds / 4
    first, facts = _turns(config, device, samples, min(every, BETWEEN), each, stop, folder)
    besides_s = first.checkpoint_s / every + flow_turn_s(config, folder, seconds=FLOW_S, stop=stop)
    out = [_rate(spec, samples, prompt, response, first, facts, besides_s)]
    few = max(1, samples // 4)
    if stop() or few == samples:
        return tuple(out)
    more_tokens = max(1, -(-samples * (prompt + response) // (MOST_ROWS * round(first.rows))))
    cut = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"micro_batch_tokens": int(more_tokens)})}
    )
    for other, count in ((config, few), (cut, samples)):
        if stop():
            break
        found, facts = _turns(other, device, count, None, each, stop, folder)
        out.append(_rate(spec, count, prompt, response, found, facts, besides_s))
    return tuple(out)


def _check_disk(folder: Path, needed: float) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        expected = f"{needed / 1e9:.0f} GB for checkpoints"
        raise RunError(
            "the disk is too full for the trainer's turns",
            where=str(folder),
            got=f"{free / 1e9:.0f} GB",
            expected=expected,
        )


def _lengths(config: Config) -> tuple[int, int]:
    return max(1, round(config.lengths.prompt_mean)), max(2, round(config.lengths.response_mean))


def _turns(  # noqa: PLR0917 - one bench
    config: Config, device: torch.device, samples: int, every: int | None, seconds: float, stop: Stop, folder: Path
) -> tuple[Turns, Mapping[str, str]]:
    from runtime.rl.train.factory import build_trainer

    prompt, response = _lengths(config)
    vocab = load_model_spec(config.model.path).vocab
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), dir=folder) as made:
        paths = RunPaths(folder=Path(made), short=Path(made))
        trainer = build_trainer(config, paths, device=device)
        with _publisher(config, paths.weights, device) as direct:
            done = turns(
                trainer,
                lambda step: random_batch(step, samples=samples, prompt_tokens=prompt, tokens=response, vocab=vocab),
                seconds=seconds,
                weights=paths.weights,
                checkpoint_every=every,
                direct=direct,
                should_stop=stop,
            )
        facts = trainer.facts
        del trainer
        release(device)
    return done, facts


@contextlib.contextmanager
def _publisher(config: Config, root: Path, device: torch.device) -> Iterator[DirectPublisher | None]:
    """What publishes as the run does: straight to engines from a GPU, by disk else."""
    weights = config.weights
    if weights.path == "store" or (weights.path == "auto" and device.type != "cuda"):
        yield None
        return
    bucket = int(weights.bucket)
    direct = DirectPublisher(root, Loopback(device, bucket), bucket_bytes=bucket, full_every=weights.full_every)
    try:
        yield direct
    finally:
        direct.finish()
        direct.close()


def _rate(  # noqa: PLR0917 - one row of the table
    spec: ModelSpec,
    samples: int,
    prompt: int,
    response: int,
    done: Turns,
    facts: Mapping[str, str],
    besides_s: float,
) -> TrainerRate:
    sequence, rows = prompt + response, max(1, round(done.rows))
    return TrainerRate(
        model=spec.name,
        params=spec.params,
        devices=1,
        sequence_tokens=sequence,
        micro_batch=max(1, round(samples / rows)),
        recompute=not facts["recomputed_layers"].startswith("0 "),
        tokens_per_s=samples * sequence / (done.turn_s + besides_s),
        samples=samples,
        response_tokens=response,
        rows=rows,
        attention=facts["attention"],
        compiled=facts["compile"].startswith("on"),
    )


def run_engine_rates(
    config: Config, device: torch.device, *, seconds: float, quick: bool, stop: Stop, folder: Path, card: str = ""
) -> tuple[EngineRate, ...]:
    """Decode rates of the run's engine, and what a prompt costs those who decode. `card`: UUID of the GPU that it gets."""
    spec = load_model_spec(config.model.path)
    prompt, response = _lengths(config)
    most = _most(config)
    levels = sorted({max(1, most // 4), most} if quick else {max(1, most // 16), max(1, most // 4), most})
    each = seconds / (len(levels) + 2)
    name = "torch" if config.rollout.engine == "torch" else engine_name(config)
    out: list[EngineRate] = []
    with tempfile.TemporaryDirectory(prefix=scratch_prefix(), dir=folder) as made:
        ref = _generation(config, Path(made))
        with _engine(config, device, card) as engine:
            longest = max(2, config.sampling.max_new_tokens)
            plain_s = 0.0
            for running in levels:
                drive = Drive(running=running, prompt_tokens=prompt, new_tokens=longest, vocab=spec.vocab)
                done = decode(engine, ref, drive, seconds=each, should_stop=stop)
                if stop() or not done.steps:
                    return tuple(out)
                plain_s = done.step_s or done.busy_s / done.steps
                context = prompt + max(1, min(longest, done.steps) // 2)
                rate = EngineRate(
                    phase="decode",
                    model=spec.name,
                    params=spec.params,
                    tp=1,
                    running=max(1, round(done.running)),
                    context=context,
                    tokens_per_s=done.running / plain_s,
                    engine=name,
                )
                out.append(rate)
            mixed = Drive(running=levels[-1], prompt_tokens=prompt, new_tokens=response, vocab=spec.vocab, spread=True)
            done = decode(engine, ref, mixed, seconds=2 * each, should_stop=stop)
            held_s = done.busy_s - done.steps * plain_s
            if not stop() and done.prefill_tokens and held_s > 0:
                out.append(replace(out[-1], phase="prefill", context=prompt, tokens_per_s=done.prefill_tokens / held_s))
    release(device)
    return tuple(out)


def _most(config: Config) -> int:
    """Most samples that the run's replica ever decodes at once."""
    batch = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    return min(config.sampling.max_running, (config.algorithm.bound + 1) * batch)


def _generation(config: Config, root: Path) -> WeightsRef:
    """The model's first weights on disk, as the trainer publishes them."""
    from runtime.rl.train.factory import build_model

    dtype = DTYPES[config.model.rollout_dtype or config.model.dtype]
    tensors = {n: p.detach() for n, p in build_model(config).named_parameters()}
    return GenerationWriter(root).write(tensors, lineage=0, version=0, dtype=dtype)


@contextlib.contextmanager
def _engine(config: Config, device: torch.device, card: str) -> Iterator[Any]:
    if config.rollout.engine == "torch":
        from runtime.rl.engine.factory import build_engine

        yield build_engine(config, device=str(device))
        return
    from runtime.rl.engine.vllm_factory import build_vllm_engine

    limited = config.rollout.model_copy(update={"start_deadline": min(START_S, config.rollout.start_deadline)})
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if card:
        os.environ["CUDA_VISIBLE_DEVICES"] = card  # for the engine's process: torch here has made its choice
    try:
        engine = build_vllm_engine(config.model_copy(update={"rollout": limited}), gpus=1 if card else 0)
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        yield engine
    finally:
        engine.close()


def decode_until(config: Config, device: torch.device, folder: Path, stop: Stop) -> None:
    """The run's engine at its full batch until it is told to stop."""
    prompt, response = _lengths(config)
    vocab = load_model_spec(config.model.path).vocab
    drive = Drive(running=_most(config), prompt_tokens=prompt, new_tokens=response, vocab=vocab, spread=True)
    with _engine(config, device, "") as engine:
        ref = _generation(config, folder)
        while not stop():
            decode(engine, ref, drive, seconds=5.0, should_stop=stop)


def train_until(config: Config, device: torch.device, folder: Path, stop: Stop) -> None:
    """The run's trainer at work until it is told to stop."""
    samples = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    while not stop():
        _turns(config, device, samples, config.trainer.checkpoint_every_steps, 3600.0, stop, folder)


def release(device: torch.device) -> None:
    """Give a card's memory back to whoever comes next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def threads_of(part: str, device: torch.device) -> int:
    """Threads of torch as a run gives them: two to an unpaced trainer on a CPU, else one."""
    return 2 if part == "run_trainer" and device.type == "cpu" else 1
