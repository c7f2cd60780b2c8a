"""Cards and their parts. A device of a run is a whole GPU, called by its UUID, or a part of one: "GPU-<uuid>:1of2" is the first
of two that take turns on the card, each with half its memory. Pure; MIG instances are cards of their own here, as for the driver.
"""

import re
from collections.abc import Iterable

_PART = re.compile(r"(?P<card>[^:]+):\d+of(?P<parts>\d+)")


def is_gpu(device_id: str) -> bool:
    """Whether a device is a real GPU or a part of one: its id begins with NVML's UUID."""
    return device_id.startswith(("GPU-", "MIG-"))


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
