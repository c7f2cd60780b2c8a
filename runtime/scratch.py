"""Folders for what a process needs while it works: weights, checkpoints, a ledger. None outlives its process for long.

Whoever is killed, or ends at once as at a second Ctrl-C, cannot remove its folder. So its name says whose it is, and whoever makes
one, or has seen a child end, removes those of this host whose owner is gone.
"""

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runtime.runs import ProcessMark, alive, start_ticks

_PREFIX = ".hexctl-scratch"
_PIDS = Path(
    "/proc/self/ns/pid"
)  # containers of one host may share its name and its folders, not its numbers of processes
_NAME = re.compile(rf"{re.escape(_PREFIX)}-(.+)-(\d+)-(\d+)-[^-]+")


@contextmanager
def scratch(parent: Path | None = None) -> Iterator[Path]:
    """A folder in `parent` (default: where temporary files go) for as long as the context lasts."""
    parent = parent or Path(tempfile.gettempdir())
    remove_abandoned(parent)
    pid = os.getpid()
    prefix = f"{_PREFIX}-{_here()}-{pid}-{start_ticks(pid)}-"
    with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as made:
        yield Path(made)


def remove_abandoned(parent: Path | None = None) -> None:
    """Remove what processes of this host that are gone have left in `parent`; what is another user's stays."""
    for folder in (parent or Path(tempfile.gettempdir())).glob(f"{_PREFIX}-*"):
        found = _NAME.fullmatch(folder.name)
        if found is not None and found[1] == _here():
            owner = ProcessMark(pid=int(found[2]), start_ticks=int(found[3]))
            if not alive(owner):
                shutil.rmtree(folder, ignore_errors=True)


def _here() -> str:
    """Where a number of a process means the same process."""
    return f"{socket.gethostname()}.{_PIDS.stat().st_ino if _PIDS.exists() else 0}"
