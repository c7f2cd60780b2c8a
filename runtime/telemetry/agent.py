"""The node agent: `python -m runtime.telemetry.agent`. Writes one JSON report a second to stdout until its parent ends.

Reads JSON `Watch` lines from stdin; the end of stdin ends it. `--once` writes one report and exits (GPU discovery).
`--no-gpus` never opens NVML.
"""

import argparse
import ctypes
import json
import os
import queue
import signal
import sys
import threading
import time
from typing import TextIO

from runtime.telemetry.gpus import GpuLevel, GpuWatch
from runtime.telemetry.host import HostWatch
from runtime.telemetry.library import kernel_module_version, open_library
from runtime.telemetry.reading import Report, Watch, to_plain

_PR_SET_PDEATHSIG = 1
_OFF = GpuLevel(library="off", message="", gpus=(), rejected=0, driver="")


def die_with_parent(parent: int) -> None:
    """SIGKILL this process when the parent's starting thread ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(0)  # it ended before the call above


class Agent:
    """Polls GPUs and host and writes reports to `out`."""

    def __init__(self, gpus: GpuWatch | None, host: HostWatch, out: TextIO) -> None:
        self._gpus, self._host, self._out = gpus, host, out
        self._seq = 0
        self.watch: Watch | None = None

    def report(self) -> Report:
        """One poll."""
        level = self._gpus.poll() if self._gpus is not None else _OFF
        self._seq += 1
        return Report(
            seq=self._seq,
            library=level.library,
            message=level.message,
            gpus=level.gpus,
            host=self._host.read(self.watch),
            rejected=level.rejected,
            driver=level.driver,
        )

    def write(self, report: Report) -> None:
        """One line."""
        self._out.write(json.dumps(to_plain(report)) + "\n")
        self._out.flush()


def _read_commands(source: TextIO, into: "queue.Queue[Watch | None]") -> None:
    for line in source:
        raw = json.loads(line)
        into.put(Watch(folder=raw["folder"], pids=tuple(raw["pids"]), sessions=tuple(raw["sessions"])))
    into.put(None)


def _once(gpus: GpuWatch, agent: Agent, deadline_s: float) -> None:
    """Poll until every card has answered or hangs, at most `deadline_s` seconds."""
    until = time.monotonic() + deadline_s
    while True:
        report = agent.report()
        settled = report.library not in ("off",) and all(g.age_s is not None or g.note for g in report.gpus)
        if settled or time.monotonic() >= until:
            agent.write(report)
            return


def main() -> None:
    """Entry point of the child."""
    parser = argparse.ArgumentParser(prog="python -m runtime.telemetry.agent", description="hexctl node agent")
    parser.add_argument("--once", action="store_true", help="one report, then exit")
    parser.add_argument("--no-gpus", action="store_true", help="host figures only")
    parser.add_argument("--every", type=float, default=1.0, help="seconds between reports")
    parser.add_argument("--parent", type=int, default=0, help="end with this process")
    args = parser.parse_args()
    if args.parent:
        die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a stub library prints a warning to stdout; reports must stay clean
    gpus = None if args.no_gpus else GpuWatch(open_library, driver_on_disk=kernel_module_version)
    agent = Agent(gpus, HostWatch(), out)
    if args.once:
        if gpus is not None:
            _once(gpus, agent, deadline_s=10.0)
    else:
        _serve(agent, args.every)
    out.flush()
    os._exit(0)  # a thread that hangs in the driver must not hold up the exit


def _serve(agent: Agent, every_s: float) -> None:
    commands: queue.Queue[Watch | None] = queue.Queue()
    threading.Thread(target=_read_commands, args=(sys.stdin, commands), name="commands", daemon=True).start()
    due = time.monotonic()
    while True:
        try:
            command = commands.get(timeout=max(0.0, due - time.monotonic()))
        except queue.Empty:
            try:
                agent.write(agent.report())
            except BrokenPipeError:
                return
            due = max(due + every_s, time.monotonic() + every_s / 2)
            continue
        if command is None:
            return
        agent.watch = command


if __name__ == "__main__":
    main()
