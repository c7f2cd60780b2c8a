"""Seconds from a problem to its plan, on this machine: AReaL-Hex's Table 5 beside ours. The one part of the report that no seed fixes."""

import os
import platform
import statistics
import time
from pathlib import Path

import planner
from benchmarks.papers.figures import Figures
from benchmarks.papers.fleets import BASE, areal_hex
from planner.record import record

FLEETS = {24: (8, 16), 32: (8, 24), 40: (8, 32), 56: (8, 48)}
MODEL, REPEATS = "7B", 3


@record
class Clock:
    """One scheduler on one fleet."""

    gpus: int
    scheduler: str
    paper_s: float
    wall_s: float
    cpu_s: float
    gap_percent: float


def machine() -> str:
    """What it ran on."""
    info = Path("/proc/cpuinfo")
    names = (
        [x.split(":", 1)[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")]
        if info.exists()
        else []
    )
    name = names[0] if names else platform.processor() or platform.machine()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    return f"{os.cpu_count()} cores of {name}, Python {platform.python_version()}, load {load:.1f}"


def measure(figures: Figures) -> list[Clock]:
    """Medians, bound and explanation included."""
    out = []
    for gpus, fleet in FLEETS.items():
        problem = areal_hex(MODEL, *fleet, BASE)
        for scheduler in ("hex", "areal-hex"):
            wall, cpu, gap = [], [], 0.0
            for _ in range(REPEATS):
                started, used = time.perf_counter(), time.process_time()
                found = planner.solve(problem, scheduler=scheduler)
                wall.append(time.perf_counter() - started)
                cpu.append(time.process_time() - used)
                gap = 100 * found.gap if isinstance(found, planner.Feasible) else float("nan")
            out.append(
                Clock(
                    gpus=gpus, scheduler=scheduler, paper_s=figures.ratios[f"scheduling seconds {gpus} GPUs", ""],
                    wall_s=statistics.median(wall), cpu_s=statistics.median(cpu), gap_percent=gap,
                )
            )  # fmt: skip
    return out
