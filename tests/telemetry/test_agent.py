"""The agent as a process: reports, death of either side, silence of the driver."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from runtime.errors import RunError
from runtime.runs import ProcessMark, alive, mark
from runtime.telemetry.client import TelemetryAgent, parse, report_once
from runtime.telemetry.reading import Report, Watch


def until(condition: Callable[[], bool], deadline_s: float = 100.0) -> None:
    """Wait for a condition; on a busy machine an agent needs seconds for its imports."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"not within {deadline_s} s"
        time.sleep(0.02)


def heard(agent: TelemetryAgent, wanted: Callable[[Report], bool]) -> Report:
    """The first report that is as wanted."""
    found: list[Report] = []

    def look() -> bool:
        report, _ = agent.newest()
        if report is not None and wanted(report):
            found.append(report)
        return bool(found)

    until(look)
    return found[0]


def test_reports_name_watched_processes_and_age(tmp_path: Path) -> None:
    """Host figures, this process by pid and by session, and a fresh age."""
    agent = TelemetryAgent("--no-gpus", "--every=0.1")
    try:
        agent.watch(Watch(folder=str(tmp_path), pids=(os.getpid(),), sessions=(os.getsid(0),)))
        report = heard(agent, lambda r: any(p.cpu_share is not None for p in r.host.processes))
        mine = next(p for p in report.host.processes if p.pid == os.getpid())
        assert mine.resident_bytes > 5e6
        assert agent.pid in {p.pid for p in report.host.processes}  # the child is in the session too
        assert report.host.disk_free_bytes is not None
        assert report.host.memory_total_bytes is not None
        assert (report.library, report.gpus) == ("off", ())
        until(lambda: (agent.newest()[1] or math.inf) < 0.5)  # a report is young when it comes
    finally:
        agent.close()


@pytest.mark.kill
def test_a_killed_agent_is_started_again_and_told_what_to_watch(tmp_path: Path) -> None:
    agent = TelemetryAgent("--no-gpus", "--every=0.1")
    try:
        agent.watch(Watch(folder=str(tmp_path), pids=(os.getpid(),)))
        heard(agent, lambda r: bool(r.host.processes))
        first = agent.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: agent.starts == 2)
        last, _ = agent.newest()
        assert agent.pid != first
        heard(agent, lambda r: r is not last and bool(r.host.processes))
    finally:
        agent.close()


def test_an_agent_that_is_slow_to_start_is_let_start() -> None:
    """Its imports take longer than it may be silent later: it is not killed, again and again, before its first report."""
    agent = TelemetryAgent("--no-gpus", "--every=0.1", silence_s=0.02)
    try:
        heard(agent, lambda _: True)
    finally:
        agent.close()


@pytest.mark.kill
def test_an_agent_dies_with_its_parent() -> None:
    """Kill -9 the parent: no orphan goes on polling."""
    code = (
        "import sys, time\nfrom runtime.telemetry.client import TelemetryAgent\n"
        "a = TelemetryAgent('--no-gpus')\n"
        "while a.newest()[0] is None: time.sleep(0.02)\n"
        "print(a.pid, flush=True)\nsys.stdin.read()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = mark(int(parent.stdout.readline()))
    assert isinstance(child, ProcessMark)
    parent.kill()
    parent.wait(60)
    until(lambda: not alive(child))


def test_closing_ends_the_child() -> None:
    agent = TelemetryAgent("--no-gpus", "--every=0.1")
    heard(agent, lambda _: True)
    child = mark(agent.pid or 0)
    agent.close()
    until(lambda: not alive(child))


def test_discovery_without_a_driver_says_so() -> None:
    """One report, on a machine with a driver or without; stdout of the child is nothing but that report."""
    report = report_once(deadline_s=100.0)
    assert report.library == "ok" or report.message
    env = {**os.environ, "HEXCTL_NVML": "/nowhere/libnvidia-ml.so.1"}
    done = subprocess.run(
        [sys.executable, "-m", "runtime.telemetry.agent", "--once"],
        env=env,
        capture_output=True,
        timeout=100,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 1
    said = json.loads(lines[0])
    assert said["library"] == "no-library"
    assert "/nowhere/libnvidia-ml.so.1" in said["message"]


def test_a_line_that_is_no_report_is_refused() -> None:
    with pytest.raises(RunError, match="does not decode"):
        parse(b'{"seq": 1}')
