"""What a daemon said last."""

from collections.abc import Sequence
from pathlib import Path

from runtime.runs import RunInfo


def log_of(run: RunInfo | None) -> Path | None:
    """The daemon's log, where there is one."""
    path = run.paths.logs / "daemon.log" if run is not None else None
    return path if path is not None and path.exists() else None


def last_error(lines: Sequence[str]) -> str:
    """The error the daemon rendered, from its "error: " line on; "" when it rendered none."""
    starts = [i for i, line in enumerate(lines) if line.startswith("error: ")]
    return "\n".join(lines[starts[-1] :]).removeprefix("error: ") if starts else ""


def died_of(run: RunInfo) -> str:
    """The error that ends the daemon's log, without its hint; "" for a daemon that was killed or said nothing."""
    path = log_of(run)
    if path is None:
        return ""
    text, _, hint = last_error(path.read_text(errors="replace").splitlines()).partition("\nhint: ")
    logged_since = "\n" in text.strip() or "\n" in hint.strip()  # by a later daemon
    return "" if logged_since else text.strip()
