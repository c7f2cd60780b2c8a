"""The data plane's parts on one thread: a decode step and a trainer step of the default model, an exchange with flow's ledger."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.timing import median_ms
from runtime.config.load import load_config
from runtime.paths import RunPaths
from runtime.rl.engine.factory import build_engine
from runtime.rl.train.factory import build_trainer
from runtime.rl.types import Lease, SampleId, TrainBatch, TrainSample

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "local.toml"
PROMPT = tuple(range(2, 14))


def _batch(step: int, samples: int, tokens: int) -> TrainBatch:
    rows = tuple(
        TrainSample(
            sample=SampleId(i // 8, i % 8),
            prompt_tokens=PROMPT,
            tokens=tuple(2 + (i + t) % 10 for t in range(tokens)),
            logprobs=(-2.7,) * tokens,
            versions=(step,) * tokens,
            weights=(1.0,) * tokens,
            reward=float(i % 2),
            advantage=1.0 if i % 2 else -1.0,
            finish="eos",
        )
        for i in range(samples)
    )
    return TrainBatch(step=step, ids_hash=f"h{step}", samples=rows)


def run() -> dict[str, float]:
    """Milliseconds."""
    torch.set_num_threads(1)
    config = load_config(CONFIG).config
    with TemporaryDirectory() as folder:
        paths = RunPaths(folder=Path(folder), short=Path(folder))
        trainer = build_trainer(config, paths)
        ref = trainer.publish()
        figures: dict[str, float] = {}
        for running in (32, 96):
            engine = build_engine(load_config(CONFIG, overrides={"sampling.max_running": str(running)}).config)
            engine.load_weights(ref)

            def decode(engine=engine, running=running) -> None:  # type: ignore[no-untyped-def]
                short = running - len(engine.held())
                if short:
                    taken = {s.member for s in engine.held()}
                    free = [m for m in range(running) if m not in taken]
                    engine.add(
                        [Lease(sample=SampleId(0, m), epoch=1, prompt_tokens=PROMPT, max_new_tokens=12) for m in free]
                    )
                engine.step()

            figures[f"decode_step_{running}_running_ms"] = median_ms(decode, repeats=40, warm_up=5)
        figures["trainer_step_256_samples_ms"] = median_ms(
            lambda: trainer.train_step(_batch(trainer.version, 256, 9)), repeats=9, warm_up=2
        )
        figures["checkpoint_ms"] = median_ms(
            lambda: trainer.save_checkpoint(f"h{trainer.version}"), repeats=5, warm_up=0
        )
        figures["publish_ms"] = median_ms(
            lambda: trainer.train_step(_batch(trainer.version, 8, 2)) and trainer.publish(), repeats=5, warm_up=0
        )
    return figures
