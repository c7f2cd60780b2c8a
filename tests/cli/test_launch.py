"""Starting a detached daemon and ending it, with a real process in its place."""

import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hexctl.cli.exits import run as exits_run
from hexctl.cli.launch import DaemonOrder, answers, await_running, settled, start_detached
from hexctl.cli.main import main
from hexctl.cli.options import load
from planner.errors import HexError
from runtime.config.load import load_config
from runtime.errors import RunError
from runtime.runs import alive, read_run


def argv(root: Path, mode: str) -> list[str]:
    return [sys.executable, "-m", "tests.cli.tiny_daemon", str(root), mode]


def test_a_daemon_is_started_answers_and_is_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    info = start_detached(argv(tmp_path, "serve"), tmp_path, say=said.append)
    assert info.id == "local-7f3a"
    assert answers(info)
    assert said[0].startswith("starting the daemon (pid ")
    assert main(["down", "--root", str(tmp_path)]) == 0
    assert not alive(info.daemon)
    assert read_run(Path(info.folder)).state == "ended"
    out, err = capfd.readouterr()
    assert out == ""
    assert "waiting for 1 process to end" in err


def test_force_ends_a_daemon_that_is_not_asked(tmp_path: Path) -> None:
    info = start_detached(argv(tmp_path, "serve"), tmp_path, say=lambda text: None)
    assert main(["down", "--force", "--root", str(tmp_path)]) == 0
    assert not alive(info.daemon)
    assert read_run(Path(info.folder)).state == "ended"


def test_progress_is_told_until_the_run_works(tmp_path: Path) -> None:
    said: list[str] = []
    info = start_detached(argv(tmp_path, "slow"), tmp_path, say=lambda text: None)
    await_running(info, say=said.append)
    assert said == ["run local-7f3a: starting Ray"]
    assert main(["down", "--root", str(tmp_path)]) == 0


@pytest.fixture
def interruptible() -> Iterator[None]:
    """SIGINT as a terminal's process has it: one that a script starts in the background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _ctrl_c_at(words: str, said: list[str]) -> Callable[[str], None]:
    def say(text: str) -> None:
        said.append(text)
        if words in text:
            signal.raise_signal(signal.SIGINT)

    return say


@pytest.mark.usefixtures("interruptible")
def test_after_ctrl_c_what_goes_on_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        start_detached(argv(tmp_path, "slow"), tmp_path, say=_ctrl_c_at("waiting for its control socket", said))
    assert re.fullmatch(
        rf"the daemon \(pid \d+\) goes on starting its run: hexctl attach --root {tmp_path}, hexctl down --root {tmp_path}",
        said[-1],
    )
    info = read_run(tmp_path / "local-7f3a")
    deadline = time.monotonic() + 60
    while not answers(info):
        assert time.monotonic() < deadline
        threading.Event().wait(0.02)
    with pytest.raises(KeyboardInterrupt):
        await_running(info, say=_ctrl_c_at("starting Ray", said))
    assert said[-1].startswith("run local-7f3a goes on starting: hexctl attach --root ")
    assert alive(info.daemon)
    assert main(["down", "--root", str(tmp_path)]) == 0


def test_a_run_that_ends_while_it_starts_says_why(tmp_path: Path) -> None:
    info = start_detached(argv(tmp_path, "late"), tmp_path, say=lambda text: None)
    with pytest.raises(RunError, match="Ray does not start, got 'no memory'"):
        await_running(info, say=lambda text: None)


def test_the_daemons_own_error_and_code_come_through(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no GPUs, got 'nothing'") as caught:
        start_detached(argv(tmp_path, "fail"), tmp_path, say=lambda text: None)
    assert (caught.value.exit_code, caught.value.hint) == (2, "try paced")


def test_a_crash_shows_the_last_words(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert exits_run(lambda: start_detached(argv(tmp_path, "crash"), tmp_path, say=lambda text: None)) == 1
    err = capfd.readouterr().err
    assert "exit code 77" in err
    assert "Fatal: something else" in err


def test_the_daemons_command_line() -> None:
    order = DaemonOrder(config=Path("a.toml"), root=Path("r"), steps=3, for_s=300.0, detached=True)
    assert order.argv[1:] == [
        "-m",
        "runtime.daemon",
        "a.toml",
        "--root",
        "r",
        "--steps",
        "3",
        "--for",
        "300s",
        "--detached",
    ]


def test_settings_travel_as_a_resolved_copy() -> None:
    plain = load("local")
    assert settled(plain, ()) == plain.path
    changed = load("local", ("algorithm.eta=1",))
    copy = load_config(settled(changed, ("algorithm.eta=1",)))
    assert copy.config.algorithm.eta == 1
    assert copy.sha256 == changed.sha256


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["daemon"], 2, "give a CONFIG"),
        (["daemon", "nowhere"], 2, "no such configuration"),
        (["daemon", "local", "--steps", "0"], 2, "--steps"),
        (["daemon", "local", "--for", "5 parsecs"], 2, "not a duration"),
        (["daemon", "local", "--run", "../x"], 2, "not a run id"),
        (["daemon", "--run", "nobody"], 2, "no such run"),
        (["daemon", "--run", "nobody", "--set", "a=1"], 2, "--set"),
        (["daemon", "local", "--set", "algorithm.etta=1"], 2, "--set algorithm.etta: algorithm.etta: unknown key"),
        (["up", "local", "--set", "nonsense"], 2, "expected KEY=VALUE"),
        (["up", "nowhere"], 2, "shipped: "),
        (["up", "local", "--set", "fleet.source=declared"], 2, "for planning only"),
        (["attach"], 3, "no live run"),
    ],
)
def test_nonsense_before_anything_starts(
    words: list[str], code: int, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--root", str(tmp_path / "runs")]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert says in err
    assert "Traceback" not in err
    assert not (tmp_path / "runs").exists()


def test_every_kind_of_end_has_its_code(capfd: pytest.CaptureFixture[str]) -> None:
    def raising(error: BaseException) -> int:
        def command() -> None:
            raise error

        return exits_run(command)

    import runtime.errors as e
    from planner.errors import InvalidInput

    cases: list[tuple[BaseException, int]] = [
        (e.RunError("x"), 1), (e.ConfigError("x"), 2), (e.FleetError("x"), 2), (InvalidInput("x"), 2), (HexError("x"), 2),
        (e.UnreachableError("x"), 3), (e.RefusedError("x"), 4), (e.InfeasibleError("x"), 5), (e.DeadlineError("x"), 6),
        (KeyboardInterrupt(), 130), (ZeroDivisionError("oops"), 1),
    ]  # fmt: skip
    assert [raising(error) for error, _ in cases] == [code for _, code in cases]
    err = capfd.readouterr().err
    assert "this is a bug in hexctl: ZeroDivisionError: oops" in err
    assert "Traceback" not in err


def test_a_path_that_cannot_be_used_is_the_users_to_mend(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """An OSError that names a path is no bug of ours: 2, one line, no traceback."""
    assert exits_run((tmp_path / "absent").read_text) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"error: {tmp_path / 'absent'}: No such file or directory\n"
