"""Commands against a daemon's server on a real socket: figures, refusals, exit codes."""

import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hexctl.cli.main import COMMANDS, cli, main
from hexctl.cli.options import load
from hexctl.cli.render.text import signed
from hexctl.roots import root_words
from planner.record import replace
from runtime.api.wire import EventRow, Proposal
from runtime.config.load import resolved_toml
from runtime.runs import ProcessMark, read_run
from tests.api.doors import PLAN, Served, served, snapshot
from tests.cli.runs import make_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def server(root: Path) -> Iterator[Served]:
    info = make_run(root, "local-7f3a")
    with served(info.paths.api_socket) as s:
        yield s


class Shell:
    """Calls the command line in this process; file descriptors are captured whole."""

    def __init__(self, root: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.root, self.capfd = root, capfd

    def __call__(self, *argv: str, code: int = 0) -> str:
        self.capfd.readouterr()
        got = main([*argv, "--root", str(self.root)])
        out, self.err = self.capfd.readouterr()
        assert got == code, self.err
        assert "Traceback" not in self.err
        return out

    def json(self, *argv: str, code: int = 0) -> Any:
        return json.loads(self(*argv, "--output", "json", code=code))


@pytest.fixture
def shell(root: Path, capfd: pytest.CaptureFixture[str]) -> Shell:
    return Shell(root, capfd)


STATUS_KEYS = [
    "plan_rev",
    "version",
    "eta",
    "staleness_mean",
    "staleness_p95",
    "staleness_max",
    "reward_mean",
    "generated_tokens",
    "trained_tokens",
    "masked_tokens",
    "in_flight_tokens",
    "wasted_tokens",
    "redone_tokens",
    "queue_groups",
    "tokens_per_s",
    "usd_per_h",
    "usd_per_mtok",
]


def test_status(server: Served, shell: Shell) -> None:
    document = shell.json("status")
    assert set(STATUS_KEYS) <= document.keys()
    assert (document["plan_rev"], document["version"], document["usd_per_mtok"]) == (3, 7, 0.48)
    assert document["wasted_tokens"] == {"cancelled": 88}
    assert document["metrics"] == {"grad_norm": 0.7, "kl": None}
    assert all(not isinstance(document[k], str) for k in STATUS_KEYS)
    text = shell("status")
    assert "eta 4" in text
    assert "$0.48/Mtok" in text
    assert shell.err == ""


def test_a_simulated_run_says_whose_seconds_its_rates_are_of(server: Served, shell: Shell) -> None:
    assert shell.json("status")["simulation_speed"] is None
    assert "virtual time" not in shell("status")
    server.put(run=replace(snapshot().run, label="simulated", simulation_speed=60.0))
    assert shell.json("status")["simulation_speed"] == 60.0
    assert "simulated at 60x real time: every tok/s is of virtual time" in shell("status")


def test_figures_that_nobody_knows_are_null(server: Served, shell: Shell) -> None:
    server.put(flow=None, plan=None)
    document = shell.json("status")
    assert all(document[k] is None for k in STATUS_KEYS)
    assert "does not answer yet" in shell("status")
    server.put(flow=replace(snapshot().flow, usd_per_h=None, usd_per_mtok=None))
    assert shell.json("status")["usd_per_mtok"] is None
    assert "$" not in shell("status")
    assert "refill" not in shell("status")


def test_how_long_empty_slots_wait_is_said(server: Served, shell: Shell) -> None:
    server.put(flow=replace(snapshot().flow, refill_s=0.116))
    assert shell.json("status")["refill_s"] == 0.116
    assert "a slot that falls empty has its next sample within 0.12 s" in shell("status")


def test_gpus(server: Served, shell: Shell) -> None:
    rows = shell.json("gpus")
    assert [(r["display"], r["role"], r["power_w"]) for r in rows] == [
        ("n0/gpu0", "train", None),
        ("n0/gpu1", "rollout", None),
    ]
    lines = shell("gpus").splitlines()
    assert len(lines) == 3
    assert "74 %" in lines[2]
    assert "—" in lines[2]
    assert "paced" in lines[2]


def test_events(server: Served, shell: Shell) -> None:
    rows = [
        EventRow(seq=i, at_s=1000.0 + i, level="info", kind="k", message=f"thing {i}\x1b[31m\nfake")
        for i in range(1, 9)
    ]
    server.door.rows = rows
    server.put(events=tuple(rows))
    assert [e["seq"] for e in shell.json("events", "--limit", "3")] == [6, 7, 8]
    assert [e["seq"] for e in shell.json("events", "--after", "2", "--limit", "2")] == [3, 4]
    text = shell("events")
    assert len(text.splitlines()) == 8
    assert "\x1b" not in text


def test_events_are_followed_until_the_daemon_goes(server: Served, shell: Shell) -> None:
    def later() -> None:
        assert server.door.waiting.wait(60)
        server.door.rows = [EventRow(seq=1, at_s=1001.0, level="warning", kind="k", message="r0 died")]
        server.door.waiting.clear()
        server.put(events=tuple(server.door.rows))
        assert server.door.waiting.wait(60)  # the next poll: the event has been read
        server.end_soon()

    change = threading.Thread(target=later)
    change.start()
    lines = shell("events", "--follow", "--output", "json", code=3).splitlines()
    change.join()
    assert [json.loads(line)["message"] for line in lines] == ["r0 died"]
    assert "no daemon answers" in shell.err


def test_overrides_carry_device_role_and_author(server: Served, shell: Shell) -> None:
    assert shell("cordon", "n0/gpu1", "--reason", "fan").strip() == "cordon done"
    assert shell.json("pin", "n0/gpu1", "train", "--force")["accepted"] is True
    shell("replan")
    first, second, third = server.door.commands
    assert (first.name, first.device, first.reason, bool(first.author)) == ("cordon", "n0/gpu1", "fan", True)
    assert (second.name, second.role, second.force) == ("pin", "train", True)
    assert len({first.key, second.key, third.key}) == 3


def test_refusals_and_nonsense_have_their_codes(server: Served, shell: Shell) -> None:
    assert shell("approve", "1", code=4) == ""
    assert "error: that proposal is no longer open, got 1, expected 4" in shell.err
    assert shell("drain", "n9/gpu9", code=2) == ""
    assert "hint: hexctl gpus lists them" in shell.err
    shell("pin", "n0/gpu1", "boss", code=2)
    shell("approve", "-3", code=2)
    shell("status", "--run", "nobody", code=2)
    shell("replan", "--reason", "boom", code=1)
    assert "secret" not in shell.err


def test_the_right_revision_is_taken(server: Served, shell: Shell) -> None:
    server.put(proposal=Proposal(plan=replace(PLAN, rev=4), expires_at_s=None, gain_share=0.06))
    assert shell.json("status")["proposal_rev"] == 4
    assert "hexctl approve 4" in shell("status")
    shell("approve", "4")
    assert server.door.commands[-1].plan_rev == 4


def test_wait_until(server: Served, shell: Shell) -> None:
    assert shell.json("wait", "--until", "reward>0.8 and state=running")["reward_mean"] == 0.83
    shell("wait", "--until", "reward>0.99", "--timeout", "0.2s", code=6)
    assert "not within 200 ms" in shell.err
    assert "reward_mean 0.83" in shell.err
    shell("wait", "--until", "colour=red", code=2)
    shell("wait", "--until", "reward>0.8", "--timeout", "soon", code=2)
    shell("wait", "--until", "reward>0.8", "--timeout", "-1", code=2)


def test_wait_sees_the_change(server: Served, shell: Shell) -> None:
    def later() -> None:
        assert server.door.waiting.wait(60)
        server.put(flow=replace(snapshot().flow, steps_done=50))

    change = threading.Thread(target=later)
    change.start()
    assert shell.json("wait", "--until", "step>=50", "--timeout", "60s")["steps_done"] == 50
    change.join()


def test_no_run(shell: Shell) -> None:
    for command in ("status", "gpus", "events", "replan", "down", "attach"):
        assert shell(command, code=3) == ""
        assert "no live run" in shell.err
        assert "hint: " in shell.err
    assert shell.json("runs") == []
    assert "no runs" in shell("runs")


def test_several_runs(root: Path, server: Served, shell: Shell) -> None:
    make_run(root, "other-1111")
    make_run(root, "old-2222", state="ended", ending="steps reached", daemon=None)
    shell("status", code=2)
    assert "local-7f3a, other-1111" in shell.err
    assert shell.json("status", "--run", "loc")["run"] == "local-7f3a"
    assert [(r["id"], r["standing"]) for r in shell.json("runs")] == [
        ("local-7f3a", "live"), ("old-2222", "ended"), ("other-1111", "live"),
    ]  # fmt: skip
    shell("status", "--run", "old-2222", code=3)
    assert "run old-2222 has ended: steps reached" in shell.err


def test_a_run_whose_daemon_is_gone(root: Path, shell: Shell) -> None:
    make_run(root, "local-dead", daemon=ProcessMark(pid=2**22 - 1, start_ticks=1))
    shell("status", code=3)
    assert "its daemon is gone" in shell.err
    told = f"hint: hexctl daemon --run local-dead --root {root} takes it over; hexctl down --run local-dead --root {root} ends it"
    assert told in shell.err
    assert shell.json("runs")[0]["standing"] == "dead"
    shell("down")
    assert "no daemon answers" in shell.err
    assert read_run(root / "local-dead").state == "ended"
    shell("down", "--run", "local-dead")
    assert "has ended already" in shell.err


def test_a_run_of_another_user(root: Path, shell: Shell) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can make another user's socket")
    info = make_run(root, "theirs-1111")
    info.paths.short.mkdir(parents=True)
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(info.paths.api_socket))  # bound, nobody listens
    os.chown(info.paths.api_socket, 12345, 12345)
    try:
        shell("status", code=4)
    finally:
        sock.close()
    assert "belongs to another user" in shell.err


def test_run_folders_that_are_damaged_are_passed_over(root: Path, shell: Shell) -> None:
    for i, body in enumerate(("", "{", "[]", '{"id": 1}')):
        (root / f"broken-{i}").mkdir(parents=True)
        (root / f"broken-{i}" / "run.json").write_text(body)
    assert shell.json("runs") == []
    assert shell.err.count("left out: ") == 4


def test_the_summaries_are_the_commands_own_words() -> None:
    import click

    context = click.Context(cli)
    for name, (_, summary) in COMMANDS.items():
        command = cli.get_command(context, name)
        assert command is not None
        assert (command.help or "").startswith(summary)


FULL = "error: runs/x/events.db: the event store cannot be written, got 'disk is full'\nhint: is there space on the disk?\n"


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (FULL, "gone too; it ended with: runs/x/events.db: the event store cannot be written, got 'disk is full'\n"),
        (FULL + "17:16:19 I daemon 2 starts\n", "gone too\n"),  # which was killed
        ("", "gone too\n"),
    ],
)
def test_of_what_a_daemon_died_is_said(root: Path, shell: Shell, log: str, said: str) -> None:
    run = make_run(root, "local-dead", daemon=ProcessMark(pid=2**22 - 1, start_ticks=1))
    run.paths.logs.mkdir()
    (run.paths.logs / "daemon.log").write_text("17:16:18 I start r0\n" + log)
    shell("status", code=3)
    assert said in shell.err


def test_an_export_that_fails_is_one_error(root: Path, shell: Shell, tmp_path: Path) -> None:
    run = make_run(root, "local-new0")
    run.paths.config.write_text(resolved_toml(load("local")))
    shell("export", "--run", "local-new0", str(tmp_path / "out"), code=1)
    assert "no weights are published yet" in shell.err
    assert shell.err.count("error:") == 1
    make_run(root, "sim-new0", label="simulated")
    shell("export", "--run", "sim-new0", str(tmp_path / "out"), code=4)
    assert "a simulated run has no weights" in shell.err


def test_a_run_whose_file_does_not_decode_is_not_passed_over(root: Path, server: Served, shell: Shell) -> None:
    for name, text in (("local-bad0", b"{"), ("local-bad1", b"[]"), ("local-bad2", bytes(range(256)))):
        make_run(root, name)
        (root / name / "run.json").write_bytes(text)
        shell("status", "--run", name, code=1)
        assert f"{name}/run.json: run.json does not decode" in shell.err
        assert "hint: put the file back" in shell.err
    assert [r["id"] for r in shell.json("runs")] == ["local-7f3a"]
    assert shell.err.count("left out: ") == 3
    assert shell.json("status")["run"] == "local-7f3a"


def test_a_command_to_type_names_the_root_where_it_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert root_words("runs/local-7f3a") == ""
    assert root_words(tmp_path / "runs" / "local-7f3a") == ""
    assert root_words("/data/my runs/local-7f3a") == " --root '/data/my runs'"


@pytest.mark.parametrize(
    ("share", "told"), [(-0.004, "+0 %"), (0.004, "+0 %"), (-0.22, "-22 %"), (0.09, "+9 %"), (None, "—")]
)
def test_a_deviation_of_nothing_has_no_minus(share: float | None, told: str) -> None:
    assert signed(share) == told
