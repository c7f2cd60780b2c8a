"""The agent's parent: starts it, keeps its newest report with an age, starts it again with back-off when it ends or is silent."""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from functools import lru_cache
from typing import Any

from pydantic import TypeAdapter, ValidationError

from runtime.errors import DeadlineError, RunError
from runtime.telemetry.reading import Report, Watch, to_plain

START_S = 60.0  # until the first report: its process and imports, on a loaded machine
SILENCE_S = 10.0  # from then on
BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
logger = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def _adapter() -> TypeAdapter[Report]:
    return TypeAdapter(Report)


def parse(line: bytes) -> Report:
    """A line of the agent. RunError when it is none."""
    try:
        return _adapter().validate_json(line)
    except ValidationError as e:
        raise RunError("the node agent wrote a line that does not decode", got=line[:200]) from e


def command(*flags: str) -> list[str]:
    """The agent's command line."""
    return [sys.executable, "-m", "runtime.telemetry.agent", f"--parent={os.getpid()}", *flags]


def report_once(*, deadline_s: float = 15.0) -> Report:
    """One report with all GPUs, from a child that is killed at the deadline. DeadlineError when the driver hangs."""
    child = subprocess.Popen(
        command("--once"), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        out, _ = child.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        raise DeadlineError(
            "the NVIDIA driver does not answer", got=f"{deadline_s:.0f} s", hint="try nvidia-smi; it may hang too"
        ) from None
    if not out.strip():
        raise RunError("the node agent ended without a report", got=f"exit code {child.returncode}")
    return parse(out.strip().splitlines()[-1])


class TelemetryAgent:
    """A running agent. `newest()` never waits."""

    def __init__(self, *flags: str, silence_s: float = SILENCE_S) -> None:
        """`flags` are the agent's own, such as "--no-gpus". One that reported and is silent for so long is started again."""
        self._flags, self._silence_s = flags, silence_s
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._report: Report | None = None
        self._report_s = 0.0
        self._watch: Watch | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._started = 0
        # The thread that starts the child must outlive it: the kernel ties the child's life to this thread.
        self._thread = threading.Thread(target=self._supervise, name="telemetry", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """Process id of the child, while there is one."""
        child = self._child
        return child.pid if child is not None else None

    @property
    def starts(self) -> int:
        """How often the child was started."""
        return self._started

    def newest(self) -> tuple[Report | None, float | None]:
        """(newest report, its age in seconds)."""
        with self._lock:
            return self._report, None if self._report is None else time.monotonic() - self._report_s

    def watch(self, watch: Watch) -> None:
        """Tell the agent which processes and which folder to look at."""
        with self._lock:
            if watch == self._watch:
                return
            self._watch = watch
        self._tell()

    def close(self, deadline_s: float = 3.0) -> None:
        """End the child."""
        self._stopping.set()
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()
        self._thread.join(deadline_s)
        if child is not None and child.poll() is None:
            child.kill()

    def _tell(self) -> None:
        child, watch = self._child, self._watch
        if child is None or watch is None or child.stdin is None:
            return
        try:
            child.stdin.write(json.dumps(to_plain(watch)).encode() + b"\n")
            child.stdin.flush()
        except (OSError, ValueError):
            return  # the child has ended; the next one is told on its start

    def _supervise(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            child = subprocess.Popen(
                command(*self._flags), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._child = child
            self._started += 1
            self._tell()
            heard = self._listen(child)
            self._child = None
            with contextlib.suppress(OSError):
                child.kill()
            child.wait()
            if self._stopping.is_set():
                return
            failures = 0 if heard else failures + 1
            pause = BACKOFF_S[min(failures, len(BACKOFF_S) - 1)]
            logger.warning("node agent ended (exit code %s); starting another in %.0f s", child.returncode, pause)
            self._stopping.wait(pause)

    def _listen(self, child: "subprocess.Popen[bytes]") -> bool:
        """Take reports until the child ends or is silent too long; True when at least one came."""
        lines: queue.Queue[bytes] = queue.Queue()
        pump = threading.Thread(target=_pump, args=(child.stdout, lines), name="telemetry-pipe", daemon=True)
        pump.start()
        heard = False
        while True:
            try:
                line = lines.get(timeout=self._silence_s if heard else START_S)
            except queue.Empty:
                return heard
            if not line:
                return heard
            try:
                report = parse(line)
            except RunError as e:
                logger.warning("%s", e)
                continue
            heard = True
            with self._lock:
                self._report, self._report_s = report, time.monotonic()


def _pump(source: Any, into: "queue.Queue[bytes]") -> None:
    """Lines of the child into a queue; an empty one at its end."""
    for line in source:
        into.put(line)
    into.put(b"")
