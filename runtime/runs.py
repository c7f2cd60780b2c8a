"""`run.json`: what a run says of itself to whoever finds its folder. Read by daemon and command line alike."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from planner.record import record
from runtime.errors import RunError
from runtime.paths import RunPaths

HOW_TO_MEND = "put the file back, or move the run's folder away"


@record
class ProcessMark:
    """A process by pid and start time, so that a reused pid is never taken for it."""

    pid: int
    start_ticks: int


@record
class RunInfo:
    """One run."""

    id: str
    name: str
    folder: str
    short: str
    config_path: str
    config_sha256: str
    created_at_s: float
    hexctl_version: str
    label: str  # gpu | cpu | paced | simulated | mixed
    state: Literal["live", "ended"]
    ending: str = ""  # why it ended
    daemon: ProcessMark | None = None
    ray_address: str | None = None
    ray_owned: bool = False  # this run started Ray and ends it
    ray_processes: tuple[ProcessMark, ...] = ()

    @property
    def paths(self) -> RunPaths:
        """The run's paths."""
        return RunPaths(folder=Path(self.folder), short=Path(self.short))


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when there is none (or it is a zombie)."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as f:  # asked often: a Path would cost more than the reading
            fields = f.read().rsplit(b")", 1)[1].split()
    except (OSError, IndexError):
        return None
    return None if fields[0] == b"Z" else int(fields[19])


def mark(pid: int) -> ProcessMark | None:
    """The mark of a living process."""
    ticks = start_ticks(pid)
    return None if ticks is None else ProcessMark(pid=pid, start_ticks=ticks)


def alive(m: ProcessMark | None) -> bool:
    """Whether exactly that process still lives."""
    return m is not None and start_ticks(m.pid) == m.start_ticks


def write_run(info: RunInfo) -> None:
    """Write `run.json` whole: new file, fsync, rename."""
    path = info.paths.run_json
    body = json.dumps(_encode(info), indent=1, sort_keys=True)
    temporary = path.with_suffix(".json.new")
    with temporary.open("w") as f:
        f.write(body + "\n")
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def read_run(folder: Path) -> RunInfo:
    """Read a run folder's `run.json`; RunError where there is none or it does not decode."""
    path = folder / "run.json"
    try:
        raw = json.loads(path.read_text())
        return _decode(raw)
    except OSError as e:
        raise RunError("not a run folder", where=str(path), got=e.strerror) from e
    except (ValueError, TypeError, KeyError) as e:
        raise RunError("run.json does not decode", where=str(path), got=str(e), hint=HOW_TO_MEND) from e


def list_runs(root: Path) -> tuple[RunInfo, ...]:
    """All readable runs below `root`, oldest first."""
    return look_at_runs(root)[0]


def look_at_runs(root: Path) -> tuple[tuple[RunInfo, ...], Mapping[str, RunError]]:
    """The readable runs below `root`, oldest first, and why the others are not, by the name of their folder."""
    found: list[RunInfo] = []
    unreadable: dict[str, RunError] = {}
    for path in sorted(root.glob("*/run.json")):
        try:
            found.append(read_run(path.parent))
        except RunError as e:
            unreadable[path.parent.name] = e
    return tuple(sorted(found, key=lambda r: r.created_at_s)), unreadable


def _encode(info: RunInfo) -> dict[str, Any]:
    import dataclasses

    return dataclasses.asdict(info)


def _decode(raw: dict[str, Any]) -> RunInfo:
    raw = dict(raw)
    raw["daemon"] = ProcessMark(**raw["daemon"]) if raw.get("daemon") else None
    raw["ray_processes"] = tuple(ProcessMark(**p) for p in raw.get("ray_processes", ()))
    return RunInfo(**raw)
