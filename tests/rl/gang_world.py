"""Trainers of several ranks as real processes over Gloo, and the same trainer in one process beside them."""

import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.rl import gang_rank

PROCESS_S = 240.0


def plan(folder: Path, *, shares: Sequence[float], **changes: Any) -> dict[str, Any]:
    """What a gang shall do; `gang_rank` reads it."""
    made = {
        "folder": str(folder),
        "shares": list(shares),
        "epoch": 1,
        "dtype": "float32",
        "algorithm": {
            "learning_rate": 1e-2,
            "entropy_coefficient": 0.01,
            "micro_batch_tokens": 20,
            "grad_norm_max": 0.5,
        },
        "restore": None,
        "beside": False,
        "until": 2,
        "meet_s": 120.0,
        "collective_s": 120.0,
        "out": str(folder / "metrics.json"),
    }
    return made | changes


def run(made: Mapping[str, Any]) -> tuple[list[int | None], str]:
    """All ranks at once, to their end: exit codes by rank and what they said on standard error.

    Forked from one process that has imported torch's compiler: FSDP2 imports it, which takes longer than all the rest."""
    folder = Path(made["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"plan-{made['epoch']}.json"
    file.write_text(json.dumps(made))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.rl.gang_rank"])
    ranks = [context.Process(target=gang_rank.life, args=(str(file), rank)) for rank in range(len(made["shares"]))]
    until = time.monotonic() + PROCESS_S
    try:
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(max(0.0, until - time.monotonic()))
        codes = [process.exitcode for process in ranks]
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()
    return codes, "\n".join(f.read_text() for f in sorted(folder.glob(f"rank-{made['epoch']}-*.err")))
