"""How long a piece of work takes: CUDA events on a GPU, the wall clock on a CPU."""

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM_SHARE = 0.25  # of the time for a point goes into warming up
LEAST_S = 1e-3  # one sample lasts at least so long, so that neither clock nor events are felt
SAMPLES = 5


def seconds_of(work: Callable[[int], object], device: torch.device, budget_s: float) -> float:
    """Median seconds of `work(i)` with i = 0, 1, ...: `i` lets it rotate its operands, so that caches do not hold them.

    Calls are put together until a sample lasts a millisecond. Takes about `budget_s`, at least two calls.
    """
    once_s = _batch_s(work, device, 0, 1)  # loads kernels, picks algorithms
    began, done = time.perf_counter(), 1
    while time.perf_counter() - began < budget_s * WARM_SHARE:
        once_s = _batch_s(work, device, done, 1)
        done += 1
    calls = max(1, math.ceil(LEAST_S / max(once_s, 1e-9)))
    samples: list[float] = []
    while len(samples) < SAMPLES or (time.perf_counter() - began < budget_s and len(samples) < 1000):
        samples.append(_batch_s(work, device, done, calls) / calls)
        done += calls
        if time.perf_counter() - began > 4 * budget_s:
            break  # one call takes longer than its share: what there is must do
    return statistics.median(samples)


def _batch_s(work: Callable[[int], object], device: torch.device, first: int, calls: int) -> float:
    if device.type != "cuda":
        began = time.perf_counter()
        for i in range(first, first + calls):
            work(i)
        return time.perf_counter() - began
    with torch.cuda.device(device):  # an event is recorded on a stream of the current device, whoever does the work
        begin, end = event(), event()
        torch.cuda.synchronize(device)
        begin.record()
        for i in range(first, first + calls):
            work(i)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3  # events count milliseconds


def event() -> Any:
    """A CUDA event that keeps time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
