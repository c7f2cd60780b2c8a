"""A benchmark that is terminated takes its run with it."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from runtime.runs import RunInfo, alive, list_runs
from tests.live import ROOT

CONFIG = ROOT / "configs" / "sim-h800-h20.toml"  # no Ray: its daemon is there in a second or two


def living(folder: Path) -> RunInfo | None:
    """The run below `folder` whose daemon lives, once there is one."""
    runs = [r for root in folder.glob("hexctl-parts-*/runs") for r in list_runs(root)]
    return next((r for r in runs if alive(r.daemon)), None)


def test_a_terminated_benchmark_leaves_no_daemon(tmp_path: Path) -> None:
    """SIGTERM to step_parts ends the daemon that it started, though that is in a session of its own."""
    command = [sys.executable, "-m", "benchmarks.step_parts", str(CONFIG), "--steps", "100000"]
    told = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        deadline = time.monotonic() + 150
        while (run := living(tmp_path)) is None and time.monotonic() < deadline and told.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                told.wait(0.1)
        assert run is not None, told.communicate(timeout=30)
        told.send_signal(signal.SIGTERM)
        told.send_signal(signal.SIGTERM)  # told twice, it still clears up
        told.communicate(timeout=120)
        assert told.returncode == 128 + signal.SIGTERM
        assert not alive(run.daemon)
        assert not list(tmp_path.glob("hexctl-parts-*"))
    finally:
        told.kill()
