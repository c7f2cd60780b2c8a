"""Placement groups of the run: one a body, detached, found by name. Every wait has a deadline and names what is missing."""

from typing import Any

from planner.record import record
from runtime.backends.ray import names
from runtime.backends.ray.names import BodyName
from runtime.backends.ray.world import World
from runtime.cards import cards_of
from runtime.errors import DeadlineError


@record
class GroupSeen:
    """A placement group of the run in Ray's table."""

    body: BodyName
    devices: tuple[str, ...]
    state: str  # PENDING | CREATED | RESCHEDULING
    bundle: tuple[str, ...]  # resource names


def groups(world: World) -> tuple[GroupSeen, ...]:
    """All groups of the run that exist. One call to the GCS."""
    from ray.util import placement_group_table

    by_resource = {names.resource(d.id): d.id for d in world.cluster.devices}
    found = []
    for row in placement_group_table().values():
        body = names.parse_group(world.run_id, row["name"])
        if body is None or row["state"] == "REMOVED":
            continue
        # By bundle, so that a trainer's devices keep the order of its ranks.
        by_bundle = (row["bundles"][i] for i in sorted(row["bundles"], key=int))
        bundle = tuple(r for b in by_bundle for r in sorted(b))
        devices = tuple(
            by_resource.get(r, r.removeprefix(names.RESOURCE_PREFIX))
            for r in bundle
            if r.startswith(names.RESOURCE_PREFIX)
        )
        found.append(GroupSeen(body=body, devices=devices, state=row["state"], bundle=bundle))
    return tuple(found)


def ensure_group(world: World, body: BodyName, devices: tuple[str, ...], *, deadline_s: float) -> Any:
    """The body's placement group, found or made, ready. DeadlineError names each device that is not to be had."""
    from ray.util import placement_group, remove_placement_group

    name = names.group_name(world.run_id, body)
    group = _find(name)
    if group is None:
        nodes = {d.node for d in world.cluster.devices if d.id in devices}
        strategy = "STRICT_PACK" if len(nodes) == 1 else "PACK"
        group = placement_group(world.bundles(body, devices), strategy=strategy, name=name, lifetime="detached")
    if group.wait(deadline_s):
        return group
    missing = _missing(world, body, devices)
    remove_placement_group(group)
    raise DeadlineError(f"no place for {body.role} {body.id}", got=f"{deadline_s:.0f} s", expected="", hint=missing)


def remove_group(world: World, body: BodyName) -> None:
    """Free the body's devices. Nothing happens when there is no such group."""
    from ray.util import remove_placement_group

    if (group := _find(names.group_name(world.run_id, body))) is not None:
        remove_placement_group(group)


def _find(name: str) -> Any:
    from ray.util import get_placement_group

    try:
        return get_placement_group(name)
    except ValueError:
        return None


def _missing(world: World, body: BodyName, devices: tuple[str, ...]) -> str:
    """Why each device is not to be had: held by another body, or declared by no node."""
    declared = world.ray.cluster_resources()
    held = {r: g.body for g in groups(world) if g.body != body and g.state == "CREATED" for r in g.bundle}
    words = []
    for d in devices:
        resource = names.resource(d)
        if declared.get(resource, 0) < 1:
            words.append(f"no Ray node declares {resource} (device {d})")
        elif resource in held:
            words.append(f"device {d} is held by {held[resource].role} {held[resource].id}")
    gpus = len(cards_of(devices))
    if gpus and declared.get("GPU", 0) < gpus:
        words.append(f"Ray sees {declared.get('GPU', 0):.0f} GPUs, {gpus} asked for")
    return "; ".join(words) or "Ray gives no reason; its nodes may be dead"
