"""Table (a) for HetRL: its ranges of speed-ups in four networks, beside ours over the same models and algorithms.

HetRL prints ratios only, so nothing of it can be an input. Its `verl` and `streamrl` are those systems run on GPUs; ours are
models of how they place a workload (docs/concepts/baselines.md).
"""

import itertools
import statistics
from collections.abc import Iterator, Sequence

from benchmarks.papers.figures import Figures
from benchmarks.papers.fleets import ALGORITHMS, HETRL_MODELS, MODES, SCENARIOS, hetrl
from benchmarks.papers.solves import Ask, Outcome, Solves
from planner.cluster import Link
from planner.problem import Problem
from planner.record import record, replace
from planner.workload import Algorithm, Mode

BIG = "A100-40"  # the kind of HetRL's homogeneous comparison
MIDDLE = "8B"  # the model of its breakdowns; hetrl, which takes long, is asked for this one only
Pair = tuple[float, float]


@record
class Case:
    """One run of HetRL."""

    scenario: str
    model: str
    algorithm: Algorithm
    mode: Mode
    reading: str = ""  # of what HetRL does not print; "": the shipped file's

    def problem(self, only: str | None = None) -> Problem:
        """Its 64 GPUs, or those of the kind `only`."""
        base = hetrl(self.scenario, self.model, self.algorithm, self.mode, only=only)
        return READINGS[self.reading](base)

    def ask(self, scheduler: str = "hex", only: str | None = None) -> Ask:
        """The question."""
        return Ask(problem=self.problem(only), scheduler=scheduler)


def _as_shipped(p: Problem) -> Problem:
    return p


def _batch_of_prompts(p: Problem) -> Problem:
    return replace(p, workload=replace(p.workload, prompts_per_step=1024))


def _little_staleness(p: Problem) -> Problem:
    return p if p.workload.mode == "sync" else replace(p, workload=replace(p.workload, eta=1))


def _slow_machines(p: Problem) -> Problem:
    slow = Link(latency_s=p.cluster.same_kind.latency_s, bytes_per_s=25e9 / 8)
    return replace(p, cluster=replace(p.cluster, same_kind=slow, cross_kind=slow))


READINGS = {
    "": _as_shipped,
    "1024 prompts a step": _batch_of_prompts,
    "eta 1": _little_staleness,
    "25 Gbit/s between machines": _slow_machines,
}


def cases(scenario: str, mode: Mode) -> tuple[Case, ...]:
    """Every model with every algorithm; the other readings with the middle model and GRPO."""
    plain = [
        Case(scenario=scenario, model=m, algorithm=a, mode=mode) for m, a in itertools.product(HETRL_MODELS, ALGORITHMS)
    ]
    read = [
        Case(scenario=scenario, model=MIDDLE, algorithm="grpo", mode=mode, reading=r)
        for r in READINGS
        if r and not (mode == "sync" and r.startswith("eta"))
    ]
    return (*plain, *read)


@record
class Row:
    """One range of the paper with ours."""

    what: str
    scenario: str
    paper: Pair
    values: tuple[tuple[Case, float], ...]  # hex over the baseline, as shipped
    readings: tuple[float, ...]  # the same under the other readings
    hetrl: tuple[float, ...]  # our hetrl over the baseline
    hex_over_hetrl: tuple[float, ...]
    no_plan: int  # cases in which the baseline's rule has no plan
    comment: str = ""

    @property
    def median(self) -> float | None:
        """Of hex over the baseline."""
        return statistics.median(v for _, v in self.values) if self.values else None

    @property
    def ours(self) -> Pair | None:
        """Least and most."""
        return spread([v for _, v in self.values])

    @property
    def ratio(self) -> float | None:
        """Our median over the middle of the paper's range (geometric)."""
        return None if self.median is None else self.median / (self.paper[0] * self.paper[1]) ** 0.5


def spread(values: Sequence[float]) -> Pair | None:
    """Least and most; None of nothing."""
    return (min(values), max(values)) if values else None


BASELINES: tuple[tuple[Mode, str], ...] = (("sync", "verl"), ("async", "verl"), ("async", "streamrl"))


def asks() -> Iterator[Ask]:
    """Every plan needed, the slow ones first."""
    everything = [c for s, mode in itertools.product(SCENARIOS, MODES) for c in cases(s, mode)]
    yield from (c.ask("hetrl") for c in everything if c.model == MIDDLE and not c.reading)
    for c in everything:
        yield c.ask()
        yield from (c.ask(b) for mode, b in BASELINES if mode == c.mode)
    yield from (c.ask(only=BIG) for c in everything if (c.scenario, c.model, c.reading) == ("S1", MIDDLE, ""))


def compare(solves: Solves, figures: Figures) -> list[Row]:
    """All rows."""
    solves.prepare(asks())
    rows = []
    for scenario, (mode, baseline) in itertools.product(SCENARIOS, BASELINES):
        paper = figures.speed_up(scenario, mode, baseline)
        if paper is not None:
            rows.append(_row(solves, scenario, mode, baseline, (paper.low, paper.high)))
    return [*rows, *_own(solves, figures)]


def _row(solves: Solves, scenario: str, mode: Mode, baseline: str, paper: Pair) -> Row:
    values: list[tuple[Case, float]] = []
    readings: list[float] = []
    theirs: list[float] = []
    beats: list[float] = []
    no_plan = 0
    for c in cases(scenario, mode):
        ours, other = solves.of(c.ask()), solves.of(c.ask(baseline))
        no_plan += other is None
        gain = over(ours, other)
        if c.reading:
            readings += [gain] if gain else []
            continue
        values += [(c, gain)] if gain else []
        if c.model == MIDDLE:
            found = solves.of(c.ask("hetrl"))
            theirs += [g] if (g := over(found, other)) else []
            beats += [g] if (g := over(ours, found)) else []
    return Row(
        what=f"{mode}, over {baseline}",
        scenario=scenario,
        paper=paper,
        values=tuple(values),
        readings=tuple(readings),
        hetrl=tuple(theirs),
        hex_over_hetrl=tuple(beats),
        no_plan=no_plan,
    )


def over(a: Outcome | None, b: Outcome | None) -> float | None:
    """tokens/s of one over another's; None where either has no plan."""
    return a.tokens_per_s / b.tokens_per_s if a is not None and b is not None else None


def _own(solves: Solves, figures: Figures) -> Iterator[Row]:
    """HetRL against itself: fewer GPUs, and without its load balancing."""
    for name, scenarios in (
        ("S1 8B all 64 GPUs over 24 A100", SCENARIOS[:1]),
        ("cross-region 8B over 24 A100", SCENARIOS[1:]),
    ):
        yield _plain(
            "all 64 GPUs over the 24 A100 in one region, 8B", figures, name, scenarios,
            [
                (c, over(solves.of(c.ask()), solves.of(replace(c, scenario="S1").ask(only=BIG))))
                for s, mode in itertools.product(scenarios, MODES)
                for c in cases(s, mode)
                if c.model == MIDDLE and not c.reading
            ],
        )  # fmt: skip
    for name, scenarios in (
        ("load balancing gain single region sync", SCENARIOS[:1]),
        ("load balancing gain cross region sync", SCENARIOS[1:]),
    ):
        yield _plain(
            "shares by speed over equal shares, sync", figures, name, scenarios,
            [(c, _balanced(solves.of(c.ask()))) for s in scenarios for c in cases(s, "sync") if not c.reading],
        )  # fmt: skip


def _balanced(found: Outcome | None) -> float | None:
    return found.tokens_per_s / found.even_tokens_per_s if found is not None and found.even_tokens_per_s else None


def _plain(
    what: str, figures: Figures, name: str, scenarios: Sequence[str], found: Sequence[tuple[Case, float | None]]
) -> Row:
    paper = next(r for r in figures.hetrl if r.scenario == name)
    return Row(
        what=what,
        scenario=scenarios[0] if len(scenarios) == 1 else f"{scenarios[0]}-{scenarios[-1]}",
        paper=(paper.low, paper.high),
        values=tuple((c, v) for c, v in found if v is not None),
        readings=(),
        hetrl=(),
        hex_over_hetrl=(),
        no_plan=sum(v is None for _, v in found),
    )


def every_gain(rows: Sequence[Row], baseline: str) -> list[float]:
    """hex over that baseline in every case."""
    return [v for r in rows if r.what.endswith(f"over {baseline}") for _, v in r.values]
