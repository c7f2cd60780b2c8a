"""Training tokens/s of MPT models by llm-foundry (FSDP, bf16) on A100-40, A100-80 and H100, and of GPT models by
FlashAttention-2's authors on A100-80.

Seconds of a micro-batch on one GPU as four terms with one coefficient each: products (forward, once more with activation
checkpointing, and the two of the backward pass, all from the tables), attention (`attention_passes`, by FlashAttention-2),
bytes moved between the products at the HBM rate, and the FSDP collectives of the kind's own host. The coefficients are fitted
per kind; every model size is predicted by a fit without it. Leave-one-kind-out uses the coefficients of the other kinds.

The planner's own formula is told beside it. What llm-foundry's attention reaches of FlashAttention-2 is the one figure that is
fitted for it, on A100-80; A100-40 and H100 see none of their own.
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
from planner.cost.assumptions import Assumptions
from planner.cost.context import Context, context_of
from planner.cost.flops import kernel_share
from planner.cost.kernels import TABLE_HEAD_DIM
from planner.cost.network import Spread
from planner.cost.training import StageShape, attention_passes, head_s, layer_s
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
FITTED_ON = "A100-80"
LLM_FOUNDRY_ATTENTION = 0.62
"""Of FlashAttention-2's rate: 1 over the coefficient of attention on `FITTED_ON`. Kernels before it reach half (backward) to
three quarters (forward, Triton's) of it (FlashAttention-2, section 4.1)."""

FLASH_RUNS = (  # FlashAttention-2 (arXiv 2307.08691), Table 1: hidden, heads, layers, tokens a sequence, model TFLOP/s a GPU
    (2048, 16, 24, 2048, 196),
    (2048, 16, 24, 8192, 220),
    (2560, 20, 32, 2048, 205),
    (2560, 20, 32, 8192, 225),
)
FLASH_TOKENS = 16384  # of a micro-batch: as in its kernel figures, as it does not say
NO_LINK = Link(latency_s=0.0, bytes_per_s=1e11)  # a card alone sends nothing over it
Shape = tuple[int, int, int]  # hidden, heads, layers


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


def _terms(
    ctx: Context, c: Curves, shape: Shape, sequence: int, batch: int, *, kind: str, recompute: bool
) -> tuple[float, ...]:
    hidden, heads, layers = shape
    rows = batch * sequence
    work = 0.0
    for n, k in ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)):
        work += (2 if recompute else 1) * float(c.gemm_s(rows, n, k))
        work += float(c.gemm_s(rows, k, n)) + float(c.gemm_s(n, k, rows))
    work = layers * work + 3 * float(c.gemm_s(rows, VOCAB, hidden))
    share = hidden / heads / TABLE_HEAD_DIM
    passes = attention_passes(ctx, recompute) / kernel_share(ctx, ctx.kind(kind))
    attention = layers * passes * float(c.prefill_s(batch, sequence, heads * share))
    # Inputs and results of every product and norm, twice as many backward; and logits in 32 bits, four times.
    kept = layers * rows * hidden * WIDTH * 24 * (4 / 3 if recompute else 1) + rows * VOCAB * 16
    moved = kept / c.sheets["bf16"].hbm_bytes_per_s
    layer_bytes = 12 * hidden**2 * WIDTH
    ops = shipped(HOSTS[kind]).collectives
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
            hidden, _, layers = shape = SHAPES[r["model"]]
            tokens = batch * sequence
            recompute = r["activation_checkpointing"] == "True"
            ctx = _context(k.name, shape, sequence, batch, Assumptions(train_attention=LLM_FOUNDRY_ATTENTION))
            terms = _terms(ctx, c, shape, sequence, batch, kind=k.name, recompute=recompute)
            out.append(
                Row(
                    kind=k.name,
                    model=r["model"],
                    sequence=sequence,
                    gpus=int(r["gpus"]),
                    tokens=tokens,
                    seconds=tokens / float(r["throughput_t_s_gpu"]),
                    terms=terms,
                    planner_s=max(_planner_s(ctx, k.name, recompute=recompute), terms[3]),
                    flops=tokens * (6 * float(r["numparams"]) + 12 * layers * hidden * sequence),
                )
            )
    return out


def _context(kind: str, shape: Shape, sequence: int, batch: int, assumptions: Assumptions | None = None) -> Context:
    """One GPU that trains on a micro-batch. The planner's MLP is gated: two thirds of the width have as many FLOPs."""
    hidden, heads, layers = shape
    spec = ModelSpec(
        name="gpt", hidden=hidden, intermediate=round(8 * hidden / 3), layers=layers, heads=heads, kv_heads=heads,
        head_dim=hidden // heads, vocab=VOCAB, tied=True,
    )  # fmt: skip
    one = Lengths(mean_tokens=1, max_tokens=1)
    rest = Lengths(mean_tokens=sequence - 1, max_tokens=sequence - 1)
    cluster = Cluster(
        kinds={kind: CATALOGUE[kind]},
        devices=(Device(id="d", kind=kind, node="n", index=0),),
        same_kind=NO_LINK,
        cross_kind=NO_LINK,
    )
    work = Workload(prompts_per_step=batch, responses_per_prompt=1, prompt=one, response=rest)
    return context_of(Problem(cluster=cluster, model=spec, workload=work), assumptions)


def _planner_s(ctx: Context, kind: str, *, recompute: bool) -> float:
    """Seconds of a micro-batch by `planner.cost.training`."""
    layers = ctx.model.layers
    stage = StageShape(kind=kind, dp=1, tp=1, layers=layers, spread=Spread(nodes=1, local=NO_LINK))
    return layers * layer_s(ctx, stage, share=1.0, recompute=recompute) + head_s(ctx, stage, share=1.0)


def flash_runs() -> tuple[list[float], list[float]]:
    """(predicted, measured) seconds of a micro-batch in FlashAttention-2's own training runs, nothing fitted. Exchange of gradients
    is left out, as how often it happens is not said."""
    predicted, measured = [], []
    for hidden, heads, layers, sequence, tflops in FLASH_RUNS:
        batch = FLASH_TOKENS // sequence
        ctx = _context("A100-80", (hidden, heads, layers), sequence, batch)
        # As its section 4.2 counts: attention in full, though half of it is masked.
        params = 12 * layers * hidden**2 + VOCAB * hidden
        flops = FLASH_TOKENS * (6 * params + 12 * layers * hidden * sequence)
        predicted.append(_planner_s(ctx, "A100-80", recompute=False))
        measured.append(flops / (tflops * 1e12))
    return predicted, measured


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
                said = (
                    f"0.90 over all rows; {LLM_FOUNDRY_ATTENTION} {'here' if kind == FITTED_ON else f'on {FITTED_ON}'}"
                )
                out.append(figure(name_, kind + cut, plain[chosen], seconds[chosen], fitted=said))
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
    got, seconds = (np.array(x) for x in flash_runs())
    out.append(figure("Training, FlashAttention-2's own runs", "A100-80", got, seconds, fitted="0.90 on llm-foundry"))
    return out, constants


def constant_mfu_of_peak(fitted: Sequence[Row], of: Sequence[Row]) -> np.ndarray:
    """The same across kinds: the median share of the peak."""
    share = float(np.median([r.flops / r.seconds / CATALOGUE[r.kind].peak_flops for r in fitted]))
    return np.array([r.flops / CATALOGUE[r.kind].peak_flops for r in of]) / share
