"""How long a full garbage collection stops a replica's process, before and after its heap is settled.

A process of its own with what a replica's host has loaded: Ray, torch, the torch engine of `configs/local.toml`.
Milliseconds of processor time, medians; `objects` are those that a collection visits.
"""

import gc
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

CONFIG = Path(__file__).resolve().parents[1] / "configs/local.toml"
COLLECTIONS = 15


def run() -> dict[str, float]:
    """Medians of one process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_measured).result()


def _measured() -> dict[str, float]:
    import ray  # noqa: F401 - what a replica's host has loaded
    import torch

    import runtime.backends.ray.parts
    import runtime.rl.rollout  # noqa: F401
    from runtime.config.load import load_config
    from runtime.heap import settle
    from runtime.rl.engine.factory import build_engine

    torch.set_num_threads(1)
    engine = build_engine(load_config(CONFIG).config)
    figures = _collections("unsettled")
    settle()
    figures |= _collections("settled")
    del engine
    return figures


def _collections(name: str) -> dict[str, float]:
    spent_ms = []
    for _ in range(COLLECTIONS):
        began = time.process_time()
        gc.collect()
        spent_ms.append((time.process_time() - began) * 1e3)
    return {f"{name}_ms": statistics.median(spent_ms), f"{name}_objects": len(gc.get_objects())}
