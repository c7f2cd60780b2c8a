"""A plan searched for in view: on a terminal a line says how far the search is."""

import time
from collections.abc import Callable

from hexctl.cli.exits import Progress
from planner.problem import Budget, Problem
from planner.solution import Feasible, Solution


def solve(
    problem: Problem, scheduler: str, *, should_stop: Callable[[], bool], budget: Budget | None = None
) -> tuple[Solution, float]:
    """`planner.solve`, and the seconds it took."""
    import planner

    progress, began, best = Progress(), time.monotonic(), "no plan yet"

    def on_incumbent(incumbent: Feasible) -> None:
        nonlocal best
        best = f"{incumbent.prediction.tokens_per_s:,.0f} tokens/s, gap {100 * incumbent.gap:.1f} %"

    def asked() -> bool:
        devices = len(problem.cluster.devices)
        progress.tick(f"{scheduler}: {best}, {devices:,} devices, {time.monotonic() - began:.0f} s")
        return should_stop()

    try:
        asked()  # the line is there before anything is searched
        found = planner.solve(problem, scheduler=scheduler, budget=budget, on_incumbent=on_incumbent, should_stop=asked)
    finally:
        progress.done()
    return found, time.monotonic() - began
