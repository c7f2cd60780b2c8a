"""Folders that a profile makes for weights, checkpoints and a ledger, on the disk of the file it writes."""

import os
import shutil
from pathlib import Path


def scratch_prefix() -> str:
    """Begins the name of every such folder of this process."""
    return f".profile-{os.getpid()}-"


def remove_scratch(folder: Path) -> None:
    """Remove what this process has there: it is about to end without leaving its contexts."""
    for left in folder.glob(f"{scratch_prefix()}*"):
        shutil.rmtree(left, ignore_errors=True)
