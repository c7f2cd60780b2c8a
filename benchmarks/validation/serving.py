"""Decode time per token of Llama-3.1-70B fp8 by vLLM, from the kernels' tables.

A step is 80 layers of products (fp8), attention and two all-reduces, and the vocabulary projection. Two things a sum of
kernels does not know: prompts of new samples are computed in between (an engine that starts b samples every `osl` steps
spends b / osl of a prefill a step, of which a running sample feels a share), and kernels launched from a CUDA graph start
sooner than alone (a credit a layer). Both are fitted on one card and tested on the other.
"""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.curves import KINDS
from benchmarks.validation.figures import Figure, figure
from planner.calibration.curves import Curves
from planner.calibration.shipped import curves_of
from planner.catalogue import CATALOGUE
from planner.cost.assumptions import Assumptions
from planner.cost.kernels import decode_attention_s, head_s, prefill_attention_s, products_s, reduce_s
from planner.model import ModelSpec
from planner.record import record

LLAMA_70B = ModelSpec(
    name="Llama-3.1-70B", hidden=8192, intermediate=28672, layers=80, heads=64, kv_heads=8, head_dim=128, vocab=128256,
    dtype_bytes=1,
)  # fmt: skip
BAR = 0.12
CARDS = ("H100", "H200")


@record
class Run:
    """One measured run, and what the tables say of it (milliseconds)."""

    kind: str
    prompt: int
    response: int
    running: float
    tpot_ms: float  # measured
    kernels_ms: float  # one step
    prefill_ms: float  # prefill that falls on one step

    def predicted(self, share: float, credit_ms: float) -> float:
        """Milliseconds a token with a share of prefill felt and a credit a layer."""
        return self.kernels_ms + share * self.prefill_ms - credit_ms * LLAMA_70B.layers


def curves(kind: str) -> Curves:
    """The shipped curves of a kind of the catalogue."""
    k = CATALOGUE[kind]
    found = curves_of(kind, k.peak_flops, k.hbm_bytes_per_s)
    assert found is not None, kind
    return found


def _reduces(c: Curves, rows: float, tp: int) -> float:
    found = reduce_s(c, LLAMA_70B, rows, tp)
    assert found is not None, "the hosts of both cards were measured"
    return 2 * float(found)


def step_s(kind: str, running: float, context: float, tp: int) -> float:
    """Seconds of one decode step: the plain sum of its kernels."""
    c, m = curves(kind), LLAMA_70B
    layer = float(products_s(c, m, running, tp, "fp8")) + float(decode_attention_s(c, m, running, context, tp=tp))
    return m.layers * (layer + _reduces(c, running, tp)) + float(head_s(c, m, running, tp))


def prefill_s(kind: str, tokens: float, tp: int) -> float:
    """Seconds of the prefill of one prompt."""
    c, m = curves(kind), LLAMA_70B
    layer = float(products_s(c, m, tokens, tp, "fp8")) + float(prefill_attention_s(c, m, 1, tokens, tp))
    return m.layers * (layer + _reduces(c, tokens, tp))


def fitting(kind: str, clients: float, sequence: float, tp: int) -> float:
    """Samples that run at once: no more than fit in KV memory, the others queue."""
    a, memory = Assumptions(), CATALOGUE[kind].memory_bytes
    usable = tp * (memory * a.rollout_memory_share - a.overhead(memory)) - LLAMA_70B.weight_bytes
    return min(clients, usable / (2 * LLAMA_70B.kv_bytes_per_token * sequence))  # weights are fp8, the cache is bf16


def runs(raw: Path) -> list[Run]:
    """The usable public rows."""
    out: list[Run] = []
    with (raw / "aic_e2e_serving_agg.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            kind = KINDS.get(r["system"], "")
            if r["backend"] != "vllm" or "Llama-3.1-70B" not in r["model_path"] or kind not in CARDS:
                continue
            prompt, response, tp = int(r["isl"]), int(r["osl"]), int(float(r["tp_size"]))
            context = prompt + response / 2
            running = fitting(kind, float(r["batch_size"]), context, tp)
            out.append(
                Run(
                    kind=kind,
                    prompt=prompt,
                    response=response,
                    running=running,
                    tpot_ms=float(r["silicon_tpot_ms"]),
                    kernels_ms=1e3 * step_s(kind, running, context, tp),
                    prefill_ms=1e3 * running / response * prefill_s(kind, prompt, tp),
                )
            )
    return out


def fit(of: Sequence[Run]) -> tuple[float, float]:
    """(share of prefill felt, credit in ms a layer) with the least relative squares."""
    measured = np.array([r.tpot_ms for r in of])
    columns = np.array([[r.prefill_ms, -LLAMA_70B.layers] for r in of]) / measured[:, None]
    left = 1 - np.array([r.kernels_ms for r in of]) / measured
    share, credit = np.linalg.lstsq(columns, left, rcond=None)[0]
    return float(share), float(credit)


def run(raw: Path) -> tuple[list[Figure], dict[str, float]]:
    """Figures, and what was fitted."""
    found = runs(raw)
    out: list[Figure] = []
    constants: dict[str, float] = {}
    for kind in CARDS:
        mine = [r for r in found if r.kind == kind]
        other = next(c for c in CARDS if c != kind)
        measured = [r.tpot_ms for r in mine]
        name = "Decode per token, Llama-3.1-70B fp8, vLLM"
        out.append(figure(name, f"{kind}, sum of kernels", [r.kernels_ms for r in mine], measured, fitted="nothing"))
        share, credit = fit([r for r in found if r.kind == other])
        constants[f"share of prefill felt, fitted on {other}"] = share
        constants[f"credit a layer in microseconds, fitted on {other}"] = 1e3 * credit
        got = [r.predicted(share, credit) for r in mine]
        part = f"{kind}, with interference"
        out.append(figure(name, part, got, measured, fitted=f"two terms on {other}", mean=BAR))
        for prompt, response in sorted({(r.prompt, r.response) for r in mine}):
            rows = [i for i, r in enumerate(mine) if (r.prompt, r.response) == (prompt, response)]
            part = f"{kind}, {prompt}+{response}"
            out.append(
                figure(name, part, [got[i] for i in rows], [measured[i] for i in rows], fitted=f"two terms on {other}")
            )
    return out, constants
