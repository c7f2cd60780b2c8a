"""One daemon a run: a lock that the kernel lets go of when its holder dies, and the epoch that fences older daemons."""

import fcntl
import os
from pathlib import Path

from runtime.errors import RefusedError, RunError
from runtime.paths import RunPaths


class DaemonLock:
    """Held from `acquire` to `release` or the end of the process."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path, self._fd = path, fd

    def release(self) -> None:
        """Let go; safe to repeat."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def acquire(paths: RunPaths, run_id: str) -> DaemonLock:
    """Take the run's lock, or RefusedError naming the process that holds it."""
    path = paths.daemon_lock
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except PermissionError as e:
        raise RefusedError(
            f"run {run_id} belongs to another user",
            where=str(path),
            got=e.strerror,
            hint="only the user who started a run may command it",
        ) from e
    except OSError as e:
        raise RunError("cannot open the daemon's lock", where=str(path), got=e.strerror) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip()
        os.close(fd)
        raise RefusedError(
            f"run {run_id} has a daemon already",
            where=str(path),
            got=f"pid {holder or 'unknown'}",
            hint="hexctl attach shows it; hexctl down ends the run",
        ) from e
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        os.fsync(fd)
    except OSError as e:
        os.close(fd)
        raise RunError("cannot write the daemon's lock", where=str(path), got=e.strerror) from e
    return DaemonLock(path, fd)


def next_epoch(paths: RunPaths) -> int:
    """The epoch of this daemon: one more than the last one's, durable before it is used. The caller holds the lock."""
    path = paths.folder / "daemon.epoch"
    try:
        last = int(path.read_text()) if path.exists() else 0
    except ValueError as e:
        raise RunError("the daemon's epoch does not decode", where=str(path), got=str(e)) from e
    temporary = path.with_suffix(".epoch.new")
    try:
        with temporary.open("w") as f:
            f.write(f"{last + 1}\n")
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    except OSError as e:
        raise RunError("cannot write the daemon's epoch", where=str(path), got=e.strerror) from e
    return last + 1
