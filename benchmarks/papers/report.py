"""docs/papers.md: the tables and the sentences around them. Takes values, returns text."""

from collections.abc import Iterator, Sequence
from statistics import fmean, geometric_mean

from benchmarks.papers.claims import BESIDE, NEAR, OTHERS, Compared
from benchmarks.papers.clocks import MODEL, REPEATS, Clock
from benchmarks.papers.contradictions import Contradiction
from benchmarks.papers.figures import H800, HEX, MODELS, Figures
from benchmarks.papers.fleets import BASE, ETA, FIRST_PRINCIPLES, LENGTHS, SHEETS, Inputs, model_spec, sweep
from benchmarks.papers.measured import Predicted
from benchmarks.papers.mixes import Rent
from benchmarks.papers.scenarios import READINGS, Pair, Row, every_gain
from benchmarks.papers.solves import EVALUATIONS, Outcome
from benchmarks.papers.words import SECTIONS, beats, near_text, overlap, verdict, where, would_have_to_be
from planner.record import record

IMAGES = ("papers-areal-hex.svg", "papers-hetrl.svg")


@record
class Everything:
    """All that the report tells."""

    figures: Figures
    compared: Sequence[Compared]
    predicted: Sequence[Predicted]
    rents: Sequence[Rent]
    rows: Sequence[Row]
    roles: Sequence[tuple[str, Inputs, Outcome]]
    contradictions: Sequence[Contradiction]
    clocks: Sequence[Clock]
    machine: str
    simulated: Sequence[str] = ()


def report(x: Everything) -> str:
    """The whole page."""
    parts = [
        *_opening(x),
        *_table_a(x),
        *_rents(x),
        *_hetrl(x),
        *_table_b(x),
        *_needs(x),
        *_contradictions(x),
        *_clocks(x),
        *x.simulated,
    ]
    return "\n".join(parts).rstrip() + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table with an empty line after it."""
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(r) + " |" for r in rows), ""]


def number(value: float | None, digits: int = 2) -> str:
    """A figure, "-" for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def pair(found: Pair | None, digits: int = 2) -> str:
    """Least and most."""
    if found is None:
        return "-"
    low, high = (f"{v:,.{digits}f}" for v in found)
    return low if low == high else f"{low}-{high}"


def _opening(x: Everything) -> list[str]:
    found = [c for c in x.compared if c.swept and c.claim.section != "figure 3 absolute"]
    near, at_base = sum(bool(c.near) for c in found), sum(verdict(c).endswith("too") for c in found)
    gains = [c for c in x.compared if c.claim.section == "figure 3"]
    best = max((r.gain for r in x.rents), default=1.0)
    meets = [r for r in x.rows if r.what.split(", over ")[0] in ("sync", "async")]
    return [
        "# What two papers report, and what our models say",
        "",
        "<!-- Written by `make papers`; edit benchmarks/papers instead. -->",
        "",
        "Written by `make papers`; every figure below comes from code, none was put in by hand, and nothing was "
        "tuned to the papers. "
        "**Ours are modelled, not measured**: plans of this planner under its cost model "
        "([how far that is from measurements](validation.md)). The papers' were measured on GPUs.",
        "",
        "- **AReaL-Hex** (arXiv 2511.00796) trains reasoning models of 1.5B, 7B and 14B by asynchronous "
        "reinforcement learning on a mix of two "
        "GPUs under export rules: the H800 (much compute, dear) and the H20 (little compute, much memory bandwidth, "
        "cheap). Its scheduler is "
        "our `areal-hex`.",
        "- **HetRL** (arXiv 2512.12476) does the same for PPO and GRPO on A100, L40S and L4 in one to eight "
        "regions. Its scheduler is our `hetrl`.",
        "- `hex` is this project's own scheduler; `verl`, `streamrl` and `areal` are [models of how those systems "
        "place a workload]"
        "(concepts/baselines.md).",
        "",
        "In one step, replicas *generate* responses (rollout), a trainer *trains* on them, and new weights go to "
        "the replicas (*sync*).",
        "",
        "## In short",
        "",
        f"- Of {len(found)} ratios of AReaL-Hex, {near} come within {100 * NEAR:.0f} % somewhere in the sweep of "
        f"what the "
        f"paper does not print, "
        f"{at_base} at the shipped assumptions. What was not printed decides: {_decides(gains)}.",
        f"- From the paper's own rates (table b), {_own_rates(x)}.",
        f"- Asked what to rent for the money of 24 H800, the planner gets up to {best:.2f}x from a mix at the "
        f"inputs tried ([below](#what-to-rent)).",
        f"- `hex` over `areal-hex` on AReaL-Hex's fleets: {beats(x.compared, 0)}; over `hetrl` there: "
        f"{beats(x.compared, 1)}; over `hetrl` on "
        f"HetRL's: {_hex_over_hetrl(x.rows)}.",
        f"- HetRL: our range meets the paper's in {sum(_meets(r) for r in meets)} of {len(meets)} rows; `hex` over "
        f"`verl` is "
        f"{fmean(every_gain(x.rows, 'verl')):.2f}x in the mean of all cases (geometric "
        f"{geometric_mean(every_gain(x.rows, 'verl')):.2f}x), where the paper prints a mean of "
        f"{next((r.low for r in x.figures.hetrl if r.scenario == 'all'), 0):.2f}x.",
        f"- {sum(c.holds for c in x.contradictions)} of {len(x.contradictions)} contradictions in the papers were "
        f"confirmed by arithmetic.",
        "",
        f"![Modelled ranges and printed values, AReaL-Hex](images/{IMAGES[0]})",
        "",
        f"![Modelled and printed ranges, HetRL](images/{IMAGES[1]})",
        "",
    ]


def _decides(gains: Sequence[Compared]) -> str:
    said = []
    for c in gains:
        if c.low is not None and c.high is not None and c.claim.fleets[1][1] == 0:
            said.append(f"{c.claim.model} {c.low:.2f}-{c.high:.2f}x against {c.claim.paper:.2f}x")
    return "8 H800 + 48 H20 over 24 H800 is " + ", ".join(said)


def _own_rates(x: Everything) -> str:
    only = [p for p in x.predicted if "only H800 train" in p.what and p.section == "figure 3"]
    free = [p for p in x.predicted if "over 24 H800 at the best split" in p.what and p.section == "figure 3"]
    said = [
        f"{o.value:.2f}x, {b.value:.2f}x at the best split (printed {o.paper:.2f}x)"
        for o, b in zip(only, free, strict=True)
    ]
    return "the same ratio would be " + "; ".join(f"{m} {s}" for m, s in zip(MODELS, said, strict=True))


def _hex_over_hetrl(rows: Sequence[Row]) -> str:
    found = sorted({v for r in rows for v in r.hex_over_hetrl})
    return f"{found[0]:.2f}-{found[-1]:.2f}x" if found else "-"


def _meets(r: Row) -> bool:
    return overlap(r.ours, r.paper) in ("inside", "around", "overlaps")


def _table_a(x: Everything) -> Iterator[str]:
    lengths = ", ".join(f"{v:,.0f}" for v in LENGTHS)
    yield from (
        "## (a) AReaL-Hex from first principles",
        "",
        f"Inputs: the printed GPU figures, prices and links; model shapes; our cost model. Not printed, hence swept "
        f"({len(sweep())} points a claim): mean "
        f"response length ({lengths} tokens) x H800 sheet ({' and '.join(SHEETS)} in TFLOP/s and TB/s) x samples a "
        f"replica decodes at once (64, or what "
        "memory allows); and one at a time around the shipped assumptions spread (coefficient of variation 0.3, 1.2), "
        "eta (1, 8), prompts a step (128), "
        "rolling updates, and keeping KV caches over an update.",
        f"*Ours* is `hex` at the shipped assumptions ({BASE.text()}, {BASE.prompts} prompts x 16, spread "
        f"{BASE.response_cv}, eta {BASE.eta}); *near* counts swept points "
        f"within {100 * NEAR:.0f} % of the paper's figure. Weight sync takes "
        f"{100 * FIRST_PRINCIPLES.update_efficiency:.0f} % of a "
        f"link, the share of any large transfer: the "
        "planner's default constant for it, and the shipped files' H20 training efficiency, come from this paper's "
        "own tables and are **not** used here.",
        f"*hex over* the papers' schedulers: tokens/s on the row's first fleet, least and most over {len(BESIDE)} "
        f"lengths; `hetrl` has {EVALUATIONS['hetrl']} evaluations.",
        "",
    )
    for section, (title, about) in SECTIONS.items():
        found = [c for c in x.compared if c.claim.section == section]
        yield from (f"### {title}", "", about, "")
        head = [
            "claim",
            "paper",
            "ours",
            "ours / paper",
            "swept",
            "near",
            "comment",
            *(f"hex over `{s}`" for s in OTHERS),
        ]
        yield from table(head, [_claim_row(c) for c in found])
        if section == "figure 3":
            yield from _roles(x)
        if section == "figure 4":
            yield from _sync(x.figures)


def _claim_row(c: Compared) -> list[str]:
    d = c.claim.digits
    swept = None if c.low is None or c.high is None else (c.low, c.high)
    return [
        c.claim.what, number(c.claim.paper, d), number(c.base, d),
        number(None if c.base is None else c.base / c.claim.paper), pair(swept, d), near_text(c), verdict(c),
        *(pair(b) for b in c.beats),
    ]  # fmt: skip


def _roles(x: Everything) -> Iterator[str]:
    """Which kind trains in our plans."""
    yield from (
        "In the paper H800 train and H20 generate. What `hex` does with 8 H800 + 48 H20, shipped assumptions but "
        "for the "
        "length; *gap*: how far the plan is below the proven bound:",
        "",
    )
    rows = []
    for m, i, plan in x.roles:
        sides = (
            " + ".join(f"{n} {k}" for k, n in sorted(side.items(), reverse=True)) for side in (plan.train, plan.rollout)
        )
        gap = "-" if plan.gap is None else f"{100 * plan.gap:.1f} %"
        rows.append([m, f"{i.response_mean:,.0f}", *sides, f"{plan.tokens_per_s:,.0f}", gap])
    yield from table(["model", "mean tokens", "train", "generate", "tokens/s", "gap"], rows)


def _sync(f: Figures) -> Iterator[str]:
    yield from ("Table 2, seconds of one sync; ours is bytes over the link at that share, nothing else:", "")
    across, same = f.setup["inter-machine across kinds"], f.setup["inter-machine same kind"]
    rows = []
    for (m, system), seen in f.latency.items():
        if seen.sync_s is not None:
            link = across if system.startswith(HEX) and not system.startswith(H800) else same
            ours = model_spec(m).weight_bytes / (link * 1e9 * FIRST_PRINCIPLES.update_efficiency)
            rows.append(
                [
                    f"{system}, {m}",
                    number(seen.sync_s),
                    number(ours),
                    number(ours / seen.sync_s),
                    f"{seen.sync_s / ours:.1f}x slower than the link",
                ]
            )
    yield from table(["fleet", "paper", "ours", "ours / paper", "comment"], rows)


def _rents(x: Everything) -> Iterator[str]:
    yield from (
        "### What to rent",
        "",
        "The paper's two questions put to the planner, over every mix in machines of eight: most tokens/s for at "
        "most the money of 24 H800, and the least "
        "money for no fewer tokens/s than theirs. The paper: 1.31-1.50x, and "
        f"{x.figures.ratios['cost reduction at equal throughput', 'all']:.2f}x cheaper with 8 + 24.".replace(
            "1.31-1.50x", pair(_printed(x.figures)) + "x"
        ),
        "",
    )
    mix = "{0} H800 + {1} H20".format
    rows = [
        [r.model, r.inputs.text(), mix(*r.most), f"{r.gain:.2f}x", mix(*r.least), f"{r.saving:.2f}x"] for r in x.rents
    ]
    yield from table(["model", "inputs", "most tokens", "over 24 H800", "as fast for least", "cheaper by"], rows)


def _printed(f: Figures) -> Pair:
    found = [f.ratios["hex over 24 H800 same budget", m] for m in MODELS]
    return min(found), max(found)


def _hetrl(x: Everything) -> Iterator[str]:
    readings = ", ".join(r for r in READINGS if r)
    yield from (
        "## (a) HetRL from first principles",
        "",
        "64 GPUs (24 A100-40, 24 L40S, 16 L4), 1024 + 1024 tokens, models of 4B, 8B and 14B, PPO and GRPO. S1: one "
        "region. S2: two regions and edge machines. "
        "S3: eight regions of Europe. S4: eight of Europe and the United States. The paper gives a range of "
        "speed-ups of its scheduler in each; it prints no "
        f"throughput, so nothing can be checked but ratios. Its network matrices are not printed: "
        f"[ours](../configs/hetrl-s3.toml) are public measurements. Async runs have eta {ETA}.",
        f"*Ours*: `hex` over the baseline, least to most over models and algorithms. *Other readings*: the same for "
        f"8B GRPO with {readings}. "
        f"`hetrl` (8B only, {EVALUATIONS['hetrl']} evaluations: it takes long) is this project's build of the "
        f"paper's search. *Shares by speed* compares one plan of `hex` with both kinds of shares, not planned anew. "
        f"*No plan*: cases where the baseline's rule has none; they "
        "are left out.",
        "",
    )
    head = [
        "scenario", "claim", "paper", "ours (median)", "median / middle of paper", "other readings",
        "our `hetrl` over the same", "hex over `hetrl`",
        "no plan", "comment",
    ]  # fmt: skip
    yield from table(head, [_hetrl_row(r) for r in x.rows])


def _hetrl_row(r: Row) -> list[str]:
    def span(values: Sequence[float]) -> str:
        return pair((min(values), max(values))) if values else "-"

    return [
        r.scenario, r.what, pair(r.paper), f"{pair(r.ours)} ({number(r.median)})", number(r.ratio), span(r.readings),
        span(r.hetrl), span(r.hex_over_hetrl),
        str(r.no_plan), where(r),
    ]  # fmt: skip


def _table_b(x: Everything) -> Iterator[str]:
    yield from (
        "## (b) AReaL-Hex from its own measured rates",
        "",
        "No cost model and no plan here: what one GPU does, from Table 1 (costs a token), Table 2 (sync) and the "
        "homogeneous fleet's seconds (Figure 4; for "
        "Figure 2 its own), is added up, and a step is max(infer, train) + sync with the same work everywhere. Not "
        "printed is how many of the homogeneous "
        "fleet's GPUs train: *ours* has one machine in three (Figure 2: half the machines), *range* a sixth to two "
        "thirds of the GPUs. These inputs appear nowhere in (a).",
        "",
    )
    rows = []
    for p in x.predicted:
        values = [v for _, v in p.values]
        off = p.value / p.paper
        said = (
            f"within {100 * NEAR:.0f} %"
            if abs(off - 1) <= NEAR
            else ("inside the range" if min(values) <= p.paper <= max(values) else "outside the range")
        )
        rows.append(
            [p.section, p.what, number(p.paper, p.digits), number(p.value, p.digits), number(off),
             pair((min(values), max(values)), p.digits),
             "; ".join(w for w in (said, p.comment) if w)]
        )  # fmt: skip
    yield from table(["figure", "claim", "paper", "ours", "ours / paper", "range", "comment"], rows)


def _needs(x: Everything) -> Iterator[str]:
    found = list(would_have_to_be(x.figures, x.compared, x.predicted, x.rows))
    if found:
        yield from ("## Where we do not get there, and what would have to be true", "")
        yield from (f"- {line}" for line in found)
        yield ""


def _contradictions(x: Everything) -> Iterator[str]:
    yield from ("## Contradictions in the papers", "", "Worked out anew from the papers' figures on each run.", "")
    rows = [[c.paper, c.what, c.one, c.other, "yes" if c.holds else "no"] for c in x.contradictions]
    yield from table(["paper", "about", "one statement", "the other", "confirmed"], rows)
    yield from (
        "Not published, so not checked: HetRL's absolute throughputs, search budgets, formulas of memory, "
        "resharding and sync, its ILP and its network matrices.",
        "",
    )


def _clocks(x: Everything) -> Iterator[str]:
    yield from (
        "## Seconds to a plan",
        "",
        f"AReaL-Hex's Table 5 gives the seconds of its scheduler, on a machine it does not name. Ours: {MODEL}, 8 "
        f"H800 and the rest H20, median of {REPEATS}, with the "
        f"proof of the bound; measured on {x.machine}. These are the only figures here that differ from run to run. "
        f"Other work shares the machine, so CPU "
        "seconds are given too.",
        "",
    )
    rows = [
        [
            str(c.gpus),
            f"`{c.scheduler}`",
            number(c.paper_s, 1),
            number(c.wall_s),
            number(c.cpu_s),
            f"{c.paper_s / c.wall_s:,.0f}x",
            f"{c.gap_percent:.2f} %",
        ]
        for c in x.clocks
    ]
    yield from table(["GPUs", "scheduler", "paper, s", "ours, s", "ours, CPU s", "faster by", "gap to the bound"], rows)
