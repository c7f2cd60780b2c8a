"""Rates of a run's own model, engine and trainer, as its configuration has them, at sizes that tell their costs apart.

The engine decodes at several batches up to the one of the run, with samples that begin and end as in the run, and then takes new
weights at the run's pace (`steady`). The trainer makes whole turns on the run's batch, on a quarter of it, and on the whole one in
more rows (`planner.reached` says why); a checkpoint is told apart.
"""

import contextlib
import gc
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from planner.calibration import EngineRate, TrainerRate, UpdateTime
from planner.calibration.records import Phase, UpdatePath
from planner.model import ModelSpec, load_model_spec
from planner.record import record, replace
from runtime.config.problem import engine_name
from runtime.config.schema import Config
from runtime.errors import RunError, first_line
from runtime.paths import RunPaths
from runtime.profile.bench import random_batch
from runtime.profile.flowing import flow_turn_s
from runtime.profile.published import LEAST_UPDATES, published, weights_of
from runtime.profile.steady import Course, OneGeneration, Publishing, Steady, Updated, drive, mean_of, steady, updated
from runtime.profile.turns import Loopback, Turns, turns
from runtime.rl.protocols import RolloutEngine
from runtime.rl.types import TrainBatch, WeightsRef
from runtime.rl.weights import GenerationWriter
from runtime.rl.weights.publisher import DirectPublisher
from runtime.scratch import scratch

Stop = Callable[[], bool]
Begins = Callable[[int], None]  # told before a trainer's turn of that number, which waits for its answer
CHECKPOINTS, CHECKPOINT_BYTES = 4, 12  # on disk at once; of a parameter: in float32 with two moments
FLOW_S = 4.0  # most that flow is measured for
START_S = 150.0  # most that vLLM may take to come up
BETWEEN = 4  # most turns between two checkpoints here, however many the run makes: each is measured for itself
WORK_S = 3600.0  # of work beside another that is measured: it is told when to stop
MOST_ROWS = 4  # times as many, for the floor of a row


def run_trainer_rates(
    config: Config, device: torch.device, *, seconds: float, quick: bool, stop: Stop, folder: Path
) -> tuple[TrainerRate, ...]:
    """Whole turns of the run's trainer. `folder`: on the disk that the run writes to."""
    spec = load_model_spec(config.model.path)
    every = config.trainer.checkpoint_every_steps
    samples = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    prompt, response = _lengths(config)
    check_disk(config, folder)
    each = seconds / 4
    first, facts = _turns(config, device, samples, min(every, BETWEEN), each, stop, folder)
    if stop():
        return ()
    flow_s = flow_turn_s(config, folder, seconds=FLOW_S, stop=stop)
    checkpoint_s = checkpoint_cost_s(first, every=every, flow_s=flow_s)
    out = [_rate(spec, samples, prompt, response, first, facts, flow_s, checkpoint_s)]
    few = max(1, samples // 4)
    if stop() or few == samples:
        return tuple(out)
    more_tokens = max(1, -(-samples * (prompt + response) // (MOST_ROWS * round(first.rows))))
    cut = config.model_copy(
        update={"algorithm": config.algorithm.model_copy(update={"micro_batch_tokens": int(more_tokens)})}
    )
    for other, count in ((config, few), (cut, samples)):
        found, facts = _turns(other, device, count, None, each, stop, folder)
        if stop():
            break
        out.append(_rate(spec, count, prompt, response, found, facts, flow_s, checkpoint_s))
    return tuple(out)


def checkpoint_cost_s(found: Turns, *, every: int, flow_s: float) -> float | None:
    """Seconds of the run's turns that one checkpoint costs; None where none was made. One that is written for longer than the turns
    between two take is also waited for."""
    if not found.checkpoint_s:
        return None
    return found.checkpoint_s + max(0.0, found.write_s - every * (found.turn_s + flow_s) - found.checkpoint_s)


def check_disk(config: Config, folder: Path) -> None:
    """RunError where the checkpoints of the trainer's turns would not fit on the disk of `folder`."""
    needed = CHECKPOINTS * CHECKPOINT_BYTES * load_model_spec(config.model.path).params
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
    config: Config,
    device: torch.device,
    samples: int,
    every: int | None,
    seconds: float,
    stop: Stop,
    folder: Path,
    begins: Begins = lambda _: None,
) -> tuple[Turns, Mapping[str, str]]:
    from runtime.rl.train.factory import build_trainer

    def batch(step: int) -> TrainBatch:
        begins(step)
        return random_batch(step, samples=samples, prompt_tokens=prompt, tokens=response, vocab=vocab)

    prompt, response = _lengths(config)
    vocab = load_model_spec(config.model.path).vocab
    with scratch(folder) as made:
        paths = RunPaths(folder=made, short=made)
        trainer = build_trainer(config, paths, device=device)
        with _publisher(config, paths.weights, device) as direct:
            done = turns(
                trainer,
                batch,
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
    sender = Loopback(device, bucket, one_card=(config.fleet.gpu_parts or 1) > 1)
    direct = DirectPublisher(root, sender, bucket_bytes=bucket, full_every=weights.full_every)
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
    flow_s: float,
    checkpoint_s: float | None,
) -> TrainerRate:
    sequence, rows = prompt + response, max(1, round(done.rows))
    return TrainerRate(
        model=spec.name,
        params=spec.params,
        devices=1,
        sequence_tokens=sequence,
        micro_batch=max(1, round(samples / rows)),
        recompute=not facts["recomputed_layers"].startswith("0 "),
        tokens_per_s=samples * sequence / (done.turn_s + flow_s),
        samples=samples,
        response_tokens=response,
        rows=rows,
        attention=facts["attention"],
        compiled=facts["compile"].startswith("on"),
        checkpoint_s=checkpoint_s,
    )


@record
class EngineFound:
    """What a run's engine showed."""

    engine: tuple[EngineRate, ...] = ()
    updates: tuple[UpdateTime, ...] = ()
    notes: tuple[str, ...] = ()  # what is missing, and why


def run_engine_rates(
    config: Config,
    device: torch.device,
    *,
    seconds: float,
    quick: bool,
    stop: Stop,
    folder: Path,
    card: str = "",
    card_part: float = 1.0,
    trainer_device: torch.device | None = None,
    before: Callable[[RolloutEngine, Course, WeightsRef], Sequence[Steady]] = lambda *_: (),
) -> EngineFound:
    """The run's engine in its steady state: decode rates, what a prompt costs those who decode, and what new weights cost.

    `card`: UUID of the GPU that it gets, `card_part`: so much of its memory; `trainer_device`: where weights come from, the engine's
    own by default; `before`: what it does before it is measured, and showed doing so with all of the run's samples.
    """
    spec = load_model_spec(config.model.path)
    prompt, response = _lengths(config)
    most = _most(config)
    levels = sorted({max(1, most // 4), most} if quick else {max(1, most // 16), max(1, most // 4), most})
    each = seconds / (len(levels) + 2)
    with scratch(folder) as made:
        source = weights_of(config, trainer_device or device)
        first = GenerationWriter(made).write(source.tensors, lineage=0, version=0, dtype=source.dtype)
        found = _Found(spec, engine_of(config))
        with _engine(config, device, card, card_part) as engine:
            course = Course(
                running=most,
                prompt_tokens=prompt,
                new_tokens=response,
                longest=max(2, config.sampling.max_new_tokens),
                vocab=spec.vocab,
            )
            worked = before(engine, course, first)
            plain: Steady | None = None
            for running in levels:
                one = replace(course, running=running)
                plain = steady(drive(engine, one, OneGeneration(first), seconds=each, should_stop=stop))
                if stop() or plain is None:
                    return found.all()
                if running == most:
                    plain = mean_of((*worked, plain))
                found.decoded(plain, running, prompt, prompts=running == most)
            assert plain is not None, "there is a level"
            one_card = trainer_device is None or trainer_device == device
            with published(config, source, first, made, plain, seconds=2 * each, one_card=one_card) as weights:
                turns = drive(
                    engine,
                    course,
                    weights,
                    seconds=2 * each,
                    should_stop=lambda: stop() or weights.failed is not None,
                    least_updates=LEAST_UPDATES,
                )
            if not stop():
                found.updated(updated(turns, plain), weights)
    release(device)
    return found.all()


def engine_of(config: Config) -> str:
    """The engine's name as rates have it."""
    return "torch" if config.rollout.engine == "torch" else engine_name(config)


class _Found:
    """Rows of the tables, as they are found."""

    def __init__(self, spec: ModelSpec, engine: str) -> None:
        self._spec, self._engine = spec, engine
        self._rates: list[EngineRate] = []
        self._updates: list[UpdateTime] = []
        self._notes: list[str] = []

    def all(self) -> EngineFound:
        return EngineFound(engine=tuple(self._rates), updates=tuple(self._updates), notes=tuple(self._notes))

    def decoded(self, plain: Steady, held: int, prompt: int, *, prompts: bool) -> None:
        running = max(1, round(plain.running))
        self._rate("decode", running, max(1, round(plain.context)), plain.running / plain.step_s, held, plain.slowest)
        if prompts and plain.prefill_s > 0:
            self._rate("prefill", running, prompt, 1 / plain.prefill_s)

    def updated(self, done: Updated | None, weights: Publishing) -> None:
        path: UpdatePath = "store" if weights.channel is None else "direct"
        if weights.failed is not None:
            self._notes.append(f"new weights ({path}) did not reach the engine: {first_line(weights.failed)}")
        elif done is None:
            self._notes.append(f"new weights ({path}) were not taken, or what ran was not back, in time")
        if done is None:
            return
        spec = self._spec
        self._updates.append(
            UpdateTime(path=path, model=spec.name, params=spec.params, swap_s=done.swap_s, engine=self._engine)
        )
        if done.recompute_s > 0 and done.prefix > 0:
            running, prefix = max(1, round(done.samples)), max(1, round(done.prefix))
            self._rate("recompute", running, prefix, 1 / done.recompute_s)

    def _rate(  # noqa: PLR0917 - one row of the table
        self,
        phase: Phase,
        running: int,
        context: int,
        tokens_per_s: float,
        held: int | None = None,
        slowest: float | None = None,
    ) -> None:
        self._rates.append(
            EngineRate(
                phase=phase,
                model=self._spec.name,
                params=self._spec.params,
                tp=1,
                running=running,
                context=context,
                tokens_per_s=tokens_per_s,
                engine=self._engine,
                held=held,
                slowest=slowest,
            )
        )


def _most(config: Config) -> int:
    """Most samples that the run's replica ever decodes at once."""
    batch = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    return min(config.sampling.max_running, (config.algorithm.bound + 1) * batch)


@contextlib.contextmanager
def _engine(config: Config, device: torch.device, card: str, card_part: float) -> Iterator[Any]:
    if config.rollout.engine == "torch":
        from runtime.rl.engine.factory import build_engine

        made = build_engine(config, device=str(device))
        try:
            yield made
        finally:
            made.close()
        return
    from runtime.rl.engine.vllm_factory import build_vllm_engine

    limited = config.rollout.model_copy(update={"start_deadline": min(START_S, config.rollout.start_deadline)})
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    if card:
        os.environ["CUDA_VISIBLE_DEVICES"] = card  # for the engine's process: torch here has made its choice
    try:
        engine = build_vllm_engine(
            config.model_copy(update={"rollout": limited}), gpus=1 if card else 0, card_part=card_part
        )
    finally:
        if before is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = before
    try:
        yield engine
    finally:
        engine.close()


def train_until(
    config: Config, device: torch.device, folder: Path, stop: Stop, *, begins: Begins = lambda _: None
) -> None:
    """The run's trainer at work until it is told to stop."""
    samples = config.algorithm.prompts_per_step * config.algorithm.responses_per_prompt
    _turns(config, device, samples, config.trainer.checkpoint_every_steps, WORK_S, stop, folder, begins)


def release(device: torch.device) -> None:
    """Give a card's memory back to whoever comes next."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def threads_of(part: str, device: torch.device) -> int:
    """Threads of torch as a run gives them: two to an unpaced trainer on a CPU, else one."""
    return 2 if part in ("run_trainer", "run_beside") and device.type == "cpu" else 1
