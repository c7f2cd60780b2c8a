"""A rank's way to a checkpoint: while the training waits, or beside it.

Beside: `begin` copies the rank's rows into host memory (`Snapshot`) and a thread hashes, writes and syncs them; `seal` makes one
checkpoint of what all ranks wrote. All ranks call `begin` and `seal` together, from the thread that trains: the thread beside
does nothing but write a file, so nothing of a gang is ever waited for there. Until the seal the checkpoint is a hidden folder that
nobody reads, and the newest complete one before it stands.
"""

import contextlib
import logging
import shutil
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from torch import Tensor

from planner.record import record
from runtime.errors import RunError
from runtime.rl.train import checkpoint
from runtime.rl.train.checkpoint import StepFacts
from runtime.rl.train.disk_room import FreeBytes, free_bytes, make_room
from runtime.rl.train.gang import Gang
from runtime.rl.train.host_memory import available_bytes
from runtime.rl.train.sharding import first_row, local
from runtime.rl.train.snapshot import Snapshot, bytes_of
from runtime.rl.weights.sealed import TENSORS, TensorEntry

HOST_SHARE = 0.9  # of what a host has left: the rest is for what else grows there
Writes = Callable[[Path, Mapping[str, Tensor]], dict[str, TensorEntry]]
HostNeed = tuple[str, int, int]  # host, bytes of a rank's snapshot, bytes that the host has left
_log = logging.getLogger(__name__)


@record
class _Written:
    """This rank's file."""

    entries: Mapping[str, TensorEntry]
    seconds: float


@record
class _UnderWay:
    facts: StepFacts
    temporary: Path
    done: "Future[_Written]"


class Saver:
    """One thread uses it. Of a gang every rank has one."""

    def __init__(
        self,
        root: Path,
        *,
        gang: Gang | None = None,
        write: Writes = checkpoint.write,
        host_bytes: Callable[[], int] = available_bytes,
        disk_bytes: FreeBytes = free_bytes,
    ) -> None:
        """`root`: where checkpoints are. `write`, `host_bytes`, `disk_bytes`: this host's disk, what its memory has left, and what
        its disk has."""
        self._root, self._gang, self._write = root, gang, write
        self._host_bytes, self._disk_bytes = host_bytes, disk_bytes
        self._snapshot: Snapshot | None = None
        self._has_room: bool | None = None  # None: not asked yet
        self._under: _UnderWay | None = None

    def save(self, facts: StepFacts, tensors: Mapping[str, Tensor]) -> str:
        """The checkpoint of `facts`, complete (at rank 0) when this returns. Its folder."""
        self._expect_none()
        temporary = self._begin(facts, tensors)
        with self._unfinished(temporary):
            name, mine = self._part(tensors)
            return self._finish(temporary, facts, _Written(entries=self._write(temporary / name, mine), seconds=0.0))[0]

    def begin(self, facts: StepFacts, tensors: Mapping[str, Tensor]) -> bool:
        """Copy the state and begin to write it; the tensors may change when this returns. False, and nothing was begun, where a
        rank's host has no room for the copy: that is found out once, and said in the log."""
        self._expect_none()
        name, mine = self._part(tensors)
        if self._has_room is None:
            self._has_room = self._agree_on_room(bytes_of(mine))
        if not self._has_room:
            return False
        temporary = self._begin(facts, tensors)
        with self._unfinished(temporary):
            if self._snapshot is None:
                self._snapshot = Snapshot(mine)
            self._snapshot.take(mine)
            done: Future[_Written] = Future()
            given = (self._write, temporary / name, self._snapshot.tensors, done)
            threading.Thread(target=_write_beside, args=given, name="checkpoint", daemon=True).start()
        self._under = _UnderWay(facts=facts, temporary=temporary, done=done)
        return True

    @property
    def written(self) -> bool:
        """This rank's part of what was begun is written, or has failed: `seal` would not wait for it."""
        return self._under is not None and self._under.done.done()

    def check(self) -> None:
        """Raise what kept this rank's part from the disk."""
        if self._under is not None and self.written and (failure := self._under.done.exception()) is not None:
            self.drop()
            raise failure

    def seal(self) -> float:
        """Wait for what was begun and make it a complete checkpoint. Seconds that the slowest rank wrote, at rank 0."""
        under, self._under = self._under, None
        if under is None:
            raise RunError("no checkpoint was begun")
        with self._unfinished(under.temporary):
            return self._finish(under.temporary, under.facts, under.done.result())[1]

    def drop(self) -> None:
        """Give up what was begun, where something was: nothing of it remains. Does not wait for the disk."""
        under, self._under = self._under, None
        if under is not None:
            self._snapshot = None  # the thread may still read it
            if self._first:
                shutil.rmtree(under.temporary, ignore_errors=True)

    @property
    def _first(self) -> bool:
        return self._gang is None or self._gang.rank == 0

    def _expect_none(self) -> None:
        if self._under is not None:
            raise RunError("a checkpoint is still being written", got=f"step {self._under.facts.step}")

    def _begin(self, facts: StepFacts, tensors: Mapping[str, Tensor]) -> Path:
        """The hidden folder that rank 0 makes for all, where there is room for what all ranks write."""
        if self._first:
            make_room(
                self._root, bytes_of(tensors), self._disk_bytes
            )  # of a gang whole tensors, whoever holds which rows
        if self._gang is None:
            return checkpoint.begin(self._root, facts)
        name: str = self._gang.share(checkpoint.begin(self._root, facts).name if self._first else None)
        return self._root / name

    def _unfinished(self, temporary: Path) -> contextlib.AbstractContextManager[None]:
        return checkpoint.unfinished(temporary) if self._first else contextlib.nullcontext()

    def _part(self, tensors: Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor]]:
        """This rank's file and what goes into it."""
        if self._gang is None:
            return TENSORS, dict(tensors)
        first = {name: first_row(t.shape[0], self._gang) for name, t in tensors.items()}
        return checkpoint.rows_of(self._gang.rank, {name: local(t) for name, t in tensors.items()}, first)

    def _finish(self, temporary: Path, facts: StepFacts, mine: _Written) -> tuple[str, float]:
        """Rank 0 seals what all ranks wrote. Folder, and seconds of the slowest of those it knows of."""
        if self._gang is None:
            return str(checkpoint.finish(self._root, temporary, facts, mine.entries)), mine.seconds
        found = self._gang.gather({"seconds": mine.seconds, "entries": _said(mine.entries)})
        if found is None:
            folder = checkpoint.checkpoint_folder(self._root, lineage=facts.lineage, step=facts.step)
            return str(folder), mine.seconds
        entries = _heard([part["entries"] for part in found])
        return str(checkpoint.finish(self._root, temporary, facts, entries)), max(p["seconds"] for p in found)

    def _agree_on_room(self, needed: int) -> bool:
        mine: HostNeed = (socket.gethostname(), needed, self._host_bytes())
        needs = [mine] if self._gang is None else self._gang.gather(mine)
        short = None if needs is None else short_host(needs)
        if short is not None:
            _log.warning("checkpoints are written while the training waits: %s", short)
        fits = short is None
        return fits if self._gang is None else bool(self._gang.share(fits))


def short_host(needs: Sequence[HostNeed]) -> str | None:
    """A host without room for the snapshots of all its ranks, in words; None where every one has it."""
    for host in dict.fromkeys(h for h, _, _ in needs):
        needed = sum(n for h, n, _ in needs if h == host)
        left = min(there for h, _, there in needs if h == host)
        if needed > HOST_SHARE * left:
            return f"a copy of the state takes {needed / 1e9:.1f} GB, host {host} has {left / 1e9:.1f} GB left"
    return None


def _write_beside(write: Writes, path: Path, tensors: Mapping[str, Tensor], done: "Future[_Written]") -> None:
    began = time.monotonic()
    try:
        entries = write(path, tensors)
    except BaseException as e:  # noqa: BLE001 - raised again in the thread that trains
        done.set_exception(e)
    else:
        done.set_result(_Written(entries=entries, seconds=time.monotonic() - began))


def _said(entries: Mapping[str, TensorEntry]) -> dict[str, list[Any]]:
    """What a rank wrote, for rank 0."""
    return {name: [list(e.shape), e.dtype, e.sha256] for name, e in entries.items()}


def _heard(found: Sequence[Mapping[str, Any]]) -> dict[str, TensorEntry]:
    """What all ranks wrote."""
    return {
        name: TensorEntry(shape=tuple(shape), dtype=dtype, sha256=sha256)
        for entries in found
        for name, (shape, dtype, sha256) in entries.items()
    }
