"""A real pseudo-terminal: whatever ends the dashboard, the terminal is left as it was found."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hexctl.tui.terminal import RESTORE, wants_ascii

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0


class Terminal:
    """A pseudo-terminal with a dashboard in it."""

    def __init__(self, mode: str, size: tuple[int, int], environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        base = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("LC_", "LANG", "NO_COLOR", "COLORTERM", "TEXTUAL", "COLUMNS", "LINES"))
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.tui.child", mode], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
            env={**base, "TERM": "xterm-256color", "COLORTERM": "truecolor", **environment},
        )  # fmt: skip
        self.output = b""

    def read(self, seconds: float) -> bool:
        """Take what comes within `seconds`; False when nothing came."""
        ready, _, _ = select.select([self.master], [], [], seconds)
        if not ready:
            return False
        try:
            data = os.read(self.master, 65536)
        except OSError:
            return False
        self.output += data
        return bool(data)

    def until(self, wanted: bytes) -> None:
        """Read until `wanted` has been written."""
        deadline = time.monotonic() + LIMIT_S
        while wanted not in self.output:
            assert time.monotonic() < deadline, f"never wrote {wanted!r}; last: {self.output[-400:]!r}"
            self.read(0.5)

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        """Exit code, with everything read that was still written."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "does not end"
            self.read(0.1)
        while self.read(0.1):
            pass
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        for fd in (self.master, self._slave):
            try:
                os.close(fd)
            except OSError:
                pass

    def check_restored(self) -> None:
        """Mouse off, alternate screen off, cursor on, and the line discipline of before."""
        for on, off in ((b"?1000h", b"?1000l"), (b"?1003h", b"?1003l"), (b"?1006h", b"?1006l"), (b"?2004h", b"?2004l"), (b"?1049h", b"?1049l"),
                        (b"?25l", b"?25h")):  # fmt: skip
            assert self.output.rfind(off) > self.output.rfind(on) >= 0, f"{off!r} is not the last word"
        assert termios.tcgetattr(self._slave)[3] == self.before[3]


@contextmanager
def terminal(mode: str = "plain", size: tuple[int, int] = (80, 24), **environment: str) -> Iterator[Terminal]:
    t = Terminal(mode, size, {"LANG": "C.UTF-8", **environment})
    try:
        yield t
    finally:
        t.close()


def test_q_leaves_with_a_word_and_the_terminal_as_it_was() -> None:
    with terminal() as t:
        t.until(b"0.48/Mtok")
        rss = int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{t.process.pid}/status").read_text())[1]) * 1024  # type: ignore[index]
        assert rss < 150e6, f"{rss / 1e6:.0f} MB resident"
        loaded = Path(f"/proc/{t.process.pid}/maps").read_text()
        assert "torch" not in loaded
        assert "/ray/" not in loaded
        t.press("q")
        assert t.ended() == 0
        t.check_restored()
        assert t.output.rstrip().endswith(b"run local-7f3a goes on; hexctl attach comes back; hexctl down ends it")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda s: s.name)
def test_signals_end_it_cleanly(number: signal.Signals) -> None:
    with terminal() as t:
        t.until(b"0.48/Mtok")
        os.kill(t.process.pid, number)
        assert t.ended() == 128 + number
        t.check_restored()


def test_a_crash_restores_the_terminal_too() -> None:
    with terminal("crash") as t:
        t.until(b"0.48/Mtok")
        t.press("j")
        assert t.ended() == 1
        t.check_restored()
        assert b"made to crash" in t.output


def test_a_stalled_terminal_does_not_hold_sigterm_up_and_resuming_shows_the_newest() -> None:
    with terminal("fast", (140, 45)) as t:
        t.until(b"DEVICE")
        # Nothing is read for a while: the application blocks in its write. Then everything is read at once.
        deadline = time.monotonic() + LIMIT_S
        while Path(f"/proc/{t.process.pid}/wchan").exists() and time.monotonic() < deadline:
            blocked = [
                p.read_text().split(")", 1)[1].split()[0] for p in Path(f"/proc/{t.process.pid}/task").glob("*/stat")
            ]
            ready, _, _ = select.select([], [], [], 0.2)
            if all(state == "S" for state in blocked) and select.select([t.master], [], [], 0)[0]:
                break
        os.kill(t.process.pid, signal.SIGTERM)
        deadline = time.monotonic() + LIMIT_S
        while t.process.poll() is None:  # still nothing is read
            assert time.monotonic() < deadline, "a stalled terminal keeps the process alive"
            select.select([], [], [], 0.05)
        assert t.process.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("environment", [{"LANG": "C"}, {"LC_ALL": "POSIX"}, {"TERM": "linux"}], ids=str)
def test_only_ascii_where_only_ascii_will_do(environment: dict[str, str]) -> None:
    with terminal(**environment) as t:
        t.until(b"0.48/Mtok")
        for key, word in (("2", b"identity holds"), ("3", b"in force"), ("?", b"Everywhere")):
            t.press(key)
            t.until(word)
        t.press("\x1bq")
        t.ended()
        assert t.output.isascii()


def test_no_color_sends_no_colour() -> None:
    with terminal(NO_COLOR="1") as t:
        t.until(b"0.48/Mtok")
        t.press("3")
        t.until(b"in force")
        t.press("q")
        t.ended()
        for codes in re.findall(rb"\x1b\[([\d;]*)m", t.output):
            numbers = [int(c) for c in codes.split(b";") if c]
            assert not any(30 <= c <= 38 or 40 <= c <= 48 or 90 <= c <= 107 for c in numbers), codes


@pytest.mark.parametrize("term", ["xterm-kitty", "xterm-ghostty", "foo"])
def test_unknown_terminals_start(term: str) -> None:
    with terminal(TERM=term) as t:
        t.until(b"0.48/Mtok")
        t.press("q")
        assert t.ended() == 0


@pytest.mark.parametrize(
    ("environment", "ascii_only"),
    [
        ({}, False),
        ({"LANG": "en_GB.UTF-8"}, False),
        ({"LANG": "de_DE.utf8"}, False),
        ({"LANG": "C"}, True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),  # as Python leaves it
        ({"LANG": "C.UTF-8"}, False),
        ({"LC_ALL": "C", "LANG": "en_GB.UTF-8"}, True),
        ({"LC_ALL": "en_GB.UTF-8", "LANG": "C"}, False),
        ({"LC_CTYPE": "fr_FR.ISO-8859-1", "LANG": "en_GB.UTF-8"}, True),
        ({"LC_CTYPE": "fr_FR.UTF-8", "LANG": "C"}, False),
        ({"TERM": "linux", "LANG": "en_GB.UTF-8"}, True),
    ],
)
def test_when_only_ascii_will_do(environment: dict[str, str], ascii_only: bool) -> None:
    assert wants_ascii(environment) == ascii_only


def test_the_restoring_sequence_ends_every_mode() -> None:
    for mode in ("1000l", "1003l", "1006l", "2004l", "1049l", "25h"):
        assert f"\x1b[?{mode}" in RESTORE
