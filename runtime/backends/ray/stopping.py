"""Ending a body's processes by their recorded marks, and the counter of tokens it leaves behind."""

import contextlib
from pathlib import Path

from runtime.backends.ray import names
from runtime.backends.ray.actors.marks import drop_mark, mark_names, read_mark
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.placement import groups
from runtime.backends.ray.procs import end, group_members
from runtime.backends.ray.world import World
from runtime.errors import RunError
from runtime.paths import RunPaths
from runtime.rl.counter import read_counter
from runtime.runs import ProcessMark


def end_actor(world: World, body: BodyName) -> tuple[str, ...]:
    """Kill the body's actors and everything in their process groups; returns the devices of its placement group.

    RunError when a process does not end even by KILL (it hangs in the kernel): its devices stay taken.
    """
    devices = next((g.devices for g in groups(world) if g.body == body), ())
    marked = mark_names(world.paths, names.actor_name(body))
    actors = dict.fromkeys((*names.rank_names(body, devices), *marked))
    found = [m for name in actors if (m := read_mark(world.paths, name)) is not None]
    for name in actors:
        if (handle := world.find(name)) is not None:
            with contextlib.suppress(world.ray.exceptions.RayError):
                world.ray.kill(handle, no_restart=True)
    left = end(tuple(m for f in found for m in _group(f.group, f.process)), term_s=0.0)
    if left:
        raise RunError(
            f"{body.role} {body.id} does not end",
            got=f"pid {', '.join(str(m.pid) for m in left)}",
            hint="it hangs in the kernel",
        )
    for name in actors:
        drop_mark(world.paths, name)
    return devices


def _group(group: int, leader: ProcessMark) -> tuple[ProcessMark, ...]:
    """Everything in the leader's group. A group outlives its leader, and its number is not given out again while it does; a
    stranger's group of the same number would have a leader with another start time."""
    members = group_members(group)
    if any(m.pid == group and m != leader for m in members):
        return ()
    return (leader, *(m for m in members if m != leader))


def counter_path(paths: RunPaths, body: BodyName) -> Path:
    """The replica's own count of decoded tokens: 8 bytes, little-endian."""
    return paths.counters / f"{body.id}-{body.epoch}"


def decoded_tokens(paths: RunPaths, body: BodyName) -> int:
    """Tokens the replica decoded since its start; 0 when it never began."""
    return read_counter(counter_path(paths, body))


def forget_counter(paths: RunPaths, body: BodyName) -> None:
    """Remove the counter of a replica that flow has settled."""
    counter_path(paths, body).unlink(missing_ok=True)
