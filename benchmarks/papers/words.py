"""What the report says besides its tables: what each figure is about, and sentences that depend on the numbers."""

from collections.abc import Iterator, Sequence

from benchmarks.papers.claims import NEAR, Compared
from benchmarks.papers.contradictions import update_rates, used_shares
from benchmarks.papers.figures import H800_LATENCY, HEX, MODELS, Figures
from benchmarks.papers.fleets import FIRST_PRINCIPLES, SHEETS, Inputs
from benchmarks.papers.measured import Predicted
from benchmarks.papers.scenarios import Pair, Row

SECTIONS = {
    "figure 3": (
        "Figure 3: tokens a second for the same money",
        "The headline: a mix of H800 and H20 that costs about as much as 24 H800 is said to train on more tokens a "
        "second than "
        "24 H800, or than as many H20 as the money buys.",
    ),
    "figure 3 absolute": (
        "Figure 3: the tokens a second themselves",
        "The heights of the bars. They depend on engine, lengths and batch, so a ratio off by a constant says "
        "little about plans.",
    ),
    "figure 2": (
        "Figure 2: a case study of three fleets of about the same price",
        "32 H800, 88 H20, and 24 of each: seconds of rollout and training in one step. Ours is the ratio of steps.",
    ),
    "figure 4": (
        "Figure 4: where the seconds of a step go",
        "Rollout and training run side by side, weight sync comes after; a plan is balanced where both sides take "
        "equally long. "
        "Here sync runs at the share of a link that any large transfer reaches.",
    ),
    "table 1": (
        "Table 1: what a token costs on each kind of GPU",
        "Why a mix helps at all: an H20 has little compute and much memory bandwidth, so it generates cheaply and "
        "trains dearly.",
    ),
    "table 3": (
        "Table 3: how much the split between rollout and training matters",
        "24 H800 with the best number of GPUs for training, against equal halves.",
    ),
    "table 4": (
        "Table 4: the same tokens for less money",
        "8 H800 + 24 H20 at two thirds of the price of 24 H800 are said to be about as fast.",
    ),
    "figure 5": (
        "Figure 5: tokens a dollar as the fleet grows",
        "Mixes of 24 to 56 GPUs (8 H800 and the rest H20), tokens/s for each $/h. The labels of the bars contradict "
        "Figure 3 (see below), so "
        "both readings are shown.",
    ),
}  # fmt: skip

REASONS = {
    "figure 2": "The fleets of one kind would have to be run that much further from (or nearer to) their best than the mix.",
    "table 1": "The two kinds would have to reach shares of their sheets that differ by that factor.",
    "table 3": "Equal halves would have to be that much further from (or nearer to) balance than the model has them.",
    "table 4": "An H20 would have to give that much more (or less) against an H800.",
    "figure 5": "Growing by H20 alone would have to pay that much more (or less).",
}

HETRL_REASONS = {
    ("sync, over verl", "above"): (
        "Our `verl` puts every model on all GPUs in turns, in equal parts, over borders too; and `hex` is a "
        "stronger search than "
        "the paper's. The system measured would have to keep its groups inside regions, or the search to miss that "
        "much."
    ),
    ("async, over verl", "below"): (
        "Our `verl` cuts the fleet once, as listed, at the best eighth; where that cut falls on the border of a "
        "region, as it "
        "does behind the 24 A100 of S2, its trainer never leaves it. The system measured would have to train across "
        "borders."
    ),
    ("async, over streamrl", "above"): (
        "Our `streamrl` trains in one region and generates in one, and eight GPUs a region (our placement, the "
        "paper prints none) "
        "leave it two machines of eight. The paper's regions would have to hold more GPUs, or its groups to span "
        "several."
    ),
    ("shares by speed over equal shares, sync", "above"): (
        "`hex` makes plans for shares by speed; with equal shares one would make others, which is what the paper "
        "may compare."
    ),
    ("", "above"): "What is compared here would have to lose less than the model says.",
    ("", "below"): "What is compared here would have to lose more than the model says.",
}


def near_text(c: Compared) -> str:
    """Where ours is close to the paper's, or how far off the nearest swept point is."""
    n = len(c.swept)
    if not n:
        return "no plan"
    if c.near:
        return f"{len(c.near)} of {n}: {_values(c.near)}"
    assert c.nearest is not None
    where, value = c.nearest
    return f"0 of {n}; nearest {value:,.{c.claim.digits}f} ({where.text()})"


def _values(near: Sequence[Inputs]) -> str:
    lengths = sorted({i.response_mean for i in near})
    sheets = [s for s in SHEETS if any(i.sheet == s for i in near)]
    caps = {i.cap for i in near}
    words = [", ".join(f"{x:,.0f}" for x in lengths) + " tokens"]
    if len(sheets) < len(SHEETS):
        words.append(f"H800 {sheets[0]}")
    if len(caps) == 1:
        cap = next(iter(caps))
        words.append("no cap" if cap is None else f"cap {cap}")
    return "; ".join(words)


def verdict(c: Compared) -> str:
    """In a few words, whether the paper's figure is one of ours."""
    if c.base is None or c.low is None or c.high is None:
        return "no plan"
    if abs(c.base / c.claim.paper - 1) <= NEAR:
        return f"within {100 * NEAR:.0f} % at the shipped assumptions too"
    if c.near:
        return f"within {100 * NEAR:.0f} % at other inputs"
    if c.claim.paper > c.high:
        return f"the paper is {c.claim.paper / c.high:.1f}x above all that was swept"
    if c.claim.paper < c.low:
        return f"the paper is {c.low / c.claim.paper:.1f}x below all that was swept"
    return "between swept points"


def overlap(ours: Pair | None, paper: Pair) -> str:
    """Whether a range of ours and the paper's meet."""
    if ours is None:
        return "no plan"
    if ours[0] > paper[1]:
        return "above"
    if ours[1] < paper[0]:
        return "below"
    if ours[0] >= paper[0] and ours[1] <= paper[1]:
        return "inside"
    if ours[0] <= paper[0] and ours[1] >= paper[1]:
        return "around"
    return "overlaps"


def where(r: Row) -> str:
    """How `hex` and our `hetrl` lie to the paper's range."""
    said = [f"hex {overlap(r.ours, r.paper)}"]
    if r.hetrl:
        said.append(f"`hetrl` {overlap((min(r.hetrl), max(r.hetrl)), r.paper)}")
    return ", ".join(said)


def would_have_to_be(
    f: Figures, compared: Sequence[Compared], predicted: Sequence[Predicted], rows: Sequence[Row]
) -> Iterator[str]:
    """For each section of which claims are out of reach: what would have to be true."""
    out: dict[str, list[Compared]] = {}
    for c in compared:
        if c.swept and not c.near:
            out.setdefault(c.claim.section, []).append(c)
    if "figure 3 absolute" in out:
        used = used_shares(f)
        yield (
            f"**Tokens a second.** At the shipped assumptions ours are {_off(out['figure 3 absolute'])} the "
            f"paper's. Its figures would need "
            f"trainers at {_span([100 * t for t, _ in used.values()], 0)} % of the "
            f"printed peak and replicas "
            f"that do no more than {max(b for _, b in used.values()):.0f} samples in flight would by reading "
            f"weights alone: engines far from "
            "their roofline, long idle times, or tokens counted differently. Ratios below do not need either."
        )
    if any(c.claim.fleets[1][0] == 0 for c in out.get("figure 3", ())):
        yield from _over_h20(predicted)
    yield from _balance(f, out)
    yield from _training(f, compared)
    yield from _others(out)
    yield from _hetrl(rows)


def _over_h20(predicted: Sequence[Predicted]) -> Iterator[str]:
    """The speed-up over H20 alone, held against the paper's own rates."""
    steps = [p for p in predicted if p.what.startswith("step seconds")]
    ratios = [p for p in predicted if "both at the best split" in p.what]
    yield (
        f"**Over H20 alone.** From the paper's own rates (b) the mix is {_span([p.value for p in ratios], 2)}x as "
        f"fast, "
        f"printed are {_span([p.paper for p in ratios], 2)}x: H20 alone would need "
        f"{_span([p.value for p in steps], 0)} s a "
        f"step where Figure 4 shows {_span([p.paper for p in steps], 0)} s. They would have to be "
        f"{_span([p.paper / p.value for p in steps], 1)}x slower when alone than their costs a token in Table 1 "
        f"say, or "
        "that fleet not be planned at its best."
    )


def _training(f: Figures, compared: Sequence[Compared]) -> Iterator[str]:
    """How much faster one kind trains than the other, which decides who trains."""
    price = f.setup["H800 price"] / f.setup["H20 price"]
    found = [
        c for c in compared if c.claim.what.startswith("an H800 is cheaper a trained token") and c.base is not None
    ]
    ours, theirs = [(c.base or 0.0) * price for c in found], [c.claim.paper * price for c in found]
    if found and max(ours) < min(theirs):
        yield (
            f"**Who trains.** An H800 trains {_span(ours, 1)}x as fast as an H20 at the shipped assumptions and "
            f"{_span(theirs, 1)}x by Table 1, where it costs {price:.2f}x as much. The smaller the factor, the more "
            "H20 our plans let train (table under Figure 3); the paper's roles need the larger one."
        )


def _others(out: dict[str, list[Compared]]) -> Iterator[str]:
    """Claims of the other sections, by how far the nearest inputs are off."""
    for name in ("figure 2", "table 1", "table 3", "table 4", "figure 5"):
        said = []
        for c in out.get(name, ()):
            if c.nearest is not None and c.nearest[1] > 0:
                off = c.claim.paper / c.nearest[1]
                word = f"{off:.1f}x more" if off > 1 else f"{1 / off:.1f}x less"
                said.append(f"{c.claim.what}: {c.nearest[1]:.2f} nearest, printed {c.claim.paper:.2f} ({word})")
        if said:
            yield f"**{SECTIONS[name][0].split(':')[0]}.** {'; '.join(said)}. {REASONS[name]}"


def _hetrl(rows: Sequence[Row]) -> Iterator[str]:
    """The same for HetRL, claim by claim."""
    off = [(overlap(r.ours, r.paper), r) for r in rows]
    for what, side in dict.fromkeys((r.what, word) for word, r in off if word in ("above", "below")):
        said = []
        for word, r in off:
            if (r.what, word) == (what, side):
                ours = f" (our `hetrl` {min(r.hetrl):.2f}-{max(r.hetrl):.2f}x)" if r.hetrl else ""
                said.append(
                    f"{r.scenario} {number(r.median)}x in the middle{ours}, printed {r.paper[0]:.2f}-{r.paper[1]:.2f}x"
                )
        yield f"**HetRL, {what}: ours is {side}.** {'; '.join(said)}. {HETRL_REASONS.get((what, side), HETRL_REASONS['', side])}"


def number(value: float | None) -> str:
    """Two digits, "-" for none."""
    return "-" if value is None else f"{value:.2f}"


def _balance(f: Figures, out: dict[str, list[Compared]]) -> Iterator[str]:
    if any(c.claim.what.startswith("rollout over training seconds on 24 H800") for c in out.get("figure 4", ())):
        ratios = [f.latency[m, H800_LATENCY].infer_s / f.latency[m, H800_LATENCY].train_s for m in MODELS]
        yield (
            f"**Balance.** The 24 H800 of Figure 4 spend {_span(ratios, 2)}x as long in rollout as in training. A "
            f"planner that may move single "
            "GPUs gets both sides closer; such a baseline needs whole machines as the unit of allocation, or a "
            "split fixed by hand."
        )
    if any("sync" in c.claim.what for c in out.get("figure 4", ())):
        rates, link = update_rates(f)[HEX], f.setup["inter-machine across kinds"]
        used = _span([100 * r / link for r in rates], 0)
        yield (
            f"**Sync.** At {100 * FIRST_PRINCIPLES.update_efficiency:.0f} % of the link, sync is a far smaller part "
            f"of a step here. Table 2's seconds come to "
            f"{_span(rates, 2)} GB/s over a link of {link} GB/s: the transfer would have to use {used} % "
            "of it, as one stream, through host memory or in turn to each machine might. (The planner's default is "
            "calibrated to that; it is "
            "switched off in table (a).)"
        )


def _off(found: Sequence[Compared]) -> str:
    values = [c.base / c.claim.paper for c in found if c.base is not None]
    return f"{_span(values, 1)}x"


def _span(values: Sequence[float], digits: int) -> str:
    low, high = f"{min(values):,.{digits}f}", f"{max(values):,.{digits}f}"
    return low if low == high else f"{low}-{high}"


def _names(rows: Sequence[Row]) -> str:
    return "; ".join(dict.fromkeys(f"{r.scenario} {r.what}" for r in rows))


def beats(compared: Sequence[Compared], at: int) -> str:
    """hex over one of the papers' schedulers, over all fleets asked."""
    found = [b for c in compared if (b := c.beats[at]) is not None]
    return f"{min(low for low, _ in found):.2f}-{max(high for _, high in found):.2f}x" if found else "-"
