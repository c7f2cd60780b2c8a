"""Real processes: waited for, and ended exactly as recorded."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hexctl.cli.processes import descendants, end_recorded, wait_gone
from planner.record import replace
from runtime.runs import ProcessMark, RunInfo, alive, mark

# A parent with a child; the parent prints the child's pid and both block until they are ended.
TREE = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
    "print(child.pid, flush=True)\n"
    "child.wait()\n"
)
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('ready', flush=True)\nwhile True: signal.pause()\n"


@pytest.fixture
def started() -> Iterator[list["subprocess.Popen[str]"]]:
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for p in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(p.pid, signal.SIGKILL)  # with the child, which a test may have left without its parent
        p.wait(60)
        assert p.stdout is not None
        p.stdout.close()


def start(started: list["subprocess.Popen[str]"], code: str) -> tuple["subprocess.Popen[str]", str]:
    p = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    started.append(p)
    assert p.stdout is not None
    return p, p.stdout.readline().strip()


def marked(pid: int) -> ProcessMark:
    m = mark(pid)
    assert m is not None
    return m


def run_with(*marks: ProcessMark, tmp_path: Path) -> RunInfo:
    return RunInfo(
        id="local-0000", name="local", folder=str(tmp_path), short=str(tmp_path / "s"), config_path="", config_sha256="",
        created_at_s=0.0, hexctl_version="0", label="paced", state="live", ray_processes=marks,
    )  # fmt: skip


def test_the_tree_is_found_and_ended_and_nothing_else(started: list["subprocess.Popen[str]"], tmp_path: Path) -> None:
    parent, child = start(started, TREE)
    bystander, _ = start(started, TREE)
    tree = descendants([marked(parent.pid)])
    assert [m.pid for m in tree] == [parent.pid, int(child)]
    said: list[str] = []
    assert end_recorded(run_with(marked(parent.pid), tmp_path=tmp_path), say=said.append) == 2
    assert not any(alive(m) for m in tree)
    assert bystander.poll() is None
    assert said == ["ending 2 recorded processes of run local-0000"]


def test_a_reused_pid_is_left_alone(started: list["subprocess.Popen[str]"], tmp_path: Path) -> None:
    parent, _ = start(started, TREE)
    other = replace(marked(parent.pid), start_ticks=marked(parent.pid).start_ticks - 1)
    assert descendants([other]) == ()
    assert end_recorded(run_with(other, tmp_path=tmp_path), say=print) == 0
    assert parent.poll() is None


def test_waiting_counts_down_and_tells_who_is_left(started: list["subprocess.Popen[str]"]) -> None:
    a, _ = start(started, TREE)
    b, _ = start(started, STUBBORN)
    counts: list[int] = []

    def heard(left: int) -> None:
        counts.append(left)
        if left == 2:
            os.kill(a.pid, signal.SIGKILL)
            a.wait(60)

    left = wait_gone([marked(a.pid), marked(b.pid)], 0.5, on_left=heard)
    assert [m.pid for m in left] == [b.pid]
    assert counts == [2, 1]


def test_what_is_told_to_end_is_waited_for_however_soon_it_ends(started: list["subprocess.Popen[str]"]) -> None:
    a, _ = start(started, TREE)
    counts: list[int] = []

    def begin() -> None:
        os.kill(a.pid, signal.SIGKILL)
        a.wait(60)

    assert wait_gone([marked(a.pid)], 60.0, begin=begin, on_left=counts.append) == ()
    assert counts == [1]


def test_nothing_to_wait_for() -> None:
    assert wait_gone([ProcessMark(pid=2**22 - 1, start_ticks=1)], 0.0) == ()
