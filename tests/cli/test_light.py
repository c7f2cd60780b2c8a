"""What the command line loads: little. Tested by `sys.modules` in processes of their own."""

import os
import subprocess
import sys

import pytest

HEAVY = ("torch", "ray", "textual", "pydantic", "httpx", "pulp", "numpy", "networkx", "starlette", "rich", "asyncio")


def loaded_after(*argv: str) -> tuple[int, set[str], str]:
    """Exit code, heavy modules loaded, and stdout of a `hexctl` call."""
    code = (
        "import sys\nfrom hexctl.cli.main import main\ncode = main(sys.argv[2:])\n"
        "loaded = [m for m in sys.argv[1].split(',') if m in sys.modules]\n"
        "print('LOADED', code, *loaded, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ",".join(HEAVY), *argv], capture_output=True, text=True, check=True, timeout=60
    )
    words = done.stderr.strip().splitlines()[-1].split()
    assert words[0] == "LOADED"
    return int(words[1]), set(words[2:]), done.stdout


def test_help_loads_nothing_heavy_and_names_every_command() -> None:
    code, loaded, stdout = loaded_after("--help")
    assert (code, loaded) == (0, set())
    for name in ("up", "daemon", "attach", "down", "runs", "plan", "status", "doctor", "export", "wait"):
        assert f"\n  {name} " in stdout


def test_version_loads_nothing_heavy() -> None:
    code, loaded, stdout = loaded_after("--version")
    assert (code, loaded) == (0, set())
    assert stdout.startswith("hexctl ")


@pytest.mark.parametrize("command", ["status", "plan", "up"])
def test_help_of_a_command_loads_neither_the_workload_nor_the_dashboard(command: str) -> None:
    code, loaded, _ = loaded_after(command, "--help")
    assert code == 0
    assert not loaded & {"torch", "ray", "textual", "pulp", "starlette"}


def test_the_planner_package_is_light() -> None:
    code = "import planner, sys; print([m for m in ('torch', 'ray', 'textual', 'pydantic', 'asyncio') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("stdout", "code", "says"), [("/dev/full", 1, "No space left"), ("pipe", 0, "")])
def test_a_standard_output_that_takes_nothing(stdout: str, code: int, says: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "wb") if stdout == "pipe" else open(stdout, "wb") as out:  # a pipe nobody reads
        words = [
            sys.executable,
            "-c",
            "import sys; from hexctl.cli.main import main; sys.exit(main(sys.argv[1:]))",
            "runs",
        ]
        done = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    if stdout != "pipe":
        os.close(write)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr
