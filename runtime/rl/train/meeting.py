"""Where the ranks of a trainer find each other: a store that rank 0 serves, its address in a file of the run.

Every epoch has a file of its own, so ranks of two incarnations never meet. Without a meeting there is a deadline, which says
who is missing.
"""

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from planner.record import record
from runtime.errors import DeadlineError

POLL_S = 0.05


@record
class Meeting:
    """`host`: where rank 0 listens (an address of its own). `file` is written by rank 0 and read by the others."""

    file: Path
    host: str = "127.0.0.1"
    deadline_s: float = 120.0
    names: tuple[str, ...] = ()  # what the ranks are called in messages


def meet(meeting: Meeting, *, rank: int, world: int) -> Any:
    """The store, once all ranks have come. DeadlineError names those that did not."""
    until = time.monotonic() + meeting.deadline_s
    store = _serve(meeting) if rank == 0 else _find(meeting, until)
    store.set(f"here/{rank}", "1")
    keys = [f"here/{r}" for r in range(world)]

    def all_here() -> bool:
        return bool(store.check(keys))

    if not _until(all_here, until):
        missing = [_called(meeting, r) for r, key in enumerate(keys) if not store.check([key])]
        raise DeadlineError(
            "the ranks of the trainer did not meet",
            where=str(meeting.file),
            got=f"{', '.join(missing)} missing after {meeting.deadline_s:.0f} s",
            expected=f"{world} ranks",
            hint="see the logs of those ranks",
        )
    return dist.PrefixStore("gang", store)  # type: ignore[attr-defined]


def _serve(meeting: Meeting) -> Any:
    """The store on a port the kernel chooses, bound to the meeting's host only (TCPStore alone would bind every address)."""
    listener = socket.create_server((meeting.host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(  # type: ignore[attr-defined]
        meeting.host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=meeting.deadline_s),
        master_listen_fd=listener.detach(),
    )
    meeting.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    new = meeting.file.with_suffix(".new")
    new.write_text(json.dumps({"host": meeting.host, "port": port}))
    new.replace(meeting.file)
    return store


def _find(meeting: Meeting, until: float) -> Any:
    if not _until(meeting.file.exists, until):
        raise DeadlineError(
            "the first rank of the trainer did not come",
            where=str(meeting.file),
            got=f"{_called(meeting, 0)} missing after {meeting.deadline_s:.0f} s",
            hint="see its log",
        )
    place = json.loads(meeting.file.read_text())
    left = timedelta(seconds=max(1.0, until - time.monotonic()))
    return dist.TCPStore(str(place["host"]), int(place["port"]), is_master=False, timeout=left)  # type: ignore[attr-defined]


def _until(done: Callable[[], bool], until: float) -> bool:
    pause = threading.Event()
    while not done():
        if time.monotonic() >= until:
            return False
        pause.wait(POLL_S)
    return True


def _called(meeting: Meeting, rank: int) -> str:
    return f"rank {rank}" + (f" ({meeting.names[rank]})" if meeting.names else "")
