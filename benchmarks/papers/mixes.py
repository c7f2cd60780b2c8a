"""What to rent on AReaL-Hex's market in machines of eight: its two headline questions put to the planner, by looking at every mix.

Same budget, most tokens; and the least money that gives the tokens of 24 H800. First principles, as table (a).
"""

from collections.abc import Iterator

from benchmarks.papers.claims import BASELINE, Answers, Fleet
from benchmarks.papers.figures import MODELS, Figures
from benchmarks.papers.fleets import BASE, PER_NODE, Inputs
from benchmarks.papers.solves import Ask, Solves
from planner.record import record, replace

INPUTS = (BASE, replace(BASE, sheet="989/3.35"), replace(BASE, response_mean=1000.0))


@record
class Rent:
    """The answers of one model at some inputs."""

    model: str
    inputs: Inputs
    most: Fleet  # within the budget
    gain: float  # its tokens/s over those of 24 H800
    least: Fleet  # as fast as 24 H800
    saving: float  # the budget over its price


def mixes(figures: Figures) -> Iterator[Fleet]:
    """Every mix of machines that the budget of 24 H800 pays for, that one included."""
    budget = figures.setup["budget"]
    for a in range(0, BASELINE[0] + 1, PER_NODE):
        left = budget - figures.price(a, 0)
        most = int(left / figures.setup["H20 price"] * (1 + 1e-9))
        yield from ((a, b) for b in range(0, most + 1, PER_NODE) if a + b)


def asks(solves: Solves, figures: Figures) -> Iterator[Ask]:
    """Every plan needed."""
    for m in MODELS:
        x = Answers(solves=solves, model=m, figures=figures)
        yield from (x.ask(fleet, i) for i in INPUTS for fleet in mixes(figures))


def compare(solves: Solves, figures: Figures) -> list[Rent]:
    """Best and cheapest; nothing for inputs at which 24 H800 have no plan."""
    solves.prepare(asks(solves, figures))
    out = []
    for m in MODELS:
        x = Answers(solves=solves, model=m, figures=figures)
        for i in INPUTS:
            rates = {f: r for f in mixes(figures) if (r := x.rate(f, i)) is not None}
            if BASELINE not in rates:
                continue
            most = max(rates, key=lambda f: (rates[f], -figures.price(*f)))
            least = min((f for f in rates if rates[f] >= rates[BASELINE]), key=lambda f: figures.price(*f))
            out.append(
                Rent(
                    model=m, inputs=i, most=most, gain=rates[most] / rates[BASELINE], least=least,
                    saving=figures.price(*BASELINE) / figures.price(*least),
                )
            )  # fmt: skip
    return out
