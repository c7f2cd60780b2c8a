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
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from hexctl.tui.terminal import RESTORE, wants_ascii

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 100.0  # a busy machine imports for long
LAST = b"<all read>"


class Terminal:
    """A pseudo-terminal with a dashboard in it."""

    def __init__(self, mode: str, size: tuple[int, int], environment: dict[str, str]) -> None:
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave
        ours = ("LC_", "LANG", "NO_COLOR", "COLORTERM", "TEXTUAL", "COLUMNS", "LINES")
        base = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
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
            gone = self.process.poll() is not None
            came = self.read(0.2)
            late = time.monotonic() > deadline or (gone and not came)
            assert wanted in self.output or not late, f"never wrote {wanted!r}; last: {self.output[-400:]!r}"

    def press(self, keys: str) -> None:
        os.write(self.master, keys.encode())

    def ended(self) -> int:
        """Exit code, with everything read that was still written."""
        deadline = time.monotonic() + LIMIT_S
        while self.process.poll() is None:
            assert time.monotonic() < deadline, "does not end"
            self.read(0.1)
        os.write(self._slave, LAST)  # behind everything the process wrote, however late that comes through
        while not self.output.endswith(LAST):
            assert time.monotonic() < deadline, "its last words do not come through"
            self.read(0.2)
        self.output = self.output.removesuffix(LAST)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(LIMIT_S)
        for fd in (self.master, self._slave):
            with suppress(OSError):
                os.close(fd)

    def check_restored(self) -> None:
        """Mouse off, alternate screen off, cursor on, and the line discipline of before."""
        for mode in (b"1000", b"1003", b"1006", b"2004", b"1049"):
            assert self.output.rfind(mode + b"l") > self.output.rfind(mode + b"h") >= 0, f"{mode!r} is left on"
        assert self.output.rfind(b"?25h") > self.output.rfind(b"?25l") >= 0, "the cursor is left off"
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


def _all_asleep(pid: int) -> bool:
    """Whether every thread of a process sleeps."""
    states = [p.read_text().rsplit(")", 1)[1].split()[0] for p in Path(f"/proc/{pid}/task").glob("*/stat")]
    return set(states) == {"S"}


def _blocked_in_write(t: Terminal) -> None:
    """Wait until the terminal's buffer is full and the application no longer computes."""
    deadline, asleep = time.monotonic() + LIMIT_S, 0
    while asleep < 5:
        assert time.monotonic() < deadline, "does not block"
        select.select([], [], [], 0.1)
        asleep = asleep + 1 if _all_asleep(t.process.pid) else 0


def test_after_a_stall_it_draws_on() -> None:
    with terminal("fast") as t:
        t.until(b"DEVICE")
        _blocked_in_write(t)
        t.press("2")
        t.until(b"identity holds")
        t.press("q")
        assert t.ended() == 0
        t.check_restored()


def test_a_stalled_terminal_does_not_hold_sigterm_up() -> None:
    with terminal("fast") as t:
        t.until(b"DEVICE")
        _blocked_in_write(t)
        os.kill(t.process.pid, signal.SIGTERM)
        assert t.process.wait(LIMIT_S) == 128 + signal.SIGTERM  # and nothing was read meanwhile


def test_a_terminal_that_vanishes_ends_it() -> None:
    with terminal() as t:
        t.until(b"0.48/Mtok")
        os.close(t.master)
        os.kill(t.process.pid, signal.SIGHUP)
        assert t.process.wait(LIMIT_S) == 128 + signal.SIGHUP


@pytest.mark.parametrize("environment", [{"LANG": "C"}, {"TERM": "linux"}], ids=str)
def test_only_ascii_where_only_ascii_will_do(environment: dict[str, str]) -> None:
    with terminal(**environment) as t:
        t.until(b"0.48/Mtok")
        for key, word in (("2", b"identity holds"), ("3", b"in force"), ("?", b"Everywhere")):
            t.press(key)
            t.until(word)
        t.press("qq")  # help, then the dashboard
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


def test_an_unknown_terminal_starts() -> None:
    with terminal(TERM="foo") as t:
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
