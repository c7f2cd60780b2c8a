"""CUDA_VISIBLE_DEVICES in every form, read as CUDA reads it: in order, up to the first entry that names nothing."""

from collections.abc import Sequence


def visible(variable: str | None, uuids: Sequence[str]) -> tuple[str, ...]:
    """The cards a CUDA program would see, by UUID, in the variable's order.

    `uuids` are the machine's, in PCI order, MIG instances among them. None: all. "": none. Entries are indices, UUIDs or unique
    prefixes of one ("GPU-" included); an index out of range, "-1", an ambiguous prefix or anything else ends the list; a card named
    twice makes CUDA see none at all.
    """
    if variable is None:
        return tuple(uuids)
    chosen: list[str] = []
    for raw in variable.split(","):
        found = _named(raw.strip(), uuids)
        if found is None:
            break
        if found in chosen:
            return ()
        chosen.append(found)
    return tuple(chosen)


def _named(entry: str, uuids: Sequence[str]) -> str | None:
    if entry.isascii() and entry.isdigit():
        whole = [u for u in uuids if not u.startswith("MIG-")]  # an index is a card's, never an instance's
        index = int(entry)
        return whole[index] if index < len(whole) else None
    if not entry.startswith(("GPU-", "MIG-")):
        return None
    matches = [u for u in uuids if u.startswith(entry)]
    return matches[0] if len(matches) == 1 else None
