"""A trainer of several ranks on this machine's devices: does it do what one does, how fast, and what a death does to it.

    python -m benchmarks.check_ranks --model configs/models/qwen2.5-0.5b.json --ranks 2 --json ranks.json

Random weights and made-up samples. One rank is run first, then the ranks together: loss and gradient norm of each step beside
each other, seconds of step, checkpoint and publication, peak memory a rank. At the end rank 1 is killed in mid-step, and the
seconds count until the last process has ended by itself: null where one had not, so long after the deadline of an exchange that
nothing more is to be expected. Figures are told, and written, as they come. Without GPUs the ranks are CPU processes over Gloo.
"""

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ending import end_when_told
from runtime.config.schema import AlgorithmSection, TrainerSection

LIMIT_S = 240.0  # of one run of all ranks, and for rank 1 to die
POLL_S = 0.2
AFTER_S = 60.0  # beyond the deadline of an exchange, for the ranks that are left to end


def main() -> None:
    """Run the check; exit code 1 when the ranks do not agree with one, or do not end after the death of one."""
    options = _options()
    end_when_told()
    with tempfile.TemporaryDirectory(prefix="ranks-", dir=options.folder) as folder:
        one = _run(options, Path(folder) / "one", ranks=1)
        print("one rank:", json.dumps(one[0]), flush=True)
        several = _run(options, Path(folder) / "several", ranks=options.ranks)
        print(f"{options.ranks} ranks:", json.dumps(several[0]), flush=True)
        found = _agreement(options, one[0], several[0])
        _tell(options, found)
        killed = _run(options, Path(folder) / "killed", ranks=options.ranks, kill=True)
    _tell(options, found | {"seconds_from_kill_to_the_last_end": killed[1]})
    apart = max(found["largest_relative_loss_difference"], found["largest_relative_grad_norm_difference"])
    sys.exit(0 if apart < options.tolerance and killed[1] is not None else 1)


def _agreement(options: argparse.Namespace, one: list[Any], several: list[Any]) -> dict[str, Any]:
    """The ranks together beside one."""
    off = max(abs(a["loss"] - b["loss"]) / max(abs(a["loss"]), 1e-3) for a, b in zip(one, several, strict=True))
    norms = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(one, several, strict=True))
    return {
        "model": str(options.model),
        "ranks": options.ranks,
        "largest_relative_loss_difference": off,
        "largest_relative_grad_norm_difference": norms,
        "one": one,
        "several": several,
    }


def _tell(options: argparse.Namespace, found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=1), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("configs/models/qwen2.5-0.5b.json"))
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--shares", type=json.loads, default=None, help="of the tokens by rank, as JSON; default: equal"
    )
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024, help="of a sample")
    parser.add_argument("--micro-batch-tokens", type=int, default=16384)
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--deadline", type=float, default=60.0, help="seconds of one exchange between ranks")
    parser.add_argument("--folder", type=Path, default=None, help="where checkpoints go; default: the temp folder")
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--rank", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--kill", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(
    options: argparse.Namespace, folder: Path, *, ranks: int, kill: bool = False
) -> tuple[list[Any], float | None]:
    """All ranks to their end. Returns rank 0's figures and, of a run with a death, the seconds from it to the last end; None where
    that did not come."""
    folder.mkdir(parents=True)
    started: list[subprocess.Popen[bytes]] = []
    try:
        for r in range(ranks):
            mine = ["--rank", str(r), "--world", str(ranks), "--work", str(folder), *(["--kill"] if kill else [])]
            env = os.environ | {"CUDA_VISIBLE_DEVICES": _card(r)} if _card(r) else None
            command = [sys.executable, "-m", "benchmarks.check_ranks", *sys.argv[1:], *mine]
            started.append(subprocess.Popen(command, env=env))
        if kill:
            return [], _seconds_to_the_end(started, options.deadline)
        until_s = time.monotonic() + LIMIT_S
        while any(p.poll() is None for p in started) and not any(p.returncode for p in started):
            if time.monotonic() > until_s:
                raise SystemExit(f"the ranks did not end within {LIMIT_S:.0f} s")
            with contextlib.suppress(subprocess.TimeoutExpired):
                next(p for p in started if p.poll() is None).wait(POLL_S)
        if any(codes := [p.returncode for p in started]):
            raise SystemExit(f"ranks ended with {codes}")
    finally:
        for p in started:
            p.kill()
            p.wait()
    return json.loads((folder / "figures.json").read_text()), None


def _seconds_to_the_end(started: list["subprocess.Popen[bytes]"], deadline_s: float) -> float | None:
    """From the death of rank 1 to the last end."""
    try:
        code = started[1].wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
    if code != -signal.SIGKILL:
        raise SystemExit(f"rank 1 was to be killed and ended with {code}")
    ended_s = time.monotonic()
    try:
        for p in started:
            p.wait(max(POLL_S, ended_s + deadline_s + AFTER_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"a rank lives {time.monotonic() - ended_s:.0f} s after the death of another", flush=True)
        return None
    return time.monotonic() - ended_s


def _card(rank: int) -> str:
    """The rank's GPU as CUDA_VISIBLE_DEVICES has it; "" without GPUs."""
    try:
        listed = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], check=False, capture_output=True, text=True
        )
    except OSError:
        return ""
    cards = listed.stdout.split()
    return cards[rank] if listed.returncode == 0 and rank < len(cards) else ""


def _rank(options: argparse.Namespace) -> None:
    import torch

    from runtime.rl.model import DTYPES, build_seeded, load_config
    from runtime.rl.train.gang import Gang, GangSpec
    from runtime.rl.train.meeting import Meeting
    from runtime.rl.train.ranks import Leader, follow
    from runtime.rl.train.trainer import TorchTrainer

    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    gang = None
    if options.world > 1:
        shares = tuple(options.shares or [1 / options.world] * options.world)
        meeting = Meeting(file=options.work / "meeting.json", deadline_s=300.0)
        spec = GangSpec(rank=options.rank, shares=shares, meeting=meeting, collective_s=options.deadline)
        gang = Gang(spec, device)
    config = load_config(options.model)
    trainer = TorchTrainer(
        build_seeded(config, 0, DTYPES[options.dtype]),
        algorithm=AlgorithmSection(learning_rate=1e-5, micro_batch_tokens=options.micro_batch_tokens),
        compute=TrainerSection(compile=options.compile),
        temperature=1.0,
        checkpoints=options.work / "checkpoints",
        weights=options.work / "weights",
        device=device,
        gang=gang,
    )
    if options.kill and options.rank == 1:
        _die_in_mid_step(trainer)
    if gang is not None and gang.rank:
        follow(trainer, gang)
        return
    work = trainer if gang is None else Leader(trainer, gang)
    work.restore(None, lineage=0)
    figures, vocab = [], config.vocab
    for step in range(options.steps):
        began = time.perf_counter()
        metrics = dict(work.train_step(_batch(options, step, vocab)))
        trained = time.perf_counter()
        work.save_checkpoint(f"h{step}")
        saved = time.perf_counter()
        work.publish()
        published = time.perf_counter()
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        figures.append(
            {k: metrics[k] for k in ("loss", "grad_norm", "micro_batches", "gradients_s", "step_s")}
            | {
                "tokens_per_s": options.samples * options.tokens / (trained - began),
                "checkpoint_s": saved - trained,
                "publish_s": published - saved,
                "peak_bytes_of_rank_0": peak,
            }
        )
    (options.work / "figures.json").write_text(json.dumps(figures))
    if isinstance(work, Leader):
        work.close()


def _die_in_mid_step(trainer: Any) -> None:
    real, calls = trainer._gradients.compute, iter(range(100))

    def killed(*args: Any, **named: Any) -> Any:
        if next(calls) == 1:
            named["on_row"] = lambda i, of: os.kill(os.getpid(), signal.SIGKILL) if i == of - 1 else None
        return real(*args, **named)

    trainer._gradients.compute = killed


def _batch(options: argparse.Namespace, step: int, vocab: int) -> Any:
    import torch

    from runtime.rl.types import SampleId, TrainBatch, TrainSample

    r = torch.Generator().manual_seed(step)
    samples = []
    for i in range(options.samples):
        size = int(torch.randint(options.tokens // 2, options.tokens * 3 // 2, (1,), generator=r))
        tokens = tuple(torch.randint(0, vocab, (size,), generator=r).tolist())
        prompt = size // 4
        made = size - prompt
        samples.append(
            TrainSample(
                sample=SampleId(step * options.samples + i, 0),
                prompt_tokens=tokens[:prompt],
                tokens=tokens[prompt:],
                logprobs=(-math.log(vocab),) * made,
                versions=(step,) * made,
                weights=(1.0,) * made,
                reward=float(i % 2),
                advantage=(1.0, -0.5, 0.7)[i % 3],
                finish="eos",
            )
        )
    return TrainBatch(step=step, ids_hash=f"h{step}", samples=tuple(samples))


if __name__ == "__main__":
    chosen = _options()
    if chosen.rank is None:
        main()
    else:
        _rank(chosen)
