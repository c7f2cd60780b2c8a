"""Seconds from a configuration to a plan, and how far the plan is from its bound; then fleets of up to 10,000 GPUs."""

from pathlib import Path

import planner
from benchmarks.large_fleets import large_problem
from benchmarks.timing import median_ms
from planner.cost import CostModel
from planner.model import load_model_spec
from planner.problem import Problem
from planner.record import replace
from planner.scan import Scan
from planner.solution import Feasible
from planner.space import device_classes
from planner.workload import Mode
from runtime.config.load import load_config
from runtime.config.problem import cluster_from_config, problem_from_config

WHAT_IF_STEPS = 200
MODES: tuple[Mode, ...] = ("sync", "async")
CONFIGS = Path(__file__).resolve().parents[1] / "configs"


def _solve_s(problem: Problem, scheduler: str) -> float:
    return median_ms(lambda: planner.solve(problem, scheduler=scheduler), repeats=3, warm_up=0) / 1e3


def run() -> dict[str, float]:
    """AReaL-Hex's four fleets and the laptop's, HetRL's four scenarios, large fleets."""
    figures: dict[str, float] = {}
    for name in ("local", "areal-hex-24", "areal-hex-32", "areal-hex-48", "areal-hex-56"):
        problem = _shipped(name)
        for scheduler in ("areal-hex", "hex"):
            solution = planner.solve(problem, scheduler=scheduler)
            assert isinstance(solution, Feasible)
            figures[f"{name}.{scheduler}.solve_s"] = _solve_s(problem, scheduler)
            figures[f"{name}.{scheduler}.gap_percent"] = 100 * solution.gap
    for name in ("hetrl-s1", "hetrl-s2", "hetrl-s3", "hetrl-s4"):
        for mode in MODES:
            figures |= _scenario(name, mode)
    for devices, regions in ((1024, 1), (1024, 10), (10_000, 1)):
        figures |= _large(devices, regions)
    return figures


def _shipped(name: str) -> Problem:
    config = load_config(CONFIGS / f"{name}.toml").config
    return problem_from_config(config, cluster_from_config(config), load_model_spec(config.model.path))


def _scenario(name: str, mode: Mode) -> dict[str, float]:
    """PPO with all tasks on 64 GPUs: turns taken on shared devices, or generation apart."""
    problem = _shipped(name)
    # The shipped files are sync; eta is what they name for async.
    problem = replace(problem, workload=replace(problem.workload, mode=mode, eta=4 if mode == "async" else 0))
    solution = planner.solve(problem, scheduler="hex")
    assert isinstance(solution, Feasible)
    return {
        f"{name}.{mode}.hex.solve_s": _solve_s(problem, "hex"),
        f"{name}.{mode}.hex.gap_percent": 100 * solution.gap,
    }


def _large(devices: int, regions: int) -> dict[str, float]:
    """One large fleet: a plan from nothing, its gap, and the bound again after the loss of a machine."""
    problem, name = large_problem(devices, regions=regions), f"{devices}-gpus-{regions}-regions.hex"
    solution = planner.solve(problem, scheduler="hex")
    assert isinstance(solution, Feasible)
    scan, classes = Scan(CostModel(problem), device_classes(problem)), device_classes(problem)
    scan.bound_s(WHAT_IF_STEPS)
    return {
        f"{name}.solve_s": _solve_s(problem, "hex"),
        f"{name}.gap_percent": 100 * solution.gap,
        f"{name}.what_if_ms": median_ms(lambda: scan.rescan(classes[1:]).bound_s(WHAT_IF_STEPS), repeats=5),
    }
