"""Pipelines on uniform and on mixed GPUs (Sailor's measured iterations), from measured seconds of single layers.

These runs are fp32 without flash attention, so only the structure is tested: how stages, borders between them and the
exchange of gradients add up (`planner.cost.pipeline`). Layer seconds, link rates and seconds of gradient exchange are the
source's own measurements; nothing is fitted. Rows that the source copied or mislabelled are left out.

The table of layers holds OPT-350's seconds a second time under GPT-Neo-2.7's name on GH200 (all 63 rows, of 26 layers where
that model has 34): so does the source's file at the commit it was taken from. Another commit of the same file has seconds of
34 layers; those stand in `sailor_gpt_neo_gh200.csv` and take the copy's place.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.validation.figures import Figure, figure
from planner.cost.pipeline import pipeline_time
from planner.record import record

HIDDEN = {"OPT-350": 1024, "GPT-Neo-2.7": 2560}
WIDTH = 4  # fp32
RANK_BAR = 0.9
OWN = Path(__file__).with_name("sailor_gpt_neo_gh200.csv")  # of eth-easl/sailor @ 142ddeb1, micro-batches to 8
OWN_OF = ("GPT-Neo-2.7", "GH-96")
Layers = Mapping[tuple[str, str, int, int, str], float]
Links = Mapping[tuple[str, int, str, int], tuple[float, float, float]]


@record
class Iteration:
    """One measured run, and its stages as replicas of (GPU kind, GPUs)."""

    name: str
    cluster: str
    model: str
    stages: tuple[tuple[tuple[str, int], ...], ...]
    layers: tuple[int, ...]
    batch: int  # sequences a micro-batch
    rounds: int
    sequence: int
    seconds: float
    exchange_s: float  # of gradients, measured


def layer_seconds(raw: Path) -> Layers:
    """Forward and backward seconds by (model, kind, micro-batch, TP, layer); GPT-Neo's own on GH200."""
    found: dict[tuple[str, str, int, int, str], float] = {}
    for path in (raw / "sailor_layer_times.csv", OWN):
        with path.open(newline="") as file:
            for r in csv.DictReader(file):
                of = OWN_OF if path == OWN else (r["model"], r["gpu"])
                if path == OWN or of != OWN_OF:
                    key = (*of, int(r["micro_batch"]), int(r["tp"]), r["layer_kind"])
                    found[key] = float(r["fwd_s"]) + float(r["bwd_s"])
    return found


def link_fits(raw: Path) -> Links:
    """(c2, c1, c0) of GB/s over log2 of megabytes, by both ends' kind and GPUs, between machines of one zone."""
    with (raw / "sailor_network_fit.csv").open(newline="") as file:
        return {
            (r["src_gpu"], int(r["src_gpus_per_node"]), r["dst_gpu"], int(r["dst_gpus_per_node"])): (
                float(r["c2_log2MB"]),
                float(r["c1_log2MB"]),
                float(r["c0"]),
            )
            for r in csv.DictReader(file)
            if r["scope"] == "inter" and r["src_zone"] == r["dst_zone"]
        }


def iterations(raw: Path) -> list[Iteration]:
    """The rows without a flag."""
    out: list[Iteration] = []
    with (raw / "sailor_iteration_times.csv").open(newline="") as file:
        for r in csv.DictReader(file):
            if r["qc_flag"]:
                continue
            stages = tuple(tuple(_replica(x) for x in s.split("|")) for s in r["stage_replicas"].split(" ; "))
            out.append(
                Iteration(
                    name=r["file"],
                    cluster=r["cluster"],
                    model=r["model"],
                    stages=stages,
                    layers=tuple(int(x) for x in r["layers_per_stage"].split("/")),
                    batch=int(r["micro_batch"]),
                    rounds=max(1, int(r["global_batch"]) // (int(r["dp"]) * int(r["micro_batch"]))),
                    sequence=int(r["seq_len"]),
                    seconds=float(r["iter_time_s"]),
                    exchange_s=float(r["grad_sync_s"]),
                )
            )
    return out


def _replica(text: str) -> tuple[str, int]:
    """'RTX-3090x8:tp8' -> (kind, TP)."""
    kind, tp = text.strip().rsplit(":tp", 1)
    return kind.rsplit("x", 1)[0], int(tp)


def stage_seconds(x: Iteration, known: Layers) -> list[float]:
    """Seconds of each stage for one micro-batch: its slowest replica. The first also embeds, the last projects."""
    out = []
    for i, (replicas, layers) in enumerate(zip(x.stages, x.layers, strict=True)):
        first, last = i == 0, i == len(x.stages) - 1
        times = []
        for kind, tp in replicas:
            block, embed, head = (known[x.model, kind, x.batch, tp, k] for k in ("block", "embed", "head"))
            times.append((layers - first - last) * block + first * embed + last * head)
        out.append(max(times))
    return out


def border_seconds(x: Iteration, fits: Links) -> list[float]:
    """Seconds a micro-batch takes over each border, activations there and gradients back, over the slowest pair."""
    size = x.batch * x.sequence * HIDDEN[x.model] * WIDTH
    out = []
    for left, right in zip(x.stages, x.stages[1:], strict=False):
        rates = [_rate(a, b, size, fits) for a, b in zip(left, right, strict=False)]
        out.append(2 * size / min(rates))
    return out


def _rate(a: tuple[str, int], b: tuple[str, int], size: float, fits: Links) -> float:
    """Bytes/s between two machines; the fit of fewer GPUs a machine where that of all is not known."""
    for gpus in (a[1], 4, 2, 1):
        for pair in ((a[0], gpus, b[0], gpus), (b[0], gpus, a[0], gpus)):
            if pair in fits:
                c2, c1, c0 = fits[pair]
                at = math.log2(size / 1e6)
                return max(1e-3, c2 * at * at + c1 * at + c0) * 1e9
    raise KeyError((a, b))


def predict(of: Sequence[Iteration], known: Layers, fits: Links, *, borders: bool) -> list[float]:
    """Seconds of an iteration, with or without what crosses the borders."""
    out = []
    for x in of:
        crossing = border_seconds(x, fits)
        if not borders:
            crossing = [0.0] * len(crossing)
        out.append(pipeline_time(stage_seconds(x, known), crossing, x.rounds).total_s + x.exchange_s)
    return out


def overlapped(x: Iteration, known: Layers, fits: Links) -> float:
    """Seconds of an iteration where a stage computes while its borders carry the previous micro-batch: not what the cost
    model assumes, shown beside it."""
    stages, borders = stage_seconds(x, known), border_seconds(x, fits)
    busy = [max(s, sum(borders[max(0, i - 1) : i + 1])) for i, s in enumerate(stages)]
    return pipeline_time(busy, [0.0] * len(borders), x.rounds).total_s + x.exchange_s


def run(raw: Path) -> tuple[list[Figure], dict[str, float]]:
    """Figures by cluster; there are no constants."""
    known, fits = layer_seconds(raw), link_fits(raw)
    rows = iterations(raw)
    out: list[Figure] = []
    name, fitted = "Pipelines, Sailor (structure)", "nothing"
    got = predict(rows, known, fits, borders=True)
    out.append(figure(name, "all clean rows", got, [x.seconds for x in rows], fitted=fitted, rank=RANK_BAR))
    for model in HIDDEN:
        at = [i for i, x in enumerate(rows) if x.model == model]
        out.append(
            figure(name, model, [got[i] for i in at], [rows[i].seconds for i in at], fitted=fitted, rank=RANK_BAR)
        )
    larger = [i for i, x in enumerate(rows) if x.model == "OPT-350" and x.batch > 1]
    part = "OPT-350, micro-batches over 1"
    out.append(figure(name, part, [got[i] for i in larger], [rows[i].seconds for i in larger], fitted=fitted))
    for cluster, said in (("clariden", "uniform (GH200)"), ("mit", "mixed (RTX 3090, RTX 2080, Titan RTX)")):
        mine = [x for x in rows if x.cluster == cluster]
        seconds = [x.seconds for x in mine]
        got = predict(mine, known, fits, borders=True)
        out.append(figure(name, said, got, seconds, fitted=fitted))
        without = predict(mine, known, fits, borders=False)
        out.append(figure(name, f"{said}, activations free", without, seconds, fitted=fitted))
    slow = [x for x in rows if x.cluster == "mit" and len(x.stages) > 1]
    measured = [x.seconds for x in slow]
    added, free = (predict(slow, known, fits, borders=b) for b in (True, False))
    out.append(figure(name, "slow links, activations added", added, measured, fitted=fitted))
    out.append(figure(name, "slow links, activations free", free, measured, fitted=fitted))
    hidden = [overlapped(x, known, fits) for x in slow]
    out.append(figure(name, "slow links, activations hidden behind compute", hidden, measured, fitted=fitted))
    return out, {}
