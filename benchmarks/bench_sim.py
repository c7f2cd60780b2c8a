"""Seconds to simulate a run of 56 GPUs over 1,000 steps (8,192 samples a step), and how far it is from the cost model."""

import time

import planner
from benchmarks.bench_planner import _shipped
from planner.solution import Feasible
from runtime.sim import Options, simulate

STEPS = 1000


def run() -> dict[str, float]:
    """One core, processor time: other processes do not count."""
    problem = _shipped("areal-hex-56")
    solution = planner.solve(problem)
    assert isinstance(solution, Feasible)
    started = time.process_time()
    found = simulate(problem, solution.plan, Options(steps=STEPS))
    cpu_s = time.process_time() - started
    assert found.steady_tokens_per_s is not None
    return {
        "56-gpus-1000-steps.cpu_s": cpu_s,
        "56-gpus-1000-steps.us_per_sample": 1e6 * cpu_s / (STEPS * problem.workload.samples_per_step),
        "56-gpus.simulated_over_predicted": found.steady_tokens_per_s / solution.prediction.tokens_per_s,
    }
