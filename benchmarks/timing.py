"""How everything here is timed: medians of repeated calls after warm-up; processor time of processes."""

import statistics
import time
from collections.abc import Callable

import psutil


def median_ms(call: Callable[[], object], *, repeats: int = 15, warm_up: int = 3) -> float:
    """Median milliseconds of one call."""
    for _ in range(warm_up):
        call()
    taken = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        taken.append((time.perf_counter() - started) * 1e3)
    return statistics.median(taken)


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds of a process so far; 0 when it is gone."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
