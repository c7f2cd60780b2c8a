"""A whole run as a user has it: `hexctl daemon` in a process, looked at through its API. Every wait has a deadline."""

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from hexctl.client import Client
from runtime.api.wire import Command, CommandResult, DeviceRow, Snapshot
from runtime.errors import RunError
from runtime.runs import RunInfo, alive, list_runs

ROOT = Path(__file__).resolve().parents[1]
HEXCTL = [sys.executable, "-m", "hexctl"]


class LiveRun:
    """One run below `folder`; `close` ends whatever is left of it, by recorded pid."""

    def __init__(self, folder: Path, *, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self.root = folder, folder / "runs"
        self.environment = {**(environment or os.environ), "OMP_NUM_THREADS": "1"}
        self.daemon: subprocess.Popen[str] | None = None
        self.log = folder / "daemon.err"
        self._keys = 0

    def start(self, *arguments: object) -> None:
        """Start a daemon; standard error goes to a file."""
        with self.log.open("a") as err:
            self.daemon = subprocess.Popen(
                [*HEXCTL, "daemon", *map(str, arguments), "--root", str(self.root)],
                stdout=subprocess.PIPE,
                stderr=err,
                text=True,
                cwd=self.folder,
                env=self.environment,
                start_new_session=True,
            )

    def end(self, deadline_s: float) -> int:
        """Wait for the daemon's own end: its exit code. Standard output must have stayed empty."""
        assert self.daemon is not None
        out, _ = self.daemon.communicate(timeout=deadline_s)
        assert out == ""
        return self.daemon.returncode

    @property
    def info(self) -> RunInfo:
        """What run.json says."""
        return list_runs(self.root)[-1]

    def until(self, done: Callable[[Snapshot], bool], what: str, *, deadline_s: float) -> Snapshot:
        """The first snapshot that is as wished."""
        deadline, last = time.monotonic() + deadline_s, None
        while time.monotonic() < deadline:
            last = self._next(last)
            if last is not None and done(last):
                return last
        raise AssertionError(f"{what}: not within {deadline_s:.0f} s\n{_told(last)}\n{self.log.read_text()[-3000:]}")

    def _next(self, last: Snapshot | None) -> Snapshot | None:
        wait = time.monotonic() + 1.0
        try:
            with Client(self.info.paths.api_socket) as client:
                if last is None:
                    return client.snapshot()
                return client.snapshot(after=last.seq, wait_s=2.0) or last
        except (RunError, IndexError):
            if self.daemon is not None:
                # Not up yet: rest on the daemon's own end rather than on the clock.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = self.daemon.wait(max(0.05, wait - time.monotonic()))
                    raise AssertionError(f"the daemon ended: {code}\n{self.log.read_text()[-3000:]}") from None
            return last

    def command(self, name: Any, **fields: Any) -> CommandResult:
        """One command over the API."""
        self._keys += 1
        with Client(self.info.paths.api_socket) as client:
            return client.command(Command(name=name, key=f"test-{os.getpid()}-{self._keys}", **fields))

    def cli(self, *arguments: str, deadline_s: float = 60) -> subprocess.CompletedProcess[str]:
        """hexctl as typed."""
        return subprocess.run(
            [*HEXCTL, *arguments, "--root", str(self.root)],
            capture_output=True,
            text=True,
            timeout=deadline_s,
            cwd=self.folder,
            env=self.environment,
            check=False,
        )

    def metrics(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far."""
        path = self.info.paths.metrics
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def close(self) -> None:
        """Nothing is left behind, whatever went wrong."""
        if not list_runs(self.root):
            if self.daemon is not None:
                self.daemon.kill()
            return
        if self.info.state == "live":
            self.cli("down", "--run", self.info.id, "--force", deadline_s=90)
        if self.daemon is not None and self.daemon.poll() is None:
            self.daemon.kill()
            self.daemon.wait(10)


def identity_holds(s: Snapshot) -> bool:
    """generated = trained + masked + in flight + wasted."""
    f = s.flow
    assert f is not None
    return f.generated_tokens == f.trained_tokens + f.masked_tokens + f.in_flight_tokens + sum(f.wasted_tokens.values())


def by_role(s: Snapshot, role: str) -> list[DeviceRow]:
    """Devices on which something of that role serves."""
    return [d for d in s.devices if d.role == role and d.replica is not None and d.status in ("ok", "HOST-BOUND")]


def steps(s: Snapshot) -> int:
    """Optimiser steps done."""
    return s.flow.steps_done if s.flow is not None else 0


def pids(s: Snapshot) -> dict[str, int]:
    """Process of each replica and trainer."""
    return {d.replica: d.pid for d in s.devices if d.replica is not None and d.pid is not None}


def journal_disagreements(ledger: Path, eta: int) -> list[Any]:
    """Applied samples whose trained and masked tokens are not what the raw journal says, where its tokens are still kept:
    trained are those at most `eta` steps old, the rest is masked. Not empty samples are looked at, or the test is blind."""
    query = """SELECT s.grp, s.member, s.trained, s.masked,
                      SUM(LENGTH(g.tokens) / 4 * (s.step - g.version <= :eta)) young,
                      SUM(LENGTH(g.tokens) / 4 * (s.step - g.version > :eta)) old
               FROM samples s JOIN segments g USING (grp, member) WHERE s.state = 'APPLIED' GROUP BY s.grp, s.member"""
    rows = _rows(ledger, query, {"eta": eta})
    assert rows, "the journal keeps no applied sample"
    return [r for r in rows if (r[2], r[3]) != (r[4], r[5])]


def in_hand(ledger: Path, replica: str) -> int:
    """Samples that a replica of that name decodes and of which tokens are in the ledger."""
    query = "SELECT COUNT(*) FROM samples WHERE state = 'LEASED' AND length > 0 AND replica = :replica"
    return int(_rows(ledger, query, {"replica": replica})[0][0])


def resumed_samples(ledger: Path) -> int:
    """Samples that were leased again with tokens in hand: they went on from a prefix that was not empty."""
    return int(_rows(ledger, "SELECT COUNT(*) FROM samples WHERE epoch > 1 AND lease_length > 0")[0][0])


def _rows(ledger: Path, query: str, arguments: Mapping[str, int | str] | None = None) -> list[Any]:
    connection = sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)
    try:
        return connection.execute(query, arguments or {}).fetchall()
    finally:
        connection.close()


def daemon_alive(info: RunInfo) -> bool:
    """Whether the recorded daemon lives."""
    return alive(info.daemon)


def _told(s: Snapshot | None) -> str:
    if s is None:
        return "no snapshot"
    rows = "\n".join(f"  {d.display} {d.role} {d.status} {d.replica} v{d.version}" for d in s.devices)
    return f"step {steps(s)}, waits: {s.flow.waits if s.flow else None}\n{rows}\n" + "\n".join(
        e.message for e in s.events[-12:]
    )
