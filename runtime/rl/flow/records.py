"""Files people read: one JSON object a line, appended, rotated. They may miss nothing but never stop the run."""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger(__name__)
ROTATE_BYTES = 64 * 2**20


class JsonLines:
    """One append-only file. Beyond `rotate_bytes` it is renamed to `<name>.1` (one older part is kept)."""

    def __init__(self, path: Path, rotate_bytes: int = ROTATE_BYTES) -> None:
        self._path, self._rotate_bytes = path, rotate_bytes
        self.failed = ""  # why the last write failed; "" when it did not

    def append(self, *rows: Mapping[str, object]) -> None:
        """Write rows. A full disk is logged and remembered in `failed`, not raised: the ledger is the record."""
        text = "".join(json.dumps(_finite(row), allow_nan=False, ensure_ascii=False) + "\n" for row in rows)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if self._path.exists() and self._path.stat().st_size > self._rotate_bytes:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
            with self._path.open("ab+") as f:
                f.write(_line_end(f) + text.encode())
            self.failed = ""
        except OSError as e:
            if not self.failed:
                _log.error("cannot write %s: %s", self._path, e)
            self.failed = f"{self._path.name}: {e.strerror or e}"

    def last(self) -> Mapping[str, object] | None:
        """The newest whole row; None when there is none. A line cut short by a crash is passed over."""
        for path in (self._path, self._path.with_name(self._path.name + ".1")):
            try:
                with path.open("rb") as f:
                    f.seek(max(0, path.stat().st_size - 2**20))
                    lines = f.read().splitlines()
            except OSError:
                continue
            for line in reversed(lines):
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    return row
        return None


def _line_end(f: BinaryIO) -> bytes:
    """What ends a line that a crash or a full disk has cut, so that the next row stays readable."""
    if f.seek(0, os.SEEK_END) == 0:
        return b""
    f.seek(-1, os.SEEK_END)
    return b"" if f.read(1) == b"\n" else b"\n"


def _finite(row: Mapping[str, object]) -> dict[str, object]:
    """JSON knows no NaN or infinity: they become null."""
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
