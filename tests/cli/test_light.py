"""What the command line loads: little. Tested by `sys.modules` in processes of their own."""

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
