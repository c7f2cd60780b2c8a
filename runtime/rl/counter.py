"""A token counter that outlives kill -9: what a dead replica had decoded beyond what the journal received was redone."""

import mmap
import struct
from pathlib import Path

from runtime.errors import RunError


class TokenCounter:
    """Tokens decoded since the process started, in a mapped file of 8 little-endian bytes that outlives kill -9."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(path.name + ".new")
        new.write_bytes(bytes(8))
        new.replace(path)  # a reader never meets half a counter
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)

    def set(self, tokens: int) -> None:
        struct.pack_into("<Q", self._map, 0, tokens)

    def close(self) -> None:
        self._map.close()


def read_counter(path: Path) -> int:
    """Tokens a process had decoded, by its counter file; 0 when it never made a whole one."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    if len(data) < 8:
        return 0
    if len(data) > 8:
        raise RunError("a token counter must hold 8 bytes", where=str(path), got=len(data))
    return int(struct.unpack("<Q", data)[0])
