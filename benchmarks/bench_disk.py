"""What the ledger's commits wait for while a large file is written to their disk: written at once and synced at the end, and by portions.

    python -m benchmarks disk                                     # 1.6 GB, a checkpoint of a 135M model, where temporary files are
    python -m benchmarks.bench_disk --folder runs --gigabytes 4

An event is appended to a store of the runtime's own every 10 ms, by another thread; the file is hashed beside, as checkpoints are.
How much a system keeps back before it begins to write by itself depends on its memory: small hosts show less of a difference.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch

from planner.record import record
from runtime.core.event import FlowFellSilent
from runtime.rl.weights.streamed import write_tensors
from runtime.rl.weights.tensor_file import PORTION_BYTES, TensorShape
from runtime.store.events import open_store

BYTES = 1_614_000_000  # 12 a parameter of 134.5M
TENSOR_BYTES = 24_000_000
EVERY_S = 0.01
ROUNDS = 3
WAYS = {"at_once": 2**62, "by_portions": PORTION_BYTES}


@record
class Beside:
    """One file, and the commits beside it."""

    write_s: float
    commits_s: tuple[float, ...]


def run() -> dict[str, float]:
    """Medians of a few rounds."""
    with tempfile.TemporaryDirectory(prefix="hexctl-disk-") as folder:
        return measured(Path(folder), BYTES)


def measured(folder: Path, size: int) -> dict[str, float]:
    """Both ways in turn, round by round, in `folder`."""
    found: dict[str, list[Beside]] = {way: [] for way in WAYS}
    for _ in range(ROUNDS):
        for way, portion in WAYS.items():
            found[way].append(_beside(folder, partial(_write, folder / "file", size, portion)))
    figures: dict[str, float] = {}
    for way, rounds in found.items():
        figures |= {
            f"{way}_mb_per_s": size / statistics.median(r.write_s for r in rounds) / 1e6,
            f"{way}_commit_ms": statistics.median(s for r in rounds for s in r.commits_s) * 1e3,
            f"{way}_longest_commit_ms": statistics.median(max(r.commits_s) for r in rounds) * 1e3,
        }
    return figures


def _write(path: Path, size: int, portion_bytes: int) -> None:
    tensor = torch.randint(0, 256, (TENSOR_BYTES,), dtype=torch.uint8)
    count = max(1, size // TENSOR_BYTES)
    layout = {str(i): TensorShape(shape=tuple(tensor.shape), dtype=tensor.dtype) for i in range(count)}
    write_tensors(path, layout, ((name, tensor) for name in layout), portion_bytes=portion_bytes)


def _beside(folder: Path, write: Callable[[], None]) -> Beside:
    ended = threading.Event()

    def commits() -> tuple[float, ...]:
        taken_s = []
        with open_store(folder / "events.db") as store:
            while not ended.is_set():
                began = time.monotonic()
                store.append([FlowFellSilent(age_s=began)], time.time())
                taken_s.append(time.monotonic() - began)
                ended.wait(EVERY_S)
        return tuple(taken_s)

    with ThreadPoolExecutor(1) as pool:
        beside = pool.submit(commits)
        began = time.monotonic()
        try:
            write()
        finally:
            write_s = time.monotonic() - began
            ended.set()
    (folder / "file").unlink()
    return Beside(write_s=write_s, commits_s=beside.result())


def main() -> int:
    """In a folder of one's choice."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_disk", description=__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; default: where temporary files are")
    parser.add_argument("--gigabytes", type=float, default=BYTES / 1e9)
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hexctl-disk-", dir=given.folder) as folder:
        for key, value in measured(Path(folder), int(given.gigabytes * 1e9)).items():
            print(f"{key:32} {value:12,.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
