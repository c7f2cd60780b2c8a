"""Seconds from a configuration to a plan, and how far the plan is from its bound."""

from pathlib import Path

import planner
from benchmarks.timing import median_ms
from planner.model import load_model_spec
from planner.problem import Problem
from planner.solution import Feasible
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def _solve_s(problem: Problem, scheduler: str) -> float:
    return median_ms(lambda: planner.solve(problem, scheduler=scheduler), repeats=3, warm_up=0) / 1e3


def run() -> dict[str, float]:
    """The paper's four fleets and the laptop's."""
    figures: dict[str, float] = {}
    for name in ("local", "areal-hex-24", "areal-hex-32", "areal-hex-48", "areal-hex-56"):
        config = load_config(CONFIGS / f"{name}.toml").config
        problem = problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path))
        for scheduler in ("areal-hex", "hex"):
            solution = planner.solve(problem, scheduler=scheduler)
            assert isinstance(solution, Feasible)
            figures[f"{name}.{scheduler}.solve_s"] = _solve_s(problem, scheduler)
            figures[f"{name}.{scheduler}.gap_percent"] = 100 * solution.gap
    return figures
