"""Host memory that this process may still take: what the machine has, and what the limits of its control groups leave."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS, MINE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of version 2 and of version 1: limit, use, and in memory.stat the cached files that the kernel gives back first.
_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes() -> int:
    """The least of both."""
    import psutil

    return min([int(psutil.virtual_memory().available), *limits_left()])


def limits_left(cgroups: Path = CGROUPS, mine: Path = MINE) -> list[int]:
    """Bytes that each limited control group of this process, its parents included, would still take."""
    found = []
    for folder in _folders(cgroups, mine):
        for limit, use, cached in _FILES:
            try:
                most = int((folder / limit).read_text())  # "max" is no number: no limit
                used = int((folder / use).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            found.append(max(0, most - used + int(stat.get(cached, 0))))
    return found


def _folders(cgroups: Path, mine: Path) -> Iterator[Path]:
    """Of each memory controller: the folder of this process's group and of every one above it. A container may see its own
    group as the root; folders that it does not see have no files here."""
    try:
        lines = mine.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        folder = root / path.lstrip("/")
        yield from (f for f in (folder, *folder.parents) if f == root or root in f.parents)
