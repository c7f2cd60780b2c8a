"""Room on the disk for the next checkpoint: older ones make way before the disk is full."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from runtime.errors import WeightsError
from runtime.rl.train.checkpoint import complete_folders
from runtime.rl.weights.sealed import remove_sealed, wait_removed

FreeBytes = Callable[[Path], int]
MARGIN_BYTES = 2**20  # manifest, folder, and what the file system needs to note them
_log = logging.getLogger(__name__)


def free_bytes(folder: Path) -> int:
    """Of the file system that `folder`, or the nearest of its parents that exists, is on."""
    there = next(p for p in (folder, *folder.parents) if p.exists())
    return shutil.disk_usage(there).free


def make_room(root: Path, needed: int, free: FreeBytes = free_bytes) -> None:
    """Remove complete checkpoints below `root`, oldest first, until `needed` bytes are free. The newest of every lineage stays:
    a trainer that starts anew may need it. WeightsError when that is not enough; then nothing was begun."""
    needed += MARGIN_BYTES
    if free(root) >= needed:
        return
    wait_removed()
    if free(root) >= needed:
        return
    for folders in complete_folders(root).values():
        for folder in folders[:-1]:
            _log.warning("checkpoint %s makes way: the disk has no room for the next one", folder.name)
            remove_sealed(folder)
            if free(root) >= needed:
                return
    raise WeightsError(
        "the disk has no room for a checkpoint",
        where=str(root),
        got=f"{free(root) / 1e9:.1f} GB free",
        expected=f"at least {needed / 1e9:.1f} GB",
        hint="free some, or give the run another disk (run.root); steps since the newest checkpoint are made again from the ledger",
    )
