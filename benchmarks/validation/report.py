"""docs/validation.md and its pictures, from the figures."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.validation import serving, training
from benchmarks.validation.figures import Figure
from benchmarks.validation.gate import Outcome

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#edae49", "#6c4ab6")
HEAD = """# The cost model against measurements

<!-- Written by `make validate`; edit benchmarks/validation instead. -->

Nobody on this project made the measurements on this page: they are public figures of others, their sources below. The cost model
predicts each; errors are |predicted / measured - 1|. *Bias* is the median of predicted / measured - 1 (negative: predicted too
fast), *rank* is Spearman's correlation: whether the model puts configurations in the right order, which is what a planner
needs most. *Fitted on* says what the prediction had seen: a held-out kind or row was never among it. Bars were set before the
figures were computed; those missed are named first.

How the model works: [concepts/cost-model.md](concepts/cost-model.md).
"""
NOTES: Mapping[str, str] = {
    "GEMM, held-out kind": "Matrix products with n, k >= 1024 in bf16, for a kind as if it had no table: the geometric mean "
    "of the A100 and H100 tables at the kind's own datasheet. How FLOPs and bytes combine was chosen by letting A100 and H100 predict "
    "each other; that the mean is used, and not H100 alone (6.5 % on H200, 13.8 % on L40S, within the bars too), was decided with "
    "those two in sight. The benchmark behind the tables takes six copies of the weights in turn: on L40S and RTX PRO 6000 weights of "
    "which the cache holds six are predicted from the cache, all others from memory. That took L40S' p90 from 58 % to 27 %, and made "
    "RTX PRO 6000 a little worse in the median (10.8 % before): its cache seems to hold fewer of them than its size promises.",
    "GEMM, held-out m within a kind": "Every second number of rows is left out of the kind's own table. RTX PRO 6000's bf16 products "
    "miss the bar by jumps that look like an unlucky choice of kernel: from one number of rows to the next, time *falls* by more than a "
    "quarter in 4.8 % of the steps (H100 0.6 %, H200 0.1 %; 2,048 x 2,048 takes 24 us with 512 rows, 75 with 768, 34 with 1,024), and the "
    "least-squares curve that never falls with rows, fitted to all of them, is off by more than 17 % at a tenth (H100 4 %). The same "
    "card's fp8 products, of other kernels, are off by 1.6 %. Waves of tiles over the kind's processors as part of the roof (128 x 128, "
    "128 x 256, 64 x 128, the best of six) gave 8.0 to 9.2 % there and 3.4 to 3.7 % on H100: they were left out. Nor does smoothing "
    "help: at the shipped n and k, where the median is 7.1 %, the slowness averaged over neighbouring rows gives 7.8 to 8.6 %, over "
    "neighbouring n and k 7.3 to 7.7 %, seconds that never fall with rows 8.1 %; of the other bf16 tables A100's gains 0.4 points at best, "
    "H100's and L40S' lose as much. The bar stays missed.",
    "Decode attention, held-out kind": "One layer's attention for one token a sample. H100 stands nearer to H200 than the mean "
    "does. The tables repeat a kernel over one key-value cache, so what fits into the last-level cache (96 MB on L40S, 128 MB on "
    "RTX PRO 6000) was read from there; a decode step never does, and the curves that plans use know only memory. For this "
    "comparison what the cache saves is taken off: its size by data sheet, its rate that of the other kinds whose tables show one. "
    "*Beyond its cache* are the reads that matter to plans. RTX PRO 6000 was at first predicted once, after everything else was "
    "fixed, without a cache: 37.1 %, missed. The cache was then modelled knowing that figure, from physics and the other kinds; "
    "nothing is fitted on its rows. Of the rates that were tried for its cache L40S' gave 13.3 %, A100's and H100's own, whose "
    "reads are too short to show it, 13 to 20 %; its reads beyond the cache do not depend on it.",
    "Decode attention, held-out contexts within a kind": "Every second context length is left out, for the cache's rate too. On L40S "
    "one doubling lies between a cached and a streamed read, a step of 2.7x: interpolated as measured the error was 17.6 %; curves of "
    "streamed reads are smooth there.",
    "Decode attention, shipped table": "What the package holds, a thinned grid, against every row.",
    "Prefill attention, held-out kind": "10 GFLOP and more.",
    "Collectives, held-out sizes": "Inside one host, every second size left out. Interpolated per host only.",
    "Collectives, carried over (never done)": "Why collectives are never carried from one kind to another: H100's table used "
    "for the others.",
    "Decode per token, Llama-3.1-70B fp8, vLLM": "Public serving runs. *Sum of kernels* has nothing fitted. Two terms are fitted on the "
    "other card: the share of other samples' prefill that a running sample feels, and what a CUDA graph saves of the launch "
    "floors in the tables.",
    "Training, llm-foundry": "FSDP in bf16. Four coefficients a kind (products, attention, bytes, collectives); each model size "
    "is predicted by a fit without it. *Constant MFU*: one rate a kind, fitted likewise. The bar is 6 %, or the constant's "
    "error where that is lower.",
    "Training, llm-foundry, held-out kind": "Coefficients of the other two kinds. H100's attention table is of a newer kernel "
    "(FlashAttention-3) than the trainer had, and counts by what FlashAttention-2 reaches of it in FlashAttention-3's own figures, 0.57, "
    "nothing fitted: without that H100's attention coefficient was twice A100's and its error 11.0 % (A100-40 6.4, A100-80 12.0 %).",
    "Training, the planner's own formula": "What plans are costed with, but for one figure: llm-foundry's attention reaches 0.62 of "
    "FlashAttention-2's rate, fitted on A100-80 by the four terms above; A100-40 and H100 see nothing of their own attention. Plans take "
    "FlashAttention-2 itself (next table). Products reach 0.90 of theirs, as all three kinds say. The kernel's share on H100 and how "
    "much slower a backward pass is are published figures (`planner/cost/assumptions.py`). With one share of 0.48 for forward and "
    "backward together, whatever the kernel, errors were 6.5, 7.5 and 19.8 %. Runs of 128 GPUs and more stay too fast on H100: the "
    "network between machines is not counted.",
    "Training, FlashAttention-2's own runs": "GPT models of 1.3B and 2.7B, 2k and 8k tokens, on eight A100 (arXiv 2307.08691, Table 1): "
    "what plans are costed with, to the letter. No constant is fitted on them, but that plans take FlashAttention-2 at its full rate, "
    "and not at llm-foundry's 0.62, was decided with these four rows and our own trainer's (docs/gpu.md) in sight: at 0.62 they are 11 "
    "to 23 % off.",
    "Pipelines, Sailor (structure)": "fp32 without flash attention: only how stages, borders and gradient exchange add up is tested, "
    "from measured layers and links. The table of layers holds OPT-350's seconds under GPT-Neo's name on GH200, row by row; with "
    "them the rank over all rows was 0.871 and the median error 23.7 %. Another commit of the source has GPT-Neo's own seconds, "
    "which are used here. Micro-batches of one are slower in OPT-350's profile than in the run, so errors there are the profile's; "
    "GPT-Neo's one run of a single micro-batch is predicted a third too fast. The folder at hand has 31 rows, three "
    "clean ones of mixed GPUs. On the two with slow links, adding activation transfers is too slow and leaving them out "
    "too fast by about as much; hiding them behind compute fits best, but two rows decide nothing, so the model still adds them.",
    "verl, parts of a co-located step": "The parts of a row against its step.",
    "verl, asynchronous step from the co-located one": "The slower of generation and training, each scaled to its GPUs. It misses by "
    "far: a co-located step waits for its longest response whatever its GPUs, and its update takes longer on 32 GPUs than the "
    "asynchronous one on 16. Parts of a co-located run do not predict an asynchronous one; no bar was set.",
    "AReaL-Hex weight update": "Three models a cluster; each predicted from the two others by a fixed part and a rate of its "
    "cluster. No bar was set.",
}
SOURCES = """## Sources

ai-dynamo/aiconfigurator @ 095f58a5 (Apache-2.0): kernels, collectives, serving runs, datasheets. mosaicml/llm-foundry @ 8c8dd48f
(Apache-2.0): training; FlashAttention-2 (arXiv 2307.08691), Table 1: training; FlashAttention-3 (arXiv 2407.08608), Fig. 5 and 6:
attention kernels on H100. eth-easl/sailor @ cf2c8e3c (MIT): pipelines, GPT-Neo's layers on
GH200 @ 142ddeb1. volcengine/verl @ 21470098 and verl-project/verl @ 1947b755
(Apache-2.0): steps. AReaL-Hex, arXiv 2511.00796: weight updates (Fig. 4, Table 2). Only figures were taken.

`make validate` computes this page from the raw tables; a test recomputes it wherever they are, and elsewhere a thinned sample
of them, and fails when a set's error has grown by more than 5 % or a part's by more than 10 %.
"""


def percent(value: float) -> str:
    """'6.1 %'."""
    return f"{100 * value:.1f} %"


def _row(f: Figure) -> str:
    bar = f"{f.bar} {'kept' if f.kept else '**missed**'}" if f.bar else ""
    cells = (f.part, f.fitted, f"{f.rows:,}", percent(f.median), percent(f.p90), percent(f.mean))
    return "| " + " | ".join((*cells, f"{100 * f.bias:+.1f} %", f"{f.rank:.3f}", bar)) + " |\n"


def page(outcome: Outcome) -> str:
    """The text of docs/validation.md."""
    barred = [f for f in outcome.figures if f.bar]
    missed = [f for f in barred if not f.kept]
    out = [HEAD, f"\n**Bars: {len(barred) - len(missed)} of {len(barred)} kept.**"]
    out.append(" Missed:\n\n" if missed else "\n\n")
    for f in missed:
        out.append(
            f"- {f.name}, {f.part}: median {percent(f.median)}, p90 {percent(f.p90)}, rank {f.rank:.3f}; bar {f.bar}\n"
        )
    out.append("\n![Median and p90 errors by data set](images/validation-errors.svg)\n")
    for name in dict.fromkeys(f.name for f in outcome.figures):
        out.append(f"\n## {name}\n\n{NOTES.get(name, '')}\n\n".replace("\n\n\n\n", "\n\n"))
        if name == serving_name(outcome):
            out.append("![Predicted and measured milliseconds a token](images/validation-decode.svg)\n\n")
        if name == "Training, llm-foundry":
            out.append("![Predicted and measured tokens/s a GPU](images/validation-training.svg)\n\n")
        out.append(
            "| part | fitted on | rows | median | p90 | mean | bias | rank | bar |\n|---|---|---|---|---|---|---|---|---|\n"
        )
        out += [_row(f) for f in outcome.figures if f.name == name]
    out.append("\n## Fitted constants\n\n| set | constant | value |\n|---|---|---|\n")
    out += [f"| {s} | {n} | {v:.3g} |\n" for s, of in outcome.constants.items() for n, v in of.items()]
    return "".join(out) + "\n" + SOURCES


def serving_name(outcome: Outcome) -> str:
    """The name of the set of decode runs."""
    return next(f.name for f in outcome.figures if f.name.startswith("Decode per token"))


def errors_svg(figures: Sequence[Figure]) -> str:
    """One line a part that has a bar: median as a bar, p90 as a tick, the bar as a line; logarithmic from 1 % to 100 %."""
    rows = [f for f in figures if f.bar and "rank" not in f.bar]

    def x(value: float) -> float:
        return 400 + 360 * math.log10(min(max(value, 0.01), 1.0) / 0.01) / 2

    height = 60 + 18 * len(rows)
    out = [f'<rect width="780" height="{height}" fill="#fff"/>']
    for share in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0):
        out.append(f'<path d="M{x(share):.0f} 30V{height - 20}" stroke="#ddd"/>')
        out.append(f'<text x="{x(share) - 12:.0f}" y="24" fill="#555">{share:.0%}</text>')
    for i, f in enumerate(rows):
        y = 40 + 18 * i
        limit, value = float(f.bar.split("<= ")[1].split(",")[0]), f.mean if f.bar.startswith("mean") else f.median
        colour = COLOURS[0] if f.kept else COLOURS[1]
        out.append(f'<text x="8" y="{y + 10}" font-size="11">{f.name.split(", Llama")[0]}: {f.part}</text>')
        out.append(f'<rect x="400" y="{y + 1}" width="{x(value) - 400:.1f}" height="11" fill="{colour}"/>')
        out.append(f'<path d="M{x(f.p90):.1f} {y}V{y + 13}" stroke="{colour}" stroke-width="3"/>')
        out.append(f'<path d="M{x(limit):.1f} {y - 1}V{y + 14}" stroke="#222" stroke-dasharray="2 2"/>')
    return _svg(780, height, "".join(out))


def scatter_svg(series: Mapping[str, Sequence[tuple[float, float]]], words: tuple[str, str]) -> str:
    """Predicted over measured, both logarithmic, with the line where they agree."""
    values = [v for points in series.values() for p in points for v in p]
    low, high = math.log10(min(values) * 0.9), math.log10(max(values) * 1.1)

    def at(value: float) -> float:
        return 380 * (math.log10(value) - low) / (high - low)

    out = ['<rect width="560" height="440" fill="#fff"/><path d="M50 10V390H430" fill="none" stroke="#888"/>']
    out.append('<path d="M50 390L430 10" stroke="#bbb" stroke-dasharray="4 4"/>')
    for i, (name, points) in enumerate(series.items()):
        out.append(f'<text x="445" y="{40 + 18 * i}" fill="{COLOURS[i]}">{name}</text>')
        out += [
            f'<circle cx="{50 + at(m):.1f}" cy="{390 - at(p):.1f}" r="3" fill="{COLOURS[i]}" fill-opacity="0.6"/>'
            for m, p in points
        ]
    ends = (f"{10**low:,.3g}", f"{10**high:,.3g}")
    out.append(f'<text x="50" y="408">{ends[0]}</text><text x="395" y="408">{ends[1]}</text>')
    out.append(f'<text x="150" y="430">measured {words[0]}</text>')
    out.append(f'<text x="14" y="280" transform="rotate(-90 20 280)">predicted {words[1]}</text>')
    return _svg(560, 440, "".join(out))


def _svg(width: int, height: int, body: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13">'
        f"{body}</svg>\n"
    )


def pictures(raw: Path, outcome: Outcome) -> dict[str, str]:
    """File name -> SVG."""
    decode: dict[str, list[tuple[float, float]]] = {}
    runs = serving.runs(raw)
    for kind in serving.CARDS:
        share, credit = serving.fit([r for r in runs if r.kind != kind])
        decode[kind] = [(r.tpot_ms, r.predicted(share, credit)) for r in runs if r.kind == kind]
    trained: dict[str, list[tuple[float, float]]] = {}
    rows = training.rows(raw)
    for kind in training.KINDS.values():
        mine = [r for r in rows if r.kind == kind]
        got = training.without_each_size(mine, training.predicted)
        tokens = [r.tokens for r in mine]
        trained[kind] = [(t / r.seconds, t / float(s)) for t, r, s in zip(tokens, mine, got, strict=True)]
    return {
        "validation-errors.svg": errors_svg(outcome.figures),
        "validation-decode.svg": scatter_svg(decode, ("ms a token", "ms a token")),
        "validation-training.svg": scatter_svg(trained, ("tokens/s a GPU", "tokens/s a GPU")),
    }
