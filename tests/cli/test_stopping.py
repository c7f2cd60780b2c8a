"""Long searches on a terminal: a line says how far they are, Ctrl-C gets the best so far, and once more gives up."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.test_plan import MODEL, SMALL

DEADLINE_S = 120.0


class OnTerminal:
    """`hexctl ARGV` with stderr on a terminal and stdout in a pipe."""

    def __init__(self, argv: list[str]) -> None:
        self._read, slave = pty.openpty()
        self.child = subprocess.Popen(
            [sys.executable, "-m", "hexctl", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=slave, text=True
        )  # fmt: skip
        os.close(slave)
        self.said = ""

    def until(self, text: str) -> None:
        """Read stderr until it says `text`."""
        end = time.monotonic() + DEADLINE_S
        while text not in self.said:
            assert select.select([self._read], [], [], max(0.0, end - time.monotonic()))[0], self.said
            self.said += os.read(self._read, 4096).decode()  # OSError when the child has gone

    def interrupt(self) -> None:
        self.child.send_signal(signal.SIGINT)

    def answer(self) -> tuple[int, str]:
        """Exit code and stdout."""
        out, _ = self.child.communicate(timeout=DEADLINE_S)
        return self.child.returncode, out

    def close(self) -> None:
        self.child.kill()
        self.child.communicate()
        os.close(self._read)


@contextmanager
def on_terminal(*argv: str) -> Iterator[OnTerminal]:
    found = OnTerminal(list(argv))
    try:
        yield found
    finally:
        found.close()


@pytest.fixture
def config(tmp_path: Path) -> str:
    (tmp_path / "model.json").write_text(json.dumps(MODEL))
    (tmp_path / "fleet.toml").write_text(SMALL.replace("count = 3", "count = 40"))
    return str(tmp_path / "fleet.toml")


def test_one_ctrl_c_ends_every_search_with_the_best_so_far(config: str) -> None:
    """Random plans are drawn for days, for either of the two."""
    days = ("--evaluations", "1000000000", "--solve-time", "48h")
    with on_terminal("plan", config, "--compare", "random,random", *days, "-o", "json") as run:
        run.until("random: no plan yet, 40 devices")
        run.until("tokens/s, gap")
        run.interrupt()
        code, out = run.answer()
    assert code == 0
    plans = json.loads(out)
    assert len(plans) == 2
    assert all(p["tokens_per_s"] > 0 for p in plans)


@pytest.mark.parametrize(
    "argv",
    [
        ("plan", "--scheduler", "areal-hex", "--what-if", "add=100000xcard", "--solve-time", "10h"),
        ("simulate", "--scheduler", "areal-hex", "--set", "fleet.devices=[{kind='card',count=100000}]"),
    ],
)
def test_a_second_ctrl_c_gives_up(config: str, argv: tuple[str, ...]) -> None:
    """The partition of so many devices ends at no time; there is no plan yet that could be the answer."""
    with on_terminal(argv[0], config, *argv[1:]) as run:
        run.until(f"areal-hex: no plan yet, {100_040 if argv[0] == 'plan' else 100_000:,} devices")
        run.interrupt()
        run.until("Ctrl-C again gives up")
        run.interrupt()
        run.until("interrupted")
        assert run.answer() == (130, "")
