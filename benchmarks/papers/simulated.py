"""A check apart from both tables: claims from whole runs in virtual time (`runtime.sim`), beside what the cost model predicts of them.

Only where the simulator is part of the checkout. Plans and runs have the planner's default constants, weight sync included.
"""

import importlib
import importlib.util
from collections.abc import Iterator, Sequence

import planner
from benchmarks.papers.claims import BASELINE, CHEAP, MIX, Fleet, same_budget
from benchmarks.papers.figures import H20, H800, HEX, Figures
from benchmarks.papers.fleets import BASE, areal_hex
from planner.record import record

MODEL, STEPS, SEED = "7B", 40, 0


@record
class Simulated:
    """A claim three times: tokens/s of one fleet over another's."""

    what: str
    paper: float
    predicted: float
    simulated: float


def available() -> bool:
    """Whether there is a simulator."""
    return (
        importlib.util.find_spec("runtime.sim") is not None
        and importlib.util.find_spec("runtime.sim.report") is not None
    )


def rates(fleet: Fleet) -> tuple[float, float] | None:
    """(predicted, simulated) tokens/s of hex's plan at the shipped assumptions; None where there is none, or no steady state."""
    sim = importlib.import_module("runtime.sim")
    problem = areal_hex(MODEL, *fleet, BASE)
    found = planner.solve(problem)
    if not isinstance(found, planner.Feasible):
        return None
    run = sim.simulate(problem, found.plan, sim.Options(steps=STEPS, seed=SEED))
    steady = run.steady_tokens_per_s
    return None if steady is None else (found.prediction.tokens_per_s, float(steady))


def compare(figures: Figures) -> list[Simulated]:
    """Three claims; empty without a simulator."""
    if not available():
        return []
    h20 = same_budget(figures)
    seen = {f: rates(f) for f in (MIX, BASELINE, CHEAP, h20)}
    paper = {
        MIX: figures.tokens_per_s[MODEL, HEX, 56],
        BASELINE: figures.tokens_per_s[MODEL, H800, 24],
        CHEAP: figures.tokens_per_s[MODEL, HEX, 32],
        h20: figures.tokens_per_s[MODEL, H20, None],
    }
    out = []
    for a, b in ((MIX, BASELINE), (MIX, h20), (CHEAP, BASELINE)):
        one, other = seen[a], seen[b]
        if one is not None and other is not None:
            out.append(
                Simulated(
                    what=f"{_name(a)} over {_name(b)}, {MODEL}",
                    paper=paper[a] / paper[b],
                    predicted=one[0] / other[0],
                    simulated=one[1] / other[1],
                )
            )
    return out


def _name(fleet: Fleet) -> str:
    return " + ".join(f"{n} {kind}" for n, kind in zip(fleet, ("H800", "H20"), strict=True) if n)


def section(found: Sequence[Simulated]) -> Iterator[str]:
    """Its part of the report; nothing without a simulator."""
    if not found:
        return
    yield from (
        "## Simulated beside predicted",
        "",
        f"The same claims from runs of {STEPS} steps in virtual time over the runtime's own policies "
        f"(**simulated**), beside the cost model's "
        "prediction of the same plans. Both have the planner's default constants, of which that of weight sync is "
        "calibrated on Table 2, so these "
        "rows belong to neither (a) nor (b).",
        "",
        "| claim | paper | predicted | simulated | simulated / predicted |",
        "|---|---|---|---|---|",
    )
    for s in found:
        yield f"| {s.what} | {s.paper:.2f} | {s.predicted:.2f} | {s.simulated:.2f} | {s.simulated / s.predicted:.3f} |"
    yield ""
