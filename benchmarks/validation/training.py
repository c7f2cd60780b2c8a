"""Training tokens/s of MPT models by llm-foundry (FSDP, bf16) on A100-40, A100-80 and H100.

Seconds of a micro-batch on one GPU as four terms with one coefficient each: products (forward, once more with activation
checkpointing, and the two of the backward pass, all from the tables), attention (3.5 forward passes' worth, 4.5 with
checkpointing), bytes moved between the products at the HBM rate, and the FSDP collectives of the kind's own host. The
coefficients are fitted per kind; every model size is predicted by a fit without it. Leave-one-kind-out uses the
coefficients of the other kinds.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.validation.figures import Figure, figure, groups, positive_fit
from planner.calibration.curves import Curves
from planner.calibration.shipped import curves_of, shipped
from planner.catalogue import CATALOGUE
from planner.cluster import Cluster, Device, Link
from planner.cost.context import context_of
from planner.cost.kernels import TABLE_HEAD_DIM
from planner.cost.network import Spread
from planner.cost.training import StageShape, head_s, layer_s
from planner.model import ModelSpec
from planner.problem import Problem
from planner.record import record
from planner.workload import Lengths, Workload

KINDS = {"a100_40gb": "A100-40", "a100_80gb": "A100-80", "h100_80gb": "H100"}
HOSTS = {
    "A100-40": "A100-80",
    "A100-80": "A100-80",
    "H100": "H100",
}  # whose collectives; A100-40 has no table of its own
SHAPES = {  # hidden, heads, layers: MPT's published configurations; the MLP is four times as wide, not gated
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
VOCAB, WIDTH, GPUS_A_HOST = 50368, 2, 8
BAR = 0.06


@record
class Row:
    """One measured run: seconds of a micro-batch on one GPU, and the four terms of its prediction."""

    kind: str
    model: str
    sequence: int
    gpus: int
    tokens: int  # of the micro-batch
    seconds: float
    terms: tuple[float, ...]
    planner_s: float  # what the planner's own formula says, FSDP's collectives behind compute
    flops: float  # of the model, forward and backward, as an MFU counts them


def _terms(c: Curves, model: str, sequence: int, batch: int, *, host: str, recompute: bool) -> tuple[float, ...]:
    hidden, heads, layers = SHAPES[model]
    rows = batch * sequence
    work = 0.0
    for n, k in ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)):
        work += (2 if recompute else 1) * float(c.gemm_s(rows, n, k))
        work += float(c.gemm_s(rows, k, n)) + float(c.gemm_s(n, k, rows))
    work = layers * work + 3 * float(c.gemm_s(rows, VOCAB, hidden))
    share = hidden / heads / TABLE_HEAD_DIM
    attention = layers * (4.5 if recompute else 3.5) * float(c.prefill_s(batch, sequence, heads * share))
    # Inputs and results of every product and norm, twice as many backward; and logits in 32 bits, four times.
    kept = layers * rows * hidden * WIDTH * 24 * (4 / 3 if recompute else 1) + rows * VOCAB * 16
    moved = kept / c.sheets["bf16"].hbm_bytes_per_s
    layer_bytes = 12 * hidden**2 * WIDTH
    ops = shipped(host).collectives
    gather = float(ops["all_gather", GPUS_A_HOST].seconds(layer_bytes))
    scatter = float(ops["reduce_scatter", GPUS_A_HOST].seconds(layer_bytes))
    return work, attention, moved, layers * (2 * gather + scatter)


def rows(raw: Path) -> list[Row]:
    """The bf16 rows."""
    out: list[Row] = []
    with (raw / "llmfoundry_train_throughput.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            if "bf16" not in r["precision"]:
                continue
            k = CATALOGUE[KINDS[r["gpu"]]]
            c = curves_of(k.name, k.peak_flops, k.hbm_bytes_per_s)
            assert c is not None, k.name
            sequence, batch = int(r["seqlen_t"]), int(float(r["microbatchsize"]))
            hidden, _, layers = SHAPES[r["model"]]
            tokens = batch * sequence
            recompute = r["activation_checkpointing"] == "True"
            terms = _terms(c, r["model"], sequence, batch, host=HOSTS[k.name], recompute=recompute)
            out.append(
                Row(
                    kind=k.name,
                    model=r["model"],
                    sequence=sequence,
                    gpus=int(r["gpus"]),
                    tokens=tokens,
                    seconds=tokens / float(r["throughput_t_s_gpu"]),
                    terms=terms,
                    planner_s=max(_planner_s(k.name, r["model"], sequence, batch, recompute=recompute), terms[3]),
                    flops=tokens * (6 * float(r["numparams"]) + 12 * layers * hidden * sequence),
                )
            )
    return out


def _planner_s(kind: str, model: str, sequence: int, batch: int, *, recompute: bool) -> float:
    """Seconds of a micro-batch by `planner.cost.training`. Its MLP is gated: two thirds of the width have as many FLOPs."""
    hidden, heads, layers = SHAPES[model]
    spec = ModelSpec(
        name=model, hidden=hidden, intermediate=round(8 * hidden / 3), layers=layers, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=VOCAB, tied=True,
    )  # fmt: skip
    one = Lengths(mean_tokens=1, max_tokens=1)
    rest = Lengths(mean_tokens=sequence - 1, max_tokens=sequence - 1)
    link = Link(latency_s=0.0, bytes_per_s=1e11)  # no card of one sends anything over it
    cluster = Cluster(
        kinds={kind: CATALOGUE[kind]},
        devices=(Device(id="d", kind=kind, node="n", index=0),),
        same_kind=link,
        cross_kind=link,
    )
    work = Workload(prompts_per_step=batch, responses_per_prompt=1, prompt=one, response=rest)
    ctx = context_of(Problem(cluster=cluster, model=spec, workload=work))
    stage = StageShape(kind=kind, dp=1, tp=1, layers=layers, spread=Spread(nodes=1, local=link))
    return layers * layer_s(ctx, stage, share=1.0, recompute=recompute) + head_s(ctx, stage, share=1.0)


def predicted(fitted: Sequence[Row], of: Sequence[Row]) -> np.ndarray:
    """Seconds of `of` with coefficients fitted on `fitted`."""
    terms = np.array([r.terms for r in fitted]).T
    out: np.ndarray = np.array([r.terms for r in of]) @ np.array(positive_fit(list(terms), [r.seconds for r in fitted]))
    return out


def constant_mfu(fitted: Sequence[Row], of: Sequence[Row]) -> np.ndarray:
    """Seconds of `of` at the median rate of `fitted`: one MFU a kind."""
    rate = float(np.median([r.flops / r.seconds for r in fitted]))
    return np.array([r.flops for r in of]) / rate


def without_each_size(of: Sequence[Row], how: object) -> np.ndarray:
    """Predictions of every row by a fit without its model size."""
    assert callable(how)
    out = np.zeros(len(of))
    for model, at in groups(r.model for r in of).items():
        out[at] = how([r for r in of if r.model != model], [of[i] for i in at])
    return out


def run(raw: Path) -> tuple[list[Figure], dict[str, float]]:
    """Figures, and the coefficients fitted on all rows of each kind."""
    out: list[Figure] = []
    constants: dict[str, float] = {}
    every = rows(raw)
    name = "Training, llm-foundry"
    for kind in KINDS.values():
        mine = [r for r in every if r.kind == kind]
        seconds = np.array([r.seconds for r in mine])
        base = figure(
            name,
            f"{kind}, constant MFU",
            without_each_size(mine, constant_mfu),
            seconds,
            fitted="its other model sizes",
        )
        got = without_each_size(mine, predicted)
        bar = min(BAR, base.median)  # it must beat the constant too
        out += [base, figure(name, kind, got, seconds, fitted="its other model sizes", median=bar)]
        cuts = {
            ", sequences to 2048": [r.sequence <= 2048 for r in mine],
            ", sequences over 2048": [r.sequence > 2048 for r in mine],
            ", 128 GPUs and more": [r.gpus >= 128 for r in mine],
        }
        for cut, chosen in cuts.items():
            if any(chosen):
                out.append(figure(name, kind + cut, got[chosen], seconds[chosen], fitted="its other model sizes"))
        plain = np.array([r.planner_s for r in mine])
        for cut, chosen in {"": [True] * len(mine), **cuts}.items():
            if any(chosen):
                name_ = "Training, the planner's own formula"
                out.append(
                    figure(name_, kind + cut, plain[chosen], seconds[chosen], fitted="0.90 and 0.48, over all rows")
                )
        others = [r for r in every if r.kind != kind]
        out.append(
            figure(f"{name}, held-out kind", kind, predicted(others, mine), seconds, fitted="the other two kinds")
        )
        out.append(
            figure(
                f"{name}, held-out kind",
                f"{kind}, constant MFU",
                constant_mfu_of_peak(others, mine),
                seconds,
                fitted="the other two kinds",
            )
        )
        terms = np.array([r.terms for r in mine]).T
        for term, value in zip(
            ("products", "attention", "bytes", "collectives"), positive_fit(list(terms), seconds), strict=True
        ):
            constants[f"{kind}: coefficient of {term}"] = value
    return out, constants


def constant_mfu_of_peak(fitted: Sequence[Row], of: Sequence[Row]) -> np.ndarray:
    """The same across kinds: the median share of the peak."""
    share = float(np.median([r.flops / r.seconds / CATALOGUE[r.kind].peak_flops for r in fitted]))
    return np.array([r.flops / CATALOGUE[r.kind].peak_flops for r in of]) / share
