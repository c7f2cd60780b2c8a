"""Table (a) for AReaL-Hex: each claim of the paper as a function of the inputs it does not print.

Nothing here knows a measurement of the paper but the `paper` value that stands beside ours.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

from benchmarks.papers.figures import (
    CASE_H20,
    CASE_H800,
    CASE_MIXED,
    H20,
    H800,
    H800_LATENCY,
    HEX,
    HEX_LATENCY,
    MODELS,
    UNIFORM,
    Figures,
)
from benchmarks.papers.fleets import BASE, FIRST_PRINCIPLES, LENGTHS, PER_NODE, Inputs, areal_hex, sweep
from benchmarks.papers.solves import Ask, Outcome, Solves
from planner.columns import Columns
from planner.cost.decode import ReplicaShape, concurrency_grid
from planner.cost.model import CostModel
from planner.record import record, replace
from planner.schedulers.areal_hex.training import best_trainer
from planner.space import device_classes, tp_degrees

Fleet = tuple[int, int]  # H800, H20
Pair = tuple[float, float]
BASELINE, MIX, CHEAP, SMALL = (24, 0), (8, 48), (8, 24), (8, 16)
CASE_A, CASE_B, CASE_C = (32, 0), (0, 88), (24, 24)  # Figure 2
NEAR = 0.1  # a swept value this close to the paper's counts as reproducing it
OTHERS = ("areal-hex", "hetrl")  # the two papers' schedulers, beside hex
BESIDE = tuple(replace(BASE, response_mean=m) for m in LENGTHS[1:])  # inputs at which they are asked too


@record
class Answers:
    """Modelled figures of one model, by inputs."""

    solves: Solves
    model: str
    figures: Figures

    def of(self, fleet: Fleet, inputs: Inputs, *, scheduler: str = "hex", halves: bool = False) -> Outcome | None:
        """The best plan there; None where nothing fits."""
        return self.solves.of(self.ask(fleet, inputs, scheduler=scheduler, halves=halves))

    def ask(self, fleet: Fleet, inputs: Inputs, *, scheduler: str = "hex", halves: bool = False) -> Ask:
        """The question behind `of`."""
        return Ask(problem=areal_hex(self.model, *fleet, inputs, halves=halves), scheduler=scheduler)

    def rate(self, fleet: Fleet, inputs: Inputs, scheduler: str = "hex") -> float | None:
        """tokens/s."""
        found = self.of(fleet, inputs, scheduler=scheduler)
        return None if found is None else found.tokens_per_s

    def per_usd(self, fleet: Fleet, inputs: Inputs, scheduler: str = "hex") -> float | None:
        """tokens/s per $/h."""
        rate = self.rate(fleet, inputs, scheduler)
        return None if rate is None else rate / self.figures.price(*fleet)


Ours = Callable[[Answers, Inputs, str], "float | None"]  # answers, inputs, scheduler


@record
class Claim:
    """One figure of the paper and how ours is got."""

    section: str
    what: str
    model: str
    paper: float
    ours: Ours
    fleets: tuple[Fleet, ...] = ()
    halves: bool = False  # also needs the first fleet cut in halves
    digits: int = 2
    swept: bool = True


def ratio(a: float | None, b: float | None) -> float | None:
    """a / b; None where either is missing."""
    return None if a is None or not b else a / b


def over(a: Fleet, b: Fleet) -> Ours:
    """tokens/s of one fleet over another's."""
    return lambda x, i, s: ratio(x.rate(a, i, s), x.rate(b, i, s))


def over_per_usd(a: Fleet, b: Fleet) -> Ours:
    """The same for each dollar."""
    return lambda x, i, s: ratio(x.per_usd(a, i, s), x.per_usd(b, i, s))


def field(fleet: Fleet, of: Callable[[Outcome], float]) -> Ours:
    """Something of the plan for a fleet."""

    def ours(x: Answers, i: Inputs, s: str) -> float | None:
        found = x.of(fleet, i, scheduler=s)
        return None if found is None else of(found)

    return ours


def over_halves(fleet: Fleet) -> Ours:
    """tokens/s of the best split of a fleet over those of equal halves."""

    def ours(x: Answers, i: Inputs, s: str) -> float | None:
        even = x.of(fleet, i, halves=True)
        return ratio(x.rate(fleet, i, s), None if even is None else even.tokens_per_s)

    return ours


def same_budget(figures: Figures) -> Fleet:
    """As many H20 as the budget of 24 H800 pays for."""
    return 0, int(figures.setup["budget"] / figures.setup["H20 price"])


def claims(figures: Figures) -> Iterator[Claim]:
    """All of them, each for every model."""
    h20 = same_budget(figures)
    by_model = [[*_throughput(figures, m, h20), *_latency(figures, m), *_money(figures, m)] for m in MODELS]
    for same in zip(*by_model, strict=True):
        yield from same


def _throughput(f: Figures, m: str, h20: Fleet) -> Iterator[Claim]:
    yield Claim(
        section="figure 3", what=f"8 H800 + 48 H20 over 24 H800, {m}", model=m,
        paper=f.ratios["hex over 24 H800 same budget", m], ours=over(MIX, BASELINE), fleets=(MIX, BASELINE),
    )  # fmt: skip
    yield Claim(
        section="figure 3", what=f"8 H800 + 48 H20 over {h20[1]} H20, {m}", model=m,
        paper=f.ratios["hex over H20 same budget", m], ours=over(MIX, h20), fleets=(MIX, h20),
    )  # fmt: skip
    for name, fleet, system, gpus in (
        ("24 H800", BASELINE, H800, 24),
        (f"{h20[1]} H20", h20, H20, None),
        ("8 H800 + 48 H20", MIX, HEX, 56),
    ):
        yield Claim(
            section="figure 3 absolute", what=f"tokens/s of {name}, {m}", model=m, digits=0,
            paper=f.tokens_per_s[m, system, gpus], ours=field(fleet, lambda o: o.tokens_per_s), fleets=(fleet,),
        )  # fmt: skip
    yield Claim(
        section="table 3", what=f"best split of 24 H800 over 12 + 12, {m}", model=m, halves=True,
        paper=f.tokens_per_s[m, H800, 24] / f.tokens_per_s[m, UNIFORM, 24], ours=over_halves(BASELINE), fleets=(BASELINE,),
    )  # fmt: skip


def _latency(f: Figures, m: str) -> Iterator[Claim]:
    case_a, case_b, case_c = (f.latency[m, s].step_s for s in (CASE_H800, CASE_H20, CASE_MIXED))
    yield Claim(
        section="figure 2", what=f"24 H800 + 24 H20 over 32 H800, {m}", model=m,
        paper=case_a / case_c, ours=over(CASE_C, CASE_A), fleets=(CASE_C, CASE_A),
    )  # fmt: skip
    yield Claim(
        section="figure 2", what=f"24 H800 + 24 H20 over 88 H20, {m}", model=m,
        paper=case_b / case_c, ours=over(CASE_C, CASE_B), fleets=(CASE_C, CASE_B),
    )  # fmt: skip
    mixed, alone = f.latency[m, HEX_LATENCY], f.latency[m, H800_LATENCY]
    for name, fleet, seen in (("24 H800", BASELINE, alone), ("8 H800 + 48 H20", MIX, mixed)):
        yield Claim(
            section="figure 4", what=f"rollout over training seconds on {name}, {m}", model=m,
            paper=seen.infer_s / seen.train_s, ours=field(fleet, lambda o: o.rollout_s / o.train_s), fleets=(fleet,),
        )  # fmt: skip
    yield Claim(
        section="figure 4", what=f"sync, % of a step on 8 H800 + 48 H20, {m}", model=m, digits=1,
        paper=100 * (mixed.sync_s or 0.0) / mixed.step_s, ours=field(MIX, lambda o: 100 * o.update_s / o.step_s), fleets=(MIX,),
    )  # fmt: skip


def _money(f: Figures, m: str) -> Iterator[Claim]:
    cheap, alone = f.tokens_per_s[m, HEX, 32], f.tokens_per_s[m, H800, 24]
    yield Claim(
        section="table 4", what=f"tokens/s of 8 H800 + 24 H20 over 24 H800, {m}", model=m,
        paper=cheap / alone, ours=over(CHEAP, BASELINE), fleets=(CHEAP, BASELINE),
    )  # fmt: skip
    yield Claim(
        section="table 4", what=f"tokens a dollar of 8 H800 + 24 H20 over 24 H800, {m}", model=m,
        paper=cheap / f.price(*CHEAP) / (alone / f.price(*BASELINE)), ours=over_per_usd(CHEAP, BASELINE), fleets=(CHEAP, BASELINE),
    )  # fmt: skip
    printed = [f.ratios[f"tokens/s per $/h {n} GPUs", m] for n in (24, 56)]
    yield Claim(
        section="figure 5", what=f"tokens a dollar, the bar of 56 GPUs over that of 24, {m}", model=m,
        paper=printed[1] / printed[0], ours=over_per_usd(MIX, SMALL), fleets=(MIX, SMALL),
    )  # fmt: skip
    yield Claim(
        section="figure 5", what=f"the same bars if their labels are in reverse, {m}", model=m,
        paper=printed[0] / printed[1], ours=over_per_usd(MIX, SMALL), fleets=(MIX, SMALL),
    )  # fmt: skip
    yield Claim(
        section="table 1", what=f"an H20 is cheaper a rollout token, {m}", model=m,
        paper=f.ratios["H20 cheaper per token in rollout", m],
        ours=lambda x, i, _: _cheaper(x, i, "rollout"),
    )  # fmt: skip
    yield Claim(
        section="table 1", what=f"an H800 is cheaper a trained token, {m}", model=m,
        paper=f.ratios["H800 cheaper per token in training", m],
        ours=lambda x, i, _: ratio(1.0, _cheaper(x, i, "train")),
    )  # fmt: skip


def _cheaper(x: Answers, inputs: Inputs, what: str) -> float | None:
    """Tokens a dollar of an H20 over those of an H800."""
    price = {k: x.figures.setup[f"{k} price"] for k in ("H800", "H20")}
    rates = {k: device_rate(x.model, k, inputs, what) for k in price}
    return ratio(ratio(rates["H20"], price["H20"]), ratio(rates["H800"], price["H800"]))


@functools.cache
def device_rate(model: str, kind: str, inputs: Inputs, what: str) -> float | None:
    """tokens/s a device does alone, in a machine of eight: generating in its best replica, or training in the best layout."""
    problem = areal_hex(model, *((PER_NODE, 0) if kind == "H800" else (0, PER_NODE)), inputs)
    cost = CostModel(problem, FIRST_PRINCIPLES)
    if what == "train":
        found = best_trainer(Columns(cost), device_classes(problem), (PER_NODE,))
        return None if found is None else problem.workload.response_tokens_per_step / found.cost.train_s / PER_NODE
    shapes = (ReplicaShape(kind=kind, tp=t) for t in tp_degrees(problem, PER_NODE))
    levels = ((s, b) for s in shapes for b in concurrency_grid(cost.running_limit(s)))
    return max((cost.level(s, b).rate_tokens_per_s / s.tp for s, b in levels), default=None)


def asks(solves: Solves, figures: Figures, found: Sequence[Claim], inputs: Sequence[Inputs]) -> Iterator[Ask]:
    """Every plan that the claims need over the sweep."""
    for c in found:
        x = Answers(solves=solves, model=c.model, figures=figures)
        for fleet, i in itertools.product(c.fleets, inputs):
            yield x.ask(fleet, i)
        for fleet, i, s in itertools.product(c.fleets[:1], BESIDE, OTHERS):
            yield x.ask(fleet, i, scheduler=s)
        if c.halves:
            yield from (x.ask(c.fleets[0], i, halves=True) for i in inputs)


@record
class Compared:
    """A claim with ours beside it."""

    claim: Claim
    base: float | None  # at the shipped assumptions
    swept: tuple[tuple[Inputs, float], ...]
    beats: tuple[Pair | None, ...]  # hex over each of OTHERS on the first fleet, tokens/s: least and most over BESIDE

    @property
    def low(self) -> float | None:
        """The least over the sweep."""
        return min((v for _, v in self.swept), default=None)

    @property
    def high(self) -> float | None:
        """The most."""
        return max((v for _, v in self.swept), default=None)

    @property
    def near(self) -> tuple[Inputs, ...]:
        """The inputs at which ours is close to the paper's."""
        return tuple(i for i, v in self.swept if abs(v / self.claim.paper - 1) <= NEAR)

    @property
    def nearest(self) -> tuple[Inputs, float] | None:
        """The input and value closest to the paper's, by ratio."""
        paper = self.claim.paper
        return min(
            self.swept, key=lambda p: max(p[1] / paper, paper / p[1]) if p[1] > 0 else float("inf"), default=None
        )


def roles(solves: Solves, figures: Figures) -> list[tuple[str, Inputs, Outcome]]:
    """hex's plans for the mix of Figure 3 at the shipped assumptions and other lengths: which kind trains."""
    found = []
    for m, i in itertools.product(MODELS, (replace(BASE, response_mean=x) for x in LENGTHS)):
        plan = Answers(solves=solves, model=m, figures=figures).of(MIX, i)
        if plan is not None:
            found.append((m, i, plan))
    return found


def compare(solves: Solves, figures: Figures, found: Sequence[Claim]) -> list[Compared]:
    """Claims over the sweep."""
    inputs = sweep()
    solves.prepare(asks(solves, figures, found, inputs))
    out = []
    for c in found:
        x = Answers(solves=solves, model=c.model, figures=figures)
        swept = tuple((i, v) for i in inputs if (v := c.ours(x, i, "hex")) is not None)
        out.append(Compared(claim=c, base=c.ours(x, BASE, "hex"), swept=swept, beats=_beats(x, c)))
    return out


def _beats(x: Answers, c: Claim) -> tuple[Pair | None, ...]:
    def spread(other: str) -> Pair | None:
        found = [r for i in BESIDE if (r := ratio(x.rate(c.fleets[0], i), x.rate(c.fleets[0], i, other))) is not None]
        return (min(found), max(found)) if found else None

    return tuple(spread(o) for o in OTHERS) if c.fleets else (None,) * len(OTHERS)
