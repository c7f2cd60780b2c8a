"""Folders of processes that could not remove them."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from runtime.runs import start_ticks
from runtime.scratch import remove_abandoned, scratch

OWNER = """
import sys
from pathlib import Path
from runtime.scratch import scratch
with scratch(Path(sys.argv[1])) as made:
    (made / "weights").write_bytes(bytes(1000))
    print(made.name, flush=True)
    sys.stdin.read()
"""
DEADLINE_S = 120.0


def test_a_folder_lasts_as_long_as_its_context(tmp_path: Path) -> None:
    with scratch(tmp_path) as made:
        assert made.parent == tmp_path
        remove_abandoned(tmp_path)
        with scratch(tmp_path) as other:
            assert sorted(tmp_path.iterdir()) == sorted((made, other))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kill
def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        left = tmp_path / owner.stdout.readline().strip()
        remove_abandoned(tmp_path)
        assert (left / "weights").exists(), "its owner lives"
    finally:
        owner.kill()
        owner.communicate()
    assert left.exists()
    with scratch(tmp_path) as made:
        assert list(tmp_path.iterdir()) == [made]


def test_a_number_given_anew_and_another_host_are_told_apart(tmp_path: Path) -> None:
    with scratch(tmp_path) as made:
        ticks = str(start_ticks(os.getpid()))
        reused = tmp_path / made.name.replace(f"-{ticks}-", "-1-")
        elsewhere = tmp_path / made.name.replace("scratch-", "scratch-another-").replace(f"-{ticks}-", "-1-")
        mine = tmp_path / ".hexctl-scratch-notes"
        for folder in (reused, elsewhere, mine):
            folder.mkdir()
        remove_abandoned(tmp_path)
        assert sorted(tmp_path.iterdir()) == sorted((made, elsewhere, mine))


@pytest.mark.kill
def test_a_second_ctrl_c_during_a_profile_leaves_nothing(tmp_path: Path) -> None:
    there = tmp_path / "tmp"
    there.mkdir()
    run = subprocess.Popen(
        [sys.executable, "-m", "hexctl", "profile", "local", "--quick", "-f", str(tmp_path / "calibration.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "TMPDIR": str(there), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        end, rest = time.monotonic() + DEADLINE_S, threading.Event()
        while not list(there.glob(".hexctl-scratch-*")):
            assert time.monotonic() < end, "no scratch folder was made"
            assert run.poll() is None
            rest.wait(0.05)
        os.killpg(run.pid, signal.SIGINT)
        assert run.stderr is not None
        while "once more ends at once" not in run.stderr.readline():
            assert run.poll() is None
        os.killpg(run.pid, signal.SIGINT)
        out, talk = run.communicate(timeout=DEADLINE_S)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
    assert (run.returncode, out) == (130, ""), talk
    assert list(there.glob(".hexctl-scratch-*")) == []
    assert not (tmp_path / "calibration.json").exists()
