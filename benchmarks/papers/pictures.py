"""The two pictures of the report."""

from benchmarks.papers.plots import Bar, drawn
from benchmarks.papers.report import Everything

SHOWN = ("figure 3", "figure 2", "table 4", "table 3", "table 1")


def pictures(x: Everything) -> tuple[str, str]:
    """AReaL-Hex's claims, and HetRL's ranges."""
    own = {p.what.replace(", both at", " at").replace(" at the best split", ""): p.value for p in x.predicted}
    hexes = [
        Bar(
            label=c.claim.what, low=c.low, middle=c.base, high=c.high, paper=(c.claim.paper, c.claim.paper),
            mark=own.get(c.claim.what.replace("tokens/s of ", "")),
        )
        for section in SHOWN
        for c in x.compared
        if c.claim.section == section and c.low is not None and c.high is not None and c.base is not None
    ]  # fmt: skip
    hetrl = [
        Bar(label=f"{r.scenario} {r.what}", low=r.ours[0], middle=r.median, high=r.ours[1], paper=r.paper)
        for r in x.rows
        if r.ours is not None and r.median is not None
    ]
    return (
        drawn(
            "AReaL-Hex: ratios, first principles over the sweep",
            "at the shipped assumptions",
            hexes,
            "the paper's own rates (b)",
        ),
        drawn("HetRL: speed-ups by scenario, over models and algorithms", "median", hetrl),
    )
