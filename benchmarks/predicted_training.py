"""The cost model's training formula beside hexctl's own trainer: tokens/s on H200, as kept in tests/benchmarks/readings.

    python -m benchmarks.predicted_training

prints the table of docs/gpu-runs.md. Nothing is fitted on these readings: `planner.cost.training` has products and attention from
the shipped H200 tables, 0.90 of products from another trainer, the attention kernel's share from its authors, and neither the
floor a layer nor the fixed part of a step that a profile measures. `bench_trainer` made the readings.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.trainer_work import PROMPT_SHARE, model_config
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.cost.context import context_of
from planner.cost.network import Spread
from planner.cost.training import StageShape, TrainerShape, train_cost
from planner.model import from_hf_config
from planner.problem import AttentionKernel, Capabilities, Problem
from planner.record import record
from planner.workload import Lengths, Workload
from runtime.config.problem import ROW_CEILING

READINGS = Path(__file__).resolve().parents[1] / "tests" / "benchmarks" / "readings"
KIND = "H200"
TOKENS = 65536  # of a step and card: `bench_trainer --tokens`


@record
class Run:
    """One reading: where it is kept, what was trained, by which kernel of attention."""

    file: str
    name: str
    gpus: int
    shape: str
    length: int
    kernel: AttentionKernel


RUNS = (
    Run(file="trainer-h200", name="ours_auto", gpus=1, shape="0.5b", length=2048, kernel="flash_2"),
    Run(file="trainer-h200", name="ours_auto", gpus=1, shape="1.5b", length=2048, kernel="flash_2"),
    Run(file="trainer-h200", name="ours_auto", gpus=1, shape="1.5b", length=8192, kernel="flash_2"),
    Run(file="trainer-h200", name="ours_cudnn", gpus=1, shape="1.5b", length=2048, kernel="cudnn"),
    Run(file="trainer-h200", name="ours_cudnn", gpus=1, shape="1.5b", length=8192, kernel="cudnn"),
    Run(file="trainer-2xh200", name="ours_cudnn", gpus=2, shape="1.5b", length=2048, kernel="cudnn"),
    Run(file="trainer-2xh200", name="ours_cudnn", gpus=2, shape="1.5b", length=8192, kernel="cudnn"),
    Run(file="trainer-2xh200", name="ours_auto", gpus=2, shape="7b", length=2048, kernel="cudnn"),
)


def measured(run: Run) -> float:
    """Tokens/s as read."""
    read = json.loads((READINGS / f"{run.file}.json").read_text())
    return float(read[f"{run.shape}_{run.length}_{run.name}_tokens_per_s"])


def predicted(run: Run) -> float:
    """Tokens/s by the formula: samples of one length, a sixteenth of it prompt."""
    kind = CATALOGUE[KIND]
    link = Link(latency_s=0.0, bytes_per_s=kind.link_bytes_per_s)
    cluster = Cluster(
        kinds={KIND: kind},
        devices=tuple(Device(id=f"d{i}", kind=KIND, node="n", index=i) for i in range(run.gpus)),
        same_kind=link,
        cross_kind=link,
    )
    prompt = int(run.length * PROMPT_SHARE)
    workload = Workload(
        prompts_per_step=TOKENS * run.gpus // run.length,
        responses_per_prompt=1,
        prompt=Lengths(mean_tokens=prompt, max_tokens=prompt),
        response=Lengths(mean_tokens=run.length - prompt, max_tokens=run.length - prompt),
    )
    capabilities = Capabilities(
        trainer="fsdp" if run.gpus > 1 else "replicated", train_row_tokens=ROW_CEILING, train_attention=run.kernel
    )
    model = from_hf_config(model_config(run.shape, None), name=run.shape)
    ctx = context_of(Problem(cluster=cluster, model=model, workload=workload, capabilities=capabilities))
    spread = Spread(nodes=1, local=link)
    stage = StageShape(kind=KIND, dp=run.gpus, tp=1, layers=model.layers, spread=spread)
    cost = train_cost(ctx, TrainerShape(stages=(stage,)), [1.0])
    assert cost is not None, "what ran fits"
    return TOKENS * run.gpus / cost.train_s


def table(runs: Sequence[Run] = RUNS) -> str:
    """Markdown; `off` is of seconds, positive where the formula is too slow."""
    out = [
        "| GPUs, shape, length | attention | predicted, tokens/s | measured | seconds off |\n|---|---|---|---|---|\n"
    ]
    words = {"flash_2": "variable lengths (FlashAttention-2)", "cudnn": "cuDNN"}
    for run in runs:
        told, was = predicted(run), measured(run)
        what = f"{run.gpus}, {run.shape.upper()}, {run.length:,}"
        out.append(f"| {what} | {words[run.kernel]} | {told:,.0f} | {was:,.0f} | {100 * (was / told - 1):+.0f} % |\n")
    return "".join(out)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m benchmarks.predicted_training", description=__doc__).parse_args()
    print(table(), end="")
