"""Cards and their parts. A device of a run is a whole GPU, called by its UUID, or a part of one: "GPU-<uuid>:1of2" is the first
of two that take turns on the card, each with half its memory. Pure; MIG instances are cards of their own here, as for the driver.
"""

import re
from collections.abc import Iterable

from planner.cluster import Cluster, Device
from planner.record import replace

_PART = re.compile(r"(?P<card>[^:]+):\d+of(?P<parts>\d+)")


def is_gpu(device_id: str) -> bool:
    """Whether a device is a real GPU or a part of one: its id begins with NVML's UUID."""
    return device_id.startswith(("GPU-", "MIG-"))


def parts_by_default(cards: int) -> int:
    """Devices that a card counts as where `fleet.gpu_parts` is not given: one card has to do for a trainer and a replica."""
    return 2 if cards == 1 else 1


def part_ids(card: str, parts: int) -> tuple[str, ...]:
    """The devices that a card counts as: itself, or its parts."""
    return (card,) if parts == 1 else tuple(f"{card}:{i}of{parts}" for i in range(1, parts + 1))


def card_of(device_id: str) -> str:
    """The UUID of the card that a device is, or is a part of."""
    found = _PART.fullmatch(device_id)
    return found["card"] if found else device_id


def parts_of(device_id: str) -> int:
    """How many devices share the card of this one; 1 where it is a whole card."""
    found = _PART.fullmatch(device_id)
    return int(found["parts"]) if found else 1


def cards_of(devices: Iterable[str]) -> tuple[str, ...]:
    """The cards under these devices, each once, in order; devices that are no GPUs are left out."""
    return tuple(dict.fromkeys(card_of(d) for d in devices if is_gpu(d)))


def divided(cluster: Cluster, parts: int) -> Cluster:
    """The cluster with every device in so many parts, numbered anew on each node."""
    if parts == 1:
        return cluster
    kinds = {name: kind.in_parts(parts) for name, kind in cluster.kinds.items()}
    devices: list[Device] = []
    on_node: dict[str, int] = {}
    for d in cluster.devices:
        for id_ in part_ids(d.id, parts):
            index = on_node.get(d.node, 0)
            on_node[d.node] = index + 1
            devices.append(replace(d, id=id_, kind=kinds[d.kind].name, index=index))
    return replace(cluster, kinds={k.name: k for k in kinds.values()}, devices=tuple(devices))
