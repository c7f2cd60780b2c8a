"""One rank of a trainer in a process of its own, for the tests: does what its plan (a JSON file) says and writes what came out.

python -m tests.rl.gang_rank PLAN RANK
"""

import errno
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo

from runtime.config.schema import AlgorithmSection
from runtime.rl.model import DTYPES, DecoderConfig, build_seeded
from runtime.rl.train import checkpoint
from runtime.rl.train.gang import Gang, GangSpec
from runtime.rl.train.meeting import Meeting
from runtime.rl.train.ranks import Leader, follow
from runtime.rl.train.trainer import TorchTrainer
from runtime.rl.types import SampleId, TrainBatch, TrainSample
from runtime.rl.weights.sealed import TensorEntry


def shapes() -> dict[str, object]:
    """A decoder whose rows divide by neither 2 nor 3."""
    return {
        "model_type": "qwen3",
        "vocab_size": 11,
        "hidden_size": 10,
        "intermediate_size": 17,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 10,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "initializer_range": 0.2,
        "tie_word_embeddings": False,
    }


def batch(step: int, *, groups: int = 3, members: int = 3) -> TrainBatch:
    """Samples of unlike lengths; one of them has no trained token."""
    r = torch.Generator().manual_seed(step)

    def numbers(n: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 11, (n,), generator=r).tolist())

    samples = []
    for g in range(groups):
        prompt = numbers(2 + g)
        for m in range(members):
            tokens = numbers(1 + (5 * g + 3 * m) % 7)
            noise = torch.rand(len(tokens), 2, generator=r, dtype=torch.float64).tolist()
            samples.append(
                TrainSample(
                    sample=SampleId(step * groups + g, m),
                    prompt_tokens=prompt,
                    tokens=tokens,
                    logprobs=tuple(-2.4 + a for a, _ in noise),
                    versions=tuple(max(0, step - int(3 * b)) for _, b in noise),
                    weights=(0.0 if (g, m) == (1, 1) else 1.0,) * len(tokens),
                    reward=float(m % 2),
                    advantage=(1.0, -0.5, 0.3)[m],
                    finish="eos",
                )
            )
    return TrainBatch(step=step, ids_hash=f"h{step}", samples=tuple(samples))


def build(plan: dict[str, Any], gang: Gang | None) -> TorchTrainer:
    """The trainer of a plan."""
    folder = Path(plan["folder"])
    return TorchTrainer(
        build_seeded(DecoderConfig.from_hf(shapes()), 0, DTYPES[plan["dtype"]]),
        algorithm=AlgorithmSection.model_validate(plan["algorithm"]),
        temperature=1.0,
        checkpoints=folder / "checkpoints",
        weights=folder / "weights",
        gang=gang,
        write=full_disk if gang is not None and gang.rank == plan.get("full") else checkpoint.write,
    )


def full_disk(path: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorEntry]:
    """Of a rank that `full` names."""
    path.write_bytes(b"half of it")
    raise OSError(errno.ENOSPC, "no space left on device")


def lead(trainer: TorchTrainer | Leader, plan: dict[str, Any]) -> list[dict[str, float]]:
    """Restore, then the steps, each with its checkpoint, `beside` the next one or not; the last is published."""
    restore = plan["restore"]
    trainer.restore(restore, lineage=0)
    metrics = []
    first = 0 if restore is None else restore + 1
    for step in range(first, plan["until"]):
        metrics.append(dict(trainer.train_step(batch(step))))
        if not plan["beside"]:
            trainer.save_checkpoint(f"h{step}")
            continue
        if step > first:
            trainer.seal_checkpoint()  # of the step before, written while this one was made
        assert trainer.begin_checkpoint(f"h{step}")
    if plan["beside"]:
        trainer.seal_checkpoint()
    looked_at = trainer.full_weights()
    next(looked_at)
    looked_at.close()  # the other ranks go through it all the same
    trainer.publish()
    return metrics


def life(file: str, rank: int) -> None:
    """A rank's life; standard error goes to a file beside the plan."""
    plan = json.loads(Path(file).read_text())
    err = os.open(Path(plan["folder"]) / f"rank-{plan['epoch']}-{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(err, 2)
    try:
        _live(plan, rank)
    except BaseException:  # noqa: BLE001 - the parent reads it in the file
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _live(plan: dict[str, Any], rank: int) -> None:
    torch.set_num_threads(1)
    if rank in plan.get("absent", ()):
        return
    meeting = Meeting(
        file=Path(plan["folder"]) / "gang" / f"{plan['epoch']}.json",
        deadline_s=plan["meet_s"],
        names=tuple(f"dev{r}" for r in range(len(plan["shares"]))),
    )
    spec = GangSpec(rank=rank, shares=tuple(plan["shares"]), meeting=meeting, collective_s=plan["collective_s"])
    gang = Gang(spec, torch.device("cpu"))
    try:
        trainer = build(plan, gang)
        if rank == plan.get("dies"):
            _die_in(trainer, plan["dies_in"])
        if rank == 0:
            leader = Leader(trainer, gang)
            metrics = lead(leader, plan)
            leader.close()
            Path(plan["out"]).write_text(json.dumps(metrics))
        else:
            follow(trainer, gang)
    finally:
        gang.close()


def _die_in(trainer: TorchTrainer, method: str) -> None:
    """The process is killed the second time that it comes to `method`."""
    real, calls = getattr(trainer, method), iter(range(10))

    def killed(*args: Any, **named: Any) -> Any:
        if next(calls):
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **named)

    setattr(trainer, method, killed)
