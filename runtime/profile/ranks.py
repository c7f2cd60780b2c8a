"""Collectives between ranks of one machine: one process a rank, gloo on the CPU, NCCL on cards, no network.

    python -m runtime.profile.ranks RANK WORLD BACKEND FILE BUDGET_S SIZE...

Rank 0 prints its points as JSON rows. The parent ends all of them, by their process group, when the time is over.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from planner.calibration import CollectivePoint
from runtime.errors import DeadlineError, RunError
from runtime.scratch import scratch

OPS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
EXTRA_S = 60.0  # beyond what is expected: processes start, libraries are loaded
_TICK_S = 0.2


def collectives(
    sizes_bytes: Sequence[int],
    ranks: int,
    backend: str,
    *,
    budget_s: float,
    cards: Sequence[str] = (),
    should_stop: Callable[[], bool] = lambda: False,
) -> tuple[CollectivePoint, ...]:
    """Points of every operation at every size. `cards`: UUID of each rank's card.

    DeadlineError when the ranks do not end in time; RunError, with the last words of rank 0, when they fail.
    """
    limit_s = EXTRA_S + len(OPS) * len(sizes_bytes) * budget_s * 4
    children: list[subprocess.Popen[str]] = []
    with scratch() as folder:
        errors = (folder / "rank0.err").open("w+")
        try:
            for rank in range(ranks):
                env = _environment(cards[rank] if cards else None)
                words = [str(rank), str(ranks), backend, f"{folder}/store", f"{budget_s:g}", *map(str, sizes_bytes)]
                children.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "runtime.profile.ranks", *words],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=errors if rank == 0 else subprocess.DEVNULL,
                        text=True,
                        env=env,
                        start_new_session=True,
                    )
                )
            text = _awaited(children[0], time.monotonic() + limit_s, limit_s, should_stop)
            if children[0].returncode != 0:
                errors.seek(0)
                last = (errors.read().strip().splitlines() or ["nothing said"])[-1]
                raise RunError(f"{backend} over {ranks} ranks failed", got=last)
        finally:
            for child in children:
                _end(child)
            errors.close()
    rows = [json.loads(x) for x in text.splitlines() if x.startswith("{")]
    return tuple(CollectivePoint(**r) for r in rows)


def _environment(card: str | None) -> dict[str, str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        env.setdefault(name, "lo")  # ranks of one machine; a host name that does not resolve would end them
    if card is not None:
        env["CUDA_VISIBLE_DEVICES"] = card
    # Where this process finds the package, its children do too.
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(p for p in (*sys.path, env.get("PYTHONPATH", "")) if p))
    return env


def _awaited(child: "subprocess.Popen[str]", end_s: float, limit_s: float, should_stop: Callable[[], bool]) -> str:
    while True:
        try:
            out, _ = child.communicate(timeout=_TICK_S)
            return out or ""
        except subprocess.TimeoutExpired:
            if should_stop():
                raise KeyboardInterrupt from None
            if time.monotonic() > end_s:
                raise DeadlineError("collectives did not end", got=f"{limit_s:.0f} s") from None


def _end(child: "subprocess.Popen[str]") -> None:
    """Kill a rank with its session. One that has been waited for is gone, and its number may be another's."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(timeout=10.0)
    if child.stdout is not None:
        child.stdout.close()


def _rank(rank: int, world: int, backend: str, store: str, budget_s: float, sizes: Sequence[int]) -> None:  # noqa: PLR0917
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0" if backend == "nccl" else "cpu")  # the only card that this rank sees
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=EXTRA_S)
    )
    for op in OPS:
        for size in sizes:
            count = size // 4 // world * world
            whole = torch.zeros(count, device=device)
            part = torch.zeros(count // world, device=device)
            call = {
                "all_reduce": lambda whole=whole, part=part: dist.all_reduce(whole),
                "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
                "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
                "broadcast": lambda whole=whole, part=part: dist.broadcast(whole, 0),
            }[op]
            seconds = _timed(call, device, budget_s)
            if rank == 0:
                row = {"op": op, "ranks": world, "size_bytes": float(count * 4), "seconds": seconds}
                sys.stdout.write(json.dumps(row) + "\n")
                sys.stdout.flush()
    dist.destroy_process_group()


def _timed(call: Callable[[], object], device: object, budget_s: float) -> float:
    """Median seconds of one call. Every rank makes the same number of calls: rank 0 says how many."""
    import torch
    import torch.distributed as dist

    assert isinstance(device, torch.device)
    for _ in range(2):
        call()
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    rounds = torch.tensor([budget_s / max(time.perf_counter() - began, 1e-6)], device=device)
    dist.broadcast(rounds, 0)
    calls = max(3, min(200, int(rounds.item())))
    samples = sorted(_once(call, device) for _ in range(calls))
    return samples[len(samples) // 2]


def _once(call: Callable[[], object], device: object) -> float:
    import torch

    assert isinstance(device, torch.device)
    if device.type == "cpu":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    from runtime.profile.timing import event

    begin, end = event(), event()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


if __name__ == "__main__":
    given = sys.argv[1:]
    _rank(int(given[0]), int(given[1]), given[2], given[3], float(given[4]), [int(x) for x in given[5:]])
    sys.stdout.flush()
    os._exit(0)  # a library's threads must not keep a rank that is done
