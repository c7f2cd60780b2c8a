"""`python -m benchmarks.papers [FOLDER]`: writes docs/papers.md and its pictures from the papers' figures in FOLDER.

FOLDER defaults to ../shared/data/papers beside the checkout. Where it is absent or lacks files this says so and ends with
success: nothing of the project needs it. Takes about a quarter of an hour on two busy cores; progress is on stderr.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.papers import claims, clocks, contradictions, measured, mixes, scenarios, simulated
from benchmarks.papers.figures import missing, read_figures
from benchmarks.papers.pictures import pictures
from benchmarks.papers.report import IMAGES, Everything, report
from benchmarks.papers.solves import Solves

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT.parent / "shared" / "data" / "papers"


def main(argv: list[str] | None = None) -> int:
    """Read, solve, write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="the CSV files of the papers' figures")
    parser.add_argument("--to", type=Path, default=ROOT / "docs", help="folder of the page; pictures go to its images/")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes that solve")
    parser.add_argument("--cache", type=Path, help="file that keeps plans for as long as the planner's sources stay")
    arguments = parser.parse_args(argv)
    lacking = missing(arguments.folder)
    if lacking:
        print(f"papers: nothing written, {arguments.folder} lacks {', '.join(lacking)}")
        print("hint: name the folder with the papers' figures: python -m benchmarks.papers FOLDER")
        return 0
    started = time.monotonic()
    figures = read_figures(arguments.folder)
    solves = Solves(jobs=arguments.jobs, cache=arguments.cache)

    def said(what: str) -> None:
        print(f"papers: {what} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)

    said("HetRL's scenarios")
    rows = scenarios.compare(solves, figures)
    said("AReaL-Hex's claims")
    compared = claims.compare(solves, figures, list(claims.claims(figures)))
    said("what to rent")
    rents = mixes.compare(solves, figures)
    said("simulated runs" if simulated.available() else "no simulator here: left out")
    runs = list(simulated.section(simulated.compare(figures)))
    said("seconds to a plan")
    timed = clocks.measure(figures)
    found = Everything(
        figures=figures,
        compared=compared,
        predicted=list(measured.predictions(figures)),
        rents=rents,
        roles=claims.roles(solves, figures),
        rows=rows,
        contradictions=list(contradictions.contradictions(figures)),
        clocks=timed,
        machine=clocks.machine(),
        simulated=runs,
    )
    (arguments.to / "images").mkdir(parents=True, exist_ok=True)
    (arguments.to / "papers.md").write_text(report(found))
    for name, text in zip(IMAGES, pictures(found), strict=True):
        (arguments.to / "images" / name).write_text(text)
    spent = os.times()
    cpu_s = spent.user + spent.system + spent.children_user + spent.children_system
    said(f"wrote {arguments.to / 'papers.md'}, {cpu_s:.0f} CPU s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
