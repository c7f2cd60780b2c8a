"""Marks of actors on disk: whoever must end a process later finds its pid, group and start time here, also when the
process no longer answers and the daemon that started it is gone."""

import json
import os
from pathlib import Path

from planner.record import record
from runtime.backends.ray.actors.identity import Identity
from runtime.paths import RunPaths
from runtime.runs import ProcessMark, start_ticks


@record
class ActorMark:
    """Process and process group of one actor incarnation."""

    process: ProcessMark
    group: int


def _path(paths: RunPaths, actor: str) -> Path:
    return paths.short / "actors" / f"{actor}.json"


def write_mark(paths: RunPaths, me: Identity) -> None:
    """Record this process as the actor `me`."""
    path = _path(paths, me.name)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    pid = os.getpid()
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"pid": pid, "start_ticks": start_ticks(pid), "group": os.getpgid(0)}))
    new.replace(path)


def read_mark(paths: RunPaths, actor: str) -> ActorMark | None:
    """The actor's mark; None when it never came to write one."""
    try:
        raw = json.loads(_path(paths, actor).read_text())
        return ActorMark(
            process=ProcessMark(pid=int(raw["pid"]), start_ticks=int(raw["start_ticks"])), group=int(raw["group"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def mark_names(paths: RunPaths, actor: str) -> tuple[str, ...]:
    """Actors with a mark: `actor` itself and, of a trainer, its other ranks."""
    folder = paths.short / "actors"
    found = sorted(f.stem for f in (*folder.glob(f"{actor}.json"), *folder.glob(f"{actor}-rank*.json")))
    return tuple(found)


def drop_mark(paths: RunPaths, actor: str) -> None:
    """Forget an actor that is gone."""
    _path(paths, actor).unlink(missing_ok=True)
