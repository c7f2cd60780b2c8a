"""Figures of a session's processes, as the session changes."""

import os
import signal
import subprocess
from collections.abc import Iterator

import pytest

from runtime.telemetry.host import HostWatch
from runtime.telemetry.reading import Watch


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[str]]:
    """A shell that leads a session of its own."""
    child = subprocess.Popen(["sh"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    yield child
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def say(shell: subprocess.Popen[str], command: str) -> str:
    """The line that a command prints."""
    assert shell.stdin is not None
    assert shell.stdout is not None
    shell.stdin.write(command + "\n")
    shell.stdin.flush()
    return shell.stdout.readline().strip()


def seen(host: HostWatch, session: int) -> set[int]:
    """Processes of one session and what else is watched: nothing."""
    return {p.pid for p in host.read(Watch(folder="/", sessions=(session,))).processes}


def test_a_session_is_followed_though_others_are_read_once(shell: subprocess.Popen[str]) -> None:
    """Who is born into the session is seen at the next look, who has left it or ended is not; strangers never are."""
    host = HostWatch()
    assert seen(host, shell.pid) == {shell.pid}
    child = int(say(shell, "sleep 1000 & echo $!"))
    apart = int(say(shell, "setsid sh -c 'echo $$; exec sleep 1000' &"))
    try:
        assert seen(host, shell.pid) == {shell.pid, child}
        assert seen(host, apart) == {apart}  # another session: everything is looked at anew
        assert seen(host, shell.pid) == {shell.pid, child}
    finally:
        os.kill(apart, signal.SIGKILL)
    assert say(shell, f"kill {child}; wait {child}; echo over") == "over"
    assert seen(host, shell.pid) == {shell.pid}


def test_figures_of_a_process_are_its_own(shell: subprocess.Popen[str]) -> None:
    """The processor's share since the look before, of one that worked and one that did not."""
    now = [0.0]
    host = HostWatch(lambda: now[0])
    assert seen(host, shell.pid) == {shell.pid}
    say(shell, "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done; echo done")
    idle = int(say(shell, "sleep 1000 & echo $!"))
    now[0] = 1.0
    watch = Watch(folder="/", sessions=(shell.pid,))
    found = {p.pid: p for p in host.read(watch).processes}
    assert (found[shell.pid].cpu_share or 0.0) > 0.01
    assert found[idle].cpu_share is None  # seen for the first time
    assert found[shell.pid].resident_bytes > 0
    now[0] = 2.0
    assert [p.cpu_share for p in host.read(watch).processes if p.pid == idle] == [0.0]
