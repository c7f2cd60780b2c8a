"""Real daemons in processes of their own (over a simulated fleet): locks, signals, endings, adoption, clear errors."""

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hexctl.client import Client
from runtime.api.wire import Command, Snapshot
from runtime.daemon.lock import acquire, next_epoch
from runtime.daemon.main import main
from runtime.errors import ConfigError, RefusedError, UnreachableError
from runtime.paths import RunPaths
from runtime.runs import RunInfo, alive, list_runs, read_run

HERE = Path(__file__).parent
LIMIT_S = 200.0  # a busy machine imports for long
MODEL = HERE.parent.parent / "configs" / "models" / "tiny-qwen3"
CONFIG = """
[run]
name = "sim"
{run}
[model]
source = "shape"
path = "{model}"
[fleet]
source = "declared"
[fleet.kinds.fast]
peak_flops = "12 GFLOP/s"
hbm = "40 MB/s"
memory = "{memory}"
link = "100 MB/s"
[[fleet.devices]]
kind = "fast"
count = 3
[planner]
solve_time = "20 s"
"""


class Daemons:
    """Starts daemons and makes sure that none is left."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root, self.started = folder, folder / "runs", list[subprocess.Popen[str]]()
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "OMP_NUM_THREADS": "1"}

    def config(self, *, memory: str = "64 MB", run: str = "") -> Path:
        path = self.folder / "sim.toml"
        path.write_text(CONFIG.format(model=MODEL, memory=memory, run=run))
        return path

    def start(self, *args: object) -> subprocess.Popen[str]:
        command = [sys.executable, str(HERE / "simdaemon.py"), *map(str, args), "--root", str(self.root)]
        daemon = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=self.environment, cwd=self.folder
        )
        self.started.append(daemon)
        return daemon

    def end(self, *args: object) -> tuple[int, str]:
        """Run a daemon that ends by itself: exit code and standard error; standard output stays empty."""
        daemon = self.start(*args)
        out, err = daemon.communicate(timeout=LIMIT_S)
        assert out == ""
        return daemon.returncode, err

    def run(self) -> RunInfo:
        return list_runs(self.root)[-1]

    def until(self, daemon: subprocess.Popen[str], done: Callable[[Snapshot], bool]) -> Snapshot:
        """Long-poll the daemon's API until `done`."""
        deadline = time.monotonic() + LIMIT_S
        while True:
            assert daemon.poll() is None, daemon.communicate()[1]
            assert time.monotonic() < deadline
            runs = list_runs(self.root)
            if runs:
                try:
                    with Client(runs[-1].paths.api_socket) as client:
                        return poll(client, done, deadline)
                except UnreachableError:
                    pass  # it does not serve yet (a killed one leaves its socket behind)
            select.select([], [], [], 0.05)


def poll(client: Client, done: Callable[[Snapshot], bool], deadline: float) -> Snapshot:
    seen = client.now()
    while not done(seen):
        assert time.monotonic() < deadline, seen
        seen = client.snapshot(after=seen.seq, wait_s=5) or seen
    return seen


@pytest.fixture
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemons]:
    made = Daemons(tmp_path_factory.mktemp("d"))
    yield made
    for daemon in made.started:
        if daemon.poll() is None:
            daemon.kill()
        daemon.communicate()


def running(s: Snapshot) -> bool:
    return s.run.state == "running"


def test_steps_reached_ends_the_run_with_0_and_a_folder_that_tells_it(daemons: Daemons) -> None:
    code, err = daemons.end(daemons.config(), "--steps", 2)
    assert code == 0, err
    run = daemons.run()
    assert (run.state, run.label, run.ending) == ("ended", "simulated", "step limit reached (2 steps)")
    assert "Traceback" not in err
    assert err.count("run ended") == 1
    assert (run.paths.folder / "config.toml").exists()
    assert not run.paths.api_socket.exists()


def test_a_run_whose_flow_cannot_be_built_ends_with_that_error_though_it_was_being_acted_on(daemons: Daemons) -> None:
    daemons.environment = {**daemons.environment, "SIM_UNBUILT": "rows.jsonl"}
    code, err = daemons.end(daemons.config())
    assert code == ConfigError.exit_code, err
    assert "error: rows.jsonl: no such data" in err
    assert "Traceback" not in err
    run = daemons.run()
    assert (run.state, run.ending) == ("ended", "no such data")
    assert not run.paths.api_socket.exists()


@pytest.mark.parametrize(("number", "code", "state"), [(signal.SIGTERM, 0, "live"), (signal.SIGINT, 130, "ended")])
def test_a_signal_during_adoption_ends_only_what_it_ends_otherwise(
    daemons: Daemons, number: signal.Signals, code: int, state: str
) -> None:
    """The successor is told to leave (or the run to end) before it has joined the living run."""
    first = daemons.start(daemons.config())
    daemons.until(first, running)
    run = daemons.run()
    first.kill()
    first.communicate()
    pipe = daemons.folder / "hold"
    os.mkfifo(pipe)
    daemons.environment = {**daemons.environment, "SIM_HOLD": str(pipe)}
    second = daemons.start("--run", run.id)
    assert pipe.read_text() == "discovering"
    second.send_signal(number)
    pipe.write_text("go on")
    _, err = second.communicate(timeout=LIMIT_S)
    assert second.returncode == code, err
    assert read_run(run.paths.folder).state == state
    assert "Traceback" not in err


def test_a_second_daemon_is_refused_with_the_pid_of_the_first_which_goes_on(daemons: Daemons) -> None:
    first = daemons.start(daemons.config())
    daemons.until(first, running)
    run = daemons.run()
    for args in ([daemons.config()], ["--run", run.id]):
        code, err = daemons.end(*args)
        assert code == 4, err
        assert f"pid {first.pid}" in err
        assert "Traceback" not in err
    assert first.poll() is None
    assert len(list_runs(daemons.root)) == 1
    first.send_signal(signal.SIGINT)
    _, err = first.communicate(timeout=LIMIT_S)
    assert first.returncode == 130, err
    assert read_run(run.paths.folder).ending == "interrupted (Ctrl-C)"


def test_neither_a_closed_terminal_nor_kill_9_ends_the_run_and_the_next_daemon_adopts_it(daemons: Daemons) -> None:
    daemon = daemons.start(daemons.config())
    before = daemons.until(daemon, running)
    assert before.run.simulation_speed == 60.0  # as the configuration says by default
    run = daemons.run()
    for number, code in ((signal.SIGHUP, 0), (signal.SIGKILL, -9)):
        daemon.send_signal(number)
        _, err = daemon.communicate(timeout=LIMIT_S)
        assert daemon.returncode == code, err
        left = daemons.run()
        assert (left.id, left.state, alive(left.daemon)) == (run.id, "live", False)
        daemon = daemons.start(*([daemons.config()] if number == signal.SIGHUP else ["--run", run.id]))
        after = daemons.until(daemon, lambda s, last=before.seq: s.run.state == "running" and s.seq > last)
        assert after.run.daemon_pid == daemon.pid
        assert after.plan is not None
        assert before.plan is not None
        assert after.plan.rev == before.plan.rev
        assert any("takes the living run over" in e.message for e in after.events)
        before = after
    with Client(run.paths.api_socket) as client:
        assert client.command(Command(name="down", key="k", reason="enough")).accepted
    _, err = daemon.communicate(timeout=LIMIT_S)
    assert daemon.returncode == 0, err
    assert read_run(run.paths.folder).ending == "enough"


def test_a_model_larger_than_the_fleet_is_5_before_anything_starts(daemons: Daemons) -> None:
    code, err = daemons.end(daemons.config(memory="64 kB"))
    assert code == 5, err
    assert "no plan exists" in err
    assert "memory" in err
    assert "Traceback" not in err
    assert "starting Ray" not in err
    assert daemons.run().state == "ended"


@pytest.fixture
def here(daemons: Daemons, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., tuple[int, str]]]:
    """The daemon's `main` in this process, for what ends before anything starts."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*args: object) -> tuple[int, str]:
        try:
            code = main([*map(str, args), "--root", str(daemons.root)])
        except SystemExit as e:
            code = int(e.code or 0)
        out, err = capsys.readouterr()
        assert (out, "Traceback" in err) == ("", False)
        return code, err

    yield run
    root.handlers[:], root.level = handlers, level


Here = Callable[..., tuple[int, str]]


def test_too_little_disk_is_refused_before_a_folder_is_made(daemons: Daemons, here: Here) -> None:
    code, err = here(daemons.config(run='disk_floor = "900 TB"'))
    assert code == 2
    assert "too little free disk" in err
    assert "run.disk_floor" in err
    assert list(daemons.root.iterdir()) == []


def test_what_is_wrong_on_the_command_line_is_2(daemons: Daemons, here: Here) -> None:
    for args, said in (
        ([], "a configuration or --run"),
        ([daemons.config(), "--for", "soon"], "not a duration"),
        ([daemons.config(), "--for", "0 s"], "more than 0 s"),
        ([daemons.config(), "--steps", "0"], "at least 1"),
        (["--run", "nobody"], "no such run"),
        ([daemons.folder / "none.toml"], "none.toml"),
    ):
        code, err = here(*args)
        assert code == 2, err
        assert said in err


def test_a_root_that_is_a_file_is_one_clear_error(daemons: Daemons, here: Here) -> None:
    daemons.root.write_text("in the way")
    code, err = here(daemons.config())
    assert code == 2, err
    assert "cannot make the run folder" in err
    assert str(daemons.root) in err


def test_the_lock_is_let_go_and_epochs_grow(tmp_path: Path) -> None:
    paths = RunPaths(folder=tmp_path, short=tmp_path)
    lock = acquire(paths, "x")
    with pytest.raises(RefusedError, match=f"pid {os.getpid()}"):
        acquire(paths, "x")
    assert [next_epoch(paths), next_epoch(paths)] == [1, 2]
    lock.release()
    again = acquire(paths, "x")
    assert next_epoch(paths) == 3
    again.release()
