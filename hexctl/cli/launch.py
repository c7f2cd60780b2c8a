"""Starting a daemon of its own session, and waiting until it answers."""

import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hexctl.cli.extras import need_run_extra
from hexctl.cli.last_words import last_error, log_of
from hexctl.cli.processes import wait_gone
from hexctl.roots import root_words
from planner.errors import HexError
from planner.record import record
from runtime.errors import DeadlineError, RunError, UnreachableError
from runtime.paths import short_root
from runtime.runs import RunInfo, alive, list_runs, read_run

if TYPE_CHECKING:
    from runtime.config.load import LoadedConfig

START_S = 120.0
TICK_S = 0.1
POLL_S = 10.0
LAST_WORDS_S = 10.0
TAIL_LINES = 15


@record
class DaemonOrder:
    """The command line of `runtime.daemon`: a configuration, a run to take over, or both."""

    config: Path | None = None
    run_id: str | None = None
    root: Path | None = None
    steps: int | None = None
    for_s: float | None = None
    detached: bool = False

    @property
    def argv(self) -> list[str]:
        """The whole command."""
        words = [sys.executable, "-m", "runtime.daemon"]
        words += [str(self.config)] if self.config is not None else []
        words += ["--run", self.run_id] if self.run_id is not None else []
        words += ["--root", str(self.root)] if self.root is not None else []
        words += ["--steps", str(self.steps)] if self.steps is not None else []
        words += ["--for", f"{self.for_s:g}s"] if self.for_s is not None else []
        return [*words, "--detached"] if self.detached else words


def settled(loaded: "LoadedConfig", settings: tuple[str, ...]) -> Path:
    """The file to hand to the daemon: the configuration's own, or with `--set` a resolved copy named by its content."""
    if not settings:
        return loaded.path
    from runtime.config.load import resolved_toml

    folder = short_root() / "configs"
    path = folder / f"{loaded.path.stem}-{loaded.sha256[:12]}.toml"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.new")
        temporary.write_text(resolved_toml(loaded))
        temporary.replace(path)
    except OSError as e:
        raise RunError("cannot write the configuration's copy", where=str(path), got=e.strerror) from e
    return path


def start_detached(argv: Sequence[str], root: Path, *, say: Callable[[str], None]) -> RunInfo:
    """Start the daemon `argv`, which outlives us, and wait until its socket answers; answers with its run.

    DeadlineError after two minutes; when the daemon ends first, an error with its exit code and the end of its log.
    """
    need_run_extra("hexctl up")
    with tempfile.TemporaryFile("w+b") as log:
        child = subprocess.Popen(
            list(argv), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, close_fds=True
        )
        try:
            say(f"starting the daemon (pid {child.pid})")
            return _await_answer(child, root, log, say)
        except KeyboardInterrupt:
            if child.poll() is None:  # it is nobody's child but its own: the interrupt is of our waiting
                there = root_words(root / "run")
                say(f"the daemon (pid {child.pid}) goes on starting its run: hexctl attach{there}, hexctl down{there}")
            raise


def _await_answer(child: "subprocess.Popen[bytes]", root: Path, log: IO[bytes], say: Callable[[str], None]) -> RunInfo:
    deadline = time.monotonic() + START_S
    run: RunInfo | None = None
    handle = os.pidfd_open(child.pid)
    try:
        while time.monotonic() < deadline:
            if select.select([handle], [], [], TICK_S)[0]:
                raise _ended(child.wait(), run, log)
            if run is None:
                run = _run_of(child.pid, root)
                if run is not None:
                    say(f"run {run.id}: waiting for its control socket")
            if run is not None and answers(run):
                return run
    finally:
        os.close(handle)
    what = f"run {run.id}" if run is not None else "the daemon"
    raise DeadlineError(
        f"{what} does not answer yet", got=f"{START_S:.0f} s", expected="a control socket",
        hint=f"it was left running (pid {child.pid}); its log: {log_of(run) or 'none yet'}",
    )  # fmt: skip


def await_running(run: RunInfo, *, say: Callable[[str], None]) -> None:
    """Wait until the run generates and trains, telling what it waits for; RunError when it ends instead.

    After two minutes it is left to itself: that is said, and no error.
    """
    from hexctl.client import Client

    deadline, seq, told = time.monotonic() + START_S, None, ""
    with Client(run.paths.api_socket) as client:
        try:
            while (left := deadline - time.monotonic()) > 0:
                snapshot = client.snapshot(seq, min(left, POLL_S))
                if snapshot is None:
                    continue
                seq, progress = snapshot.seq, "; ".join(snapshot.problems)
                if snapshot.run.state not in ("starting", "failed"):
                    return
                if progress and progress != told:
                    say(f"run {run.id}: {progress}")
                    told = progress
        except UnreachableError as e:
            if run.daemon is not None:
                wait_gone([run.daemon], LAST_WORDS_S)  # its last words come after its socket has gone
            raise _ended_early(read_run(Path(run.folder)), e) from e
        except KeyboardInterrupt:
            root = root_words(run.folder)
            say(f"run {run.id} goes on starting: hexctl attach{root}, hexctl down{root}")
            raise
    say(f"run {run.id} is still starting")


def _ended_early(run: RunInfo, lost: UnreachableError) -> HexError:
    path = log_of(run)
    own = last_error(path.read_text(errors="replace").splitlines()) if path is not None else ""
    text, _, hint = own.partition("\nhint: ")
    if not text:
        text = f"run {run.id} ended while it started" + (f": {run.ending}" if run.ending else f" ({lost.what})")
    return RunError(text, hint=hint or f"its log: {path}")


def answers(run: RunInfo) -> bool:
    """Whether the run's daemon answers on its socket. RefusedError: it is another user's."""
    try:
        if not run.paths.api_socket.exists():
            return False
    except PermissionError:
        pass  # another user's folder: the client says so
    from hexctl.client import Client

    with Client(run.paths.api_socket) as client:
        try:
            return client.health().run == run.id
        except UnreachableError:
            return False


def _run_of(pid: int, root: Path) -> RunInfo | None:
    return next((r for r in list_runs(root) if r.daemon is not None and r.daemon.pid == pid and alive(r.daemon)), None)


def _ended(code: int, run: RunInfo | None, log: IO[bytes]) -> HexError:
    """The daemon's own words as an error with the daemon's exit code."""
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").splitlines()
    path = log_of(run)
    if path is not None:
        lines += path.read_text(errors="replace").splitlines()
    own = last_error(lines)
    hint = "" if own else "its last words:\n  " + "\n  ".join(lines[-TAIL_LINES:] or ["none"])
    if own:
        text, _, hint = own.partition("\nhint: ")
        error = RunError(text, hint=hint)
    else:
        error = RunError("the daemon ended before it answered", got=f"exit code {code}", hint=hint)
    error.exit_code = code if 1 <= code <= 6 else 1
    return error
