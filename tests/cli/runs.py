"""Run folders as a daemon leaves them, for the command line's tests."""

import os
from pathlib import Path

from planner.record import replace
from runtime.runs import RunInfo, mark, write_run


def make_run(root: Path, id_: str, **changes: object) -> RunInfo:
    """A live run whose daemon is this very process, its sockets in a short folder of its own."""
    folder = root / id_
    folder.mkdir(parents=True)
    info = RunInfo(
        id=id_, name=id_.rpartition("-")[0], folder=str(folder), short=str(root / "s" / id_[-4:]), config_path="local.toml",
        config_sha256="00", created_at_s=1000.0, hexctl_version="0.1.0", label="paced", state="live", daemon=mark(os.getpid()),
    )  # fmt: skip
    info = replace(info, **changes)
    write_run(info)
    return info
