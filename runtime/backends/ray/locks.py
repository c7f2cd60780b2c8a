"""One host-wide owner a GPU. The claim names the processes of the owner's Ray and holds as long as one of them lives, so it
outlives the daemon and falls with the run."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.errors import FleetError
from runtime.runs import ProcessMark, alive


def lock_folder() -> Path:
    """Shared by all users of the machine, like the temp dir itself."""
    return Path(tempfile.gettempdir()) / "hexctl-devices"


@contextlib.contextmanager
def _locked(device: str, folder: Path) -> Iterator[int]:
    """The claim file of a device, open and locked against other processes."""
    if not folder.exists():
        folder.mkdir(mode=0o777, exist_ok=True)
        with contextlib.suppress(PermissionError):
            folder.chmod(0o1777)
    path = folder / f"{device}.json"
    try:
        fd = _opened(path)
    except OSError as e:
        raise FleetError("cannot open the claim of a device", where=str(path), got=e.strerror) from e
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)


def _opened(path: Path) -> int:
    """The claim file for reading and writing, made if need be; every user of the machine may write it."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)  # without O_CREAT: in a sticky folder that fails for another user's file
    except FileNotFoundError:
        pass
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # made meanwhile
        return os.open(path, flags)
    os.fchmod(fd, 0o666)  # whatever the umask is
    return fd


def _owner(fd: int) -> str | None:
    """The run that holds the claim; None when nobody does, or nobody any more."""
    raw = os.pread(fd, 65536, 0)
    try:
        body = json.loads(raw)
        marks = [ProcessMark(pid=int(p), start_ticks=int(t)) for p, t in body["processes"]]
        return str(body["run"]) if any(alive(m) for m in marks) else None
    except (ValueError, KeyError, TypeError):
        return None


def owner(device: str, folder: Path | None = None) -> str | None:
    """The live run that has claimed a device; None when it is free."""
    place = folder or lock_folder()
    if not (place / f"{device}.json").exists():
        return None
    with _locked(device, place) as fd:
        return _owner(fd)


def claim(devices: Sequence[str], run_id: str, processes: Sequence[ProcessMark], folder: Path | None = None) -> None:
    """Take devices for a run. FleetError naming the run that has one of them; then none is taken."""
    place = folder or lock_folder()
    with contextlib.ExitStack() as stack:
        files = {d: stack.enter_context(_locked(d, place)) for d in sorted(devices)}
        for d, fd in files.items():
            if (other := _owner(fd)) not in (None, run_id):
                raise FleetError(
                    "the device belongs to another run",
                    where=d,
                    got=other,
                    hint="end that run, or leave the device out",
                )
        body = json.dumps({"run": run_id, "processes": [[m.pid, m.start_ticks] for m in processes]}).encode()
        for fd in files.values():
            os.ftruncate(fd, 0)
            os.pwrite(fd, body, 0)
