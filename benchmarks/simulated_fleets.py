"""`python -m benchmarks.simulated_fleets`: the simulated step beside the predicted one, for every fleet that is shipped.

Async workloads with rolling updates over 30 steps, on the plan of `hex` at the default budget; then those shipped in sync modes.
Prints a table of each. Nothing is timed: the figures are the same on every machine. Some minutes of a core.
"""

from collections.abc import Iterator

import planner
from benchmarks.bench_planner import CONFIGS
from planner.model import load_model_spec
from planner.problem import Problem
from planner.record import replace
from planner.solution import Feasible
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config
from runtime.errors import ConfigError
from runtime.sim import Options, simulate

STEPS = 30


def shipped() -> Iterator[tuple[str, Problem]]:
    """Every configuration that can be planned anywhere: it says its fleet and its model's shape, and its files are there."""
    for path in sorted(CONFIGS.glob("*.toml")):
        try:
            config = load_config(path).config
            yield (
                path.stem,
                problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path)),
            )
        except ConfigError:
            continue


def row(name: str, problem: Problem) -> str:
    """One row of a table: tokens/s and seconds a step after the warm-up, the ratio of rates, mean staleness of groups."""
    found = planner.solve(problem)
    if not isinstance(found, Feasible):
        return f"| {name} | no plan |"
    run = simulate(problem, found.plan, Options(steps=STEPS))
    told = found.prediction
    if run.steady_tokens_per_s is None or run.steady_step_s is None:
        return f"| {name} | {told.tokens_per_s:,.0f} | {run.ended} |"
    ages = (told.staleness_mean, run.group_staleness_mean)
    return (
        f"| {name} | {told.tokens_per_s:,.0f} | {run.steady_tokens_per_s:,.0f} "
        f"| {run.steady_tokens_per_s / told.tokens_per_s - 1:+.1%} | {told.step_s:,.1f} | {run.steady_step_s:,.1f} "
        f"| {run.steady_step_s / told.step_s - 1:+.1%} | "
        + " | ".join("-" if a is None else f"{a:.1f}" for a in ages)
        + " |"
    )


def main() -> None:
    """Print both tables."""
    head = "| fleet | tokens/s, predicted | simulated | | s a step, predicted | simulated | | staleness, predicted | simulated |"
    rule = "|---|---|---|---|---|---|---|---|---|"
    every = list(shipped())
    for title, synchronous in (("Async, rolling updates", False), ("Sync", True)):
        print(f"{title}, {STEPS} steps, simulated\n\n{head}\n{rule}")
        for name, problem in every:
            if problem.workload.synchronous == synchronous:
                rolling = replace(problem, workload=replace(problem.workload, update_mode="rolling"))
                print(row(name, problem if synchronous else rolling), flush=True)
        print()


if __name__ == "__main__":
    main()
