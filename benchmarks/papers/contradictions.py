"""Where the papers contradict themselves or leave out what their figures rest on, each worked out from their own numbers."""

from collections.abc import Iterator
from statistics import fmean

from benchmarks.papers.figures import (
    H20,
    H20_LATENCY,
    H800,
    H800_LATENCY,
    HEX,
    HEX_LATENCY,
    MODELS,
    Figures,
)
from benchmarks.papers.fleets import SHEETS, model_spec, shipped
from benchmarks.papers.measured import MACHINE, implied_training_gpus, speed_ratios
from planner.record import record

# Printed in text and abstract, so in no table of figures.
SYNC_SHARE_PERCENT = 13.54  # AReaL-Hex: mean share of weight sync in a step
UP_TO_OVER_H20 = 2.76  # AReaL-Hex, abstract
COST_TEXT = {"1.5B": 1.42, "7B": 1.31, "14B": 1.50}  # AReaL-Hex, the cost per token of each model in the text
COST_TABLE = {"1.5B": 1.42, "7B": 1.47, "14B": 1.56}  # and in Table 4
UP_TO_OVER_VERL = 9.17  # HetRL, abstract
A100_40_PRINTED, A100_40_PART = 2039, 1555  # GB/s: HetRL's and NVIDIA's
SEQUENCES = 512 * 16  # AReaL's published batch, which AReaL-Hex refers to
SYSTEMS = ((H20, None, H20_LATENCY), (H800, 24, H800_LATENCY), (HEX, 56, HEX_LATENCY))


@record
class Contradiction:
    """Two statements that do not agree, or one that another excludes. `holds`: the arithmetic confirms it."""

    paper: str
    what: str
    one: str
    other: str
    holds: bool


def sync_shares(figures: Figures) -> dict[str, float]:
    """% of a step that is weight sync, by model, with step = max(infer, train) + sync."""
    found = {m: figures.latency[m, HEX_LATENCY] for m in MODELS}
    return {m: 100 * (x.sync_s or 0.0) / x.step_s for m, x in found.items()}


def dollar_ratios(figures: Figures) -> dict[str, float]:
    """Tokens a dollar of the 32-GPU mix over those of 24 H800, from Table 4's and Figure 3's tokens/s."""
    return {
        m: figures.tokens_per_s[m, HEX, 32]
        / figures.price(8, 24)
        / (figures.tokens_per_s[m, H800, 24] / figures.price(24, 0))
        for m in MODELS
    }


def mixes_at(figures: Figures, usd_per_h: float) -> list[tuple[int, int]]:
    """Every (H800, H20) that costs exactly that."""
    cents = {k: round(100 * figures.setup[f"{k} price"]) for k in ("H800", "H20")}
    left = round(100 * usd_per_h)
    return [
        (a, (left - a * cents["H800"]) // cents["H20"])
        for a in range(left // cents["H800"] + 1)
        if (left - a * cents["H800"]) % cents["H20"] == 0
    ]


def tokens_a_step(figures: Figures) -> dict[tuple[str, str], float]:
    """tokens/s times seconds of a step, by model and system."""
    return {
        (m, s): figures.tokens_per_s[m, s, gpus] * figures.latency[m, seen].step_s
        for m in MODELS
        for s, gpus, seen in SYSTEMS
    }


def step_ratios(figures: Figures) -> dict[str, float]:
    """Step of 24 H800 over the mix's, from Figure 4 and Table 2."""
    return {m: figures.latency[m, H800_LATENCY].step_s / figures.latency[m, HEX_LATENCY].step_s for m in MODELS}


def update_rates(figures: Figures) -> dict[str, list[float]]:
    """GB/s that Table 2's seconds come to with bf16 weights, by system."""
    return {
        s: [model_spec(m).weight_bytes / (figures.latency[m, seen].sync_s or 1.0) / 1e9 for m in MODELS]
        for s, _, seen in SYSTEMS
    }


def used_shares(figures: Figures) -> dict[str, tuple[float, float]]:
    """By model, of 24 H800 with one machine training: share of the printed peak that training has (6 FLOPs a parameter and token),
    and samples in flight at which weights alone, read at the printed bandwidth, allow that rollout rate."""
    out = {}
    for m in MODELS:
        spec, seen = model_spec(m), figures.latency[m, H800_LATENCY]
        tokens = figures.tokens_per_s[m, H800, 24] * seen.step_s
        peak, hbm = SHEETS["756/2.0"]
        trained = 6 * spec.params * tokens / (seen.train_s * MACHINE * peak)
        rate = tokens / seen.infer_s / (24 - MACHINE)
        out[m] = trained, rate / (hbm / spec.weight_bytes)
    return out


def _list(values: object, digits: int = 2, sign: str = "") -> str:
    return " / ".join(f"{v:,.{digits}f}{sign}" for v in values)  # type: ignore[attr-defined]


def contradictions(f: Figures) -> Iterator[Contradiction]:
    """All that is known."""
    yield from _areal_hex_text(f)
    yield from _areal_hex_rates(f)
    high = max(r.high for r in f.hetrl if r.baseline == "verl")
    yield Contradiction(
        paper="HetRL", what="best speed-up over verl", one=f"abstract: up to {UP_TO_OVER_VERL}x",
        other=f"a range that ends at {high}x", holds=high > UP_TO_OVER_VERL,
    )  # fmt: skip
    yield from _hetrl_ranges(f)
    yield Contradiction(
        paper="HetRL", what="memory bandwidth of the A100-40", one=f"printed: {A100_40_PRINTED:,} GB/s",
        other=f"the 40 GB part has {A100_40_PART:,}; the 80 GB part has the printed "
            f"one", holds=A100_40_PRINTED != A100_40_PART,
    )  # fmt: skip


def _hetrl_ranges(f: Figures) -> Iterator[Contradiction]:
    one, other = f.speed_up("S1", "async", "verl"), f.speed_up("S1", "async", "streamrl")
    if one is not None and other is not None:
        yield Contradiction(
            paper="HetRL",
            what="two baselines, one range",
            one=f"S1, async, over verl: {one.low:.2f}-{one.high:.2f}x",
            other=f"over StreamRL, another system: {other.low:.2f}-{other.high:.2f}x, to the last digit",
            holds=(one.low, one.high) == (other.low, other.high),
        )


def _areal_hex_text(f: Figures) -> Iterator[Contradiction]:
    shares = sync_shares(f)
    mean = fmean(shares.values())
    yield Contradiction(
        paper="AReaL-Hex", what="unit of Figure 4", one="its axis says ms",
        other=f"read as seconds with step = max(infer, train) + sync, sync is {_list(shares.values(), 1)} % of a "
            f"step, mean "
        f"{mean:.2f} %; printed: {SYNC_SHARE_PERCENT} %", holds=abs(mean - SYNC_SHARE_PERCENT) < 0.01,
    )  # fmt: skip
    bars = max(f.tokens_per_s[m, HEX, 56] / f.tokens_per_s[m, H20, None] for m in MODELS)
    yield Contradiction(
        paper="AReaL-Hex", what="best speed-up over H20", one=f"abstract: up to {UP_TO_OVER_H20}x",
        other=f"the bars of Figure 3 give up to {bars:.2f}x", holds=bars > UP_TO_OVER_H20 + 0.01,
    )  # fmt: skip
    dollars = dollar_ratios(f)
    yield Contradiction(
        paper="AReaL-Hex", what="cost a token by model", one=f"text: {_list(COST_TEXT.values(), sign='x')}",
        other=f"Table 4: {_list(COST_TABLE.values(), sign='x')}; its tokens/s and prices: "
            f"{_list(dollars.values(), sign='x')}",
        holds=any(abs(dollars[m] - COST_TEXT[m]) > 0.02 for m in MODELS) and all(abs(dollars[m] - COST_TABLE[m]) < 0.01 for m in MODELS),
    )  # fmt: skip
    as_24 = [f.ratios["tokens/s per $/h 24 GPUs", m] for m in MODELS]
    of_56 = [f.tokens_per_s[m, HEX, 56] / f.price(8, 48) for m in MODELS]
    yield Contradiction(
        paper="AReaL-Hex", what="labels of Figure 5", one=f"bars of \"24 GPUs\": {_list(as_24, 1)} tokens/s per $/h",
        other=f"those are the 56 GPUs of Figure 3 over ${f.price(8, 48):.2f}/h: {_list(of_56, 1)}; the order is "
            f"probably reversed",
        holds=all(abs(a / b - 1) < 0.01 for a, b in zip(as_24, of_56, strict=True)),
    )  # fmt: skip
    found, budget = mixes_at(f, f.setup["equal-throughput mix"]), f.setup["budget"]
    yield Contradiction(
        paper="AReaL-Hex", what="GPU mixes are not printed",
        one=f"${f.setup['equal-throughput mix']:.2f}/h is {', '.join(f'{a} H800 + {b} H20' for a, b in found)} and "
            f"nothing else",
        other=f"56 GPUs in machines of eight are 8 + 48 at ${f.price(8, 48):.2f}/h, "
            f"{100 * (f.price(8, 48) / budget - 1):.1f} % "
        f"over the \"same budget\" of ${budget:.2f}/h", holds=len(found) == 1 and f.price(8, 48) > budget,
    )  # fmt: skip


def _areal_hex_rates(f: Figures) -> Iterator[Contradiction]:
    links = {
        H20: f.setup["inter-machine same kind"],
        H800: f.setup["inter-machine same kind"],
        HEX: f.setup["inter-machine across kinds"],
    }
    rates = update_rates(f)
    yield Contradiction(
        paper="AReaL-Hex", what="speed of weight sync",
        one="; ".join(f"{s}: a link of {links[s]} GB/s" for s in links),
        other="; ".join(f"{s}: {_list(rates[s])} GB/s" for s in links),
        holds=all(max(rates[s]) < 0.5 * links[s] for s in links),
    )  # fmt: skip
    (peak, hbm), (peak_b, hbm_b) = SHEETS.values()
    yield Contradiction(
        paper="AReaL-Hex", what="sheet of the H800", one=f"printed: {peak / 1e12:.0f} TFLOP/s, {hbm / 1e12} TB/s (a PCIe card's)",
        other=f"other sources: {peak_b / 1e12:.0f} and {hbm_b / 1e12}", holds=f.setup["H800 peak"] * 1e12 == peak,
    )  # fmt: skip
    steps = tokens_a_step(f)
    longest = shipped("areal-hex-24").workload.response.max_tokens
    yield Contradiction(
        paper="AReaL-Hex", what="length of a sequence", one=f"as AReaL: {SEQUENCES:,} sequences of up to {longest:,} tokens",
        other=f"tokens/s x step is {min(steps.values()) / 1e6:.1f}-{max(steps.values()) / 1e6:.1f} M tokens, "
        f"{min(steps.values()) / SEQUENCES:.0f}-{max(steps.values()) / SEQUENCES:.0f} a sequence",
        holds=max(steps.values()) / SEQUENCES < 0.1 * longest,
    )  # fmt: skip
    by_step, by_rate = step_ratios(f), [f.ratios["hex over 24 H800 same budget", m] for m in MODELS]
    yield Contradiction(
        paper="AReaL-Hex", what="speed-up over 24 H800", one=f"Figure 3, tokens/s: {_list(by_rate, sign='x')}",
        other=f"Figure 4 and Table 2, steps: {_list(by_step.values(), sign='x')}; tokens a step differ by system (14B: "
        f"{steps['14B', H800] / 1e6:.2f} M and {steps['14B', HEX] / 1e6:.2f} M)",
        holds=any(abs(a / b - 1) > 0.05 for a, b in zip(by_rate, by_step.values(), strict=True)),
    )  # fmt: skip
    both = [speed_ratios(f, m) for m in MODELS]
    sheet = f.setup["H20 hbm"] / f.setup["H800 hbm"], f.setup["H800 peak"] / f.setup["H20 peak"]
    yield Contradiction(
        paper="AReaL-Hex", what="one GPU over the other",
        one=f"set-up: an H20 has {sheet[0]:.1f}x the bandwidth, an H800 {sheet[1]:.1f}x the FLOP/s",
        other=f"Table 1: an H20 generates at {_list(r for r, _ in both)} of an H800, an H800 trains at "
            f"{_list((t for _, t in both), 1, 'x')} an H20",
        holds=all(r < 1 and t > sheet[1] for r, t in both),
    )  # fmt: skip
    seen = f.latency["14B", H800_LATENCY]
    yield Contradiction(
        paper="AReaL-Hex", what="the 14B baseline", one="24 H800 at their best allocation",
        other=f"{seen.infer_s:,.0f} s of rollout against {seen.train_s:,.0f} s of training: part of the 1.50x is "
            f"that it is unbalanced",
        holds=seen.infer_s > 2 * seen.train_s,
    )  # fmt: skip
    training = [implied_training_gpus(f, m) for m in MODELS]
    needed = [
        48 * f.latency[m, HEX_LATENCY].infer_s * r / f.latency[m, H800_LATENCY].infer_s
        for m, (r, _) in zip(MODELS, both, strict=True)
    ]
    yield Contradiction(
        paper="AReaL-Hex", what="Table 1 against Figure 4",
        one=f"training seconds: {_list(training, 1)} of the baseline's 24 H800 train, the rest generates",
        other=f"48 H20 at Table 1's rate and Figure 4's seconds do the rollout of {_list(needed, 0)} H800: more "
            f"than there are",
        holds=all(n > 24 for n in needed),
    )  # fmt: skip
    used = used_shares(f)
    yield Contradiction(
        paper="AReaL-Hex", what="how busy the GPUs are", one=f"{SEQUENCES:,} sequences a step to work on",
        other=f"were 8 of the 24 H800 training, they would train at {_list((100 * t for t, _ in used.values()), 1)} "
            f"% of the printed peak, and the "
        f"others generate as if each had {_list((b for _, b in used.values()), 1)} samples in flight (weights read "
        f"at the printed bandwidth)",
        holds=all(t < 0.2 for t, _ in used.values()),
    )  # fmt: skip
