"""Names of a run's things in Ray: resources of devices, actors, placement groups. Pure; every name decodes to what it names.

A placement group's name carries the run, the role, the id and the epoch, so that a new daemon finds every body of the run
in Ray's own table, also the one whose actor is dead.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Literal

from planner.record import record

Role = Literal["replica", "trainer"]

FLOW = "flow"
REWARDS = "rewards"
RESOURCE_PREFIX = "hexdev_"
_PLAIN = re.compile(r"[A-Za-z0-9_.-]+")


@record
class BodyName:
    """What a placement group of the run is for."""

    role: Role
    id: str
    epoch: int


def namespace(run_id: str) -> str:
    """The Ray namespace that holds the run's named actors."""
    return f"hexctl-{run_id}"


def resource(device_id: str) -> str:
    """The custom resource of a device. Ids that hold other characters get a hash, so that two ids never share a resource."""
    if _PLAIN.fullmatch(device_id):
        return RESOURCE_PREFIX + device_id
    tail = hashlib.sha256(device_id.encode()).hexdigest()[:8]
    return f"{RESOURCE_PREFIX}{re.sub(r'[^A-Za-z0-9_.-]', '_', device_id)}_{tail}"


def actor_name(body: BodyName) -> str:
    """Name of the body's actor: `replica-<id>-<epoch>` or `trainer-<epoch>`."""
    return f"trainer-{body.epoch}" if body.role == "trainer" else f"replica-{body.id}-{body.epoch}"


def rank_names(body: BodyName, devices: Sequence[str]) -> tuple[str, ...]:
    """Names of all actors of a body, first the one that speaks for it. A trainer has one a device, in the devices' order:
    `trainer-<epoch>`, `trainer-<epoch>-rank1`, ..."""
    first = actor_name(body)
    others = range(1, len(devices)) if body.role == "trainer" else ()
    return (first, *(f"{first}-rank{r}" for r in others))


def group_name(run_id: str, body: BodyName) -> str:
    """Name of the body's placement group."""
    return f"{run_id}/{body.role}/{body.id}/{body.epoch}"


def parse_group(run_id: str, name: str) -> BodyName | None:
    """The body that a placement group's name means; None when it is not one of this run's."""
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != run_id or not parts[3].isdigit():
        return None
    if parts[1] == "replica":
        return BodyName(role="replica", id=parts[2], epoch=int(parts[3]))
    if parts[1] == "trainer":
        return BodyName(role="trainer", id=parts[2], epoch=int(parts[3]))
    return None
