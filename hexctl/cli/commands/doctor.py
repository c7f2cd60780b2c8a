"""`hexctl doctor`: a look at this machine. Changes nothing."""

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from hexctl.cli.commands.doctor_calibration import calibration_findings
from hexctl.cli.commands.runs import standing
from hexctl.cli.exits import Exit
from hexctl.cli.extras import missing
from hexctl.cli.finding import Finding
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import answer, load, output_option
from hexctl.cli.probe import Gpus, probe
from hexctl.cli.processes import descendants
from hexctl.cli.render.text import counted, size, table
from runtime.config.calibration import NAME, calibration_file
from runtime.paths import short_root
from runtime.runs import HOW_TO_MEND, look_at_runs

FREE_FLOOR_BYTES = 1e9


@click.command(
    help=COMMANDS["doctor"][1]
    + "\n\nWith a CONFIG (a file or the name of a shipped one) its devices, calibration and folder of runs are looked at. Exit code 2 "
    "when something must be mended before a run can start."
)
@click.argument("config", metavar="[CONFIG]", required=False)
@click.option(
    "--root",
    type=click.Path(path_type=Path),
    help='Folder that holds run folders; default: run.root of CONFIG, else "runs".',
)
@output_option
def doctor(config: str | None, root: Path | None, output: str) -> int:
    gpus, parts = probe(), None
    measured = None if root is None else root / NAME
    if config is not None:
        asked = load(config, ()).config
        parts, root = asked.fleet.gpu_parts, root or asked.run.root
        measured = calibration_file(asked) if measured is None else measured
        if asked.fleet.source not in ("gpus", "auto"):
            parts = 1
    root = root or Path("runs")
    file = measured or root / NAME
    found = [*_python(), *_ray(), *_gpus(gpus), *calibration_findings(file, gpus, parts), *_disk(root), *_sockets()]
    found += [*_ports(), *_runs(root), *_terminal()]
    rows = [(f.verdict, f.what, f.found, f.hint) for f in found]
    document = [{"what": f.what, "verdict": f.verdict, "found": f.found, "hint": f.hint} for f in found]
    answer(output, document, table(("", "WHAT", "FOUND", "HINT"), rows))
    return Exit.USAGE if any(f.verdict == "fault" for f in found) else Exit.FINE


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info[:2] >= (3, 11)
    yield Finding(
        what="python",
        verdict="ok" if good else "fault",
        found=f"{version} at {sys.executable}",
        hint="" if good else "3.11 or newer",
    )
    absent = missing()
    yield Finding(
        what="packages for a run", verdict="note" if absent else "ok", found=f"without {', '.join(absent)}" if absent else "all there",
        hint="pip install 'hexctl[run]' to run; plan and attach work without" if absent else "",
    )  # fmt: skip


def _ray() -> Iterator[Finding]:
    if missing(("ray",)):
        return  # said above
    import importlib.metadata

    joined = os.environ.get("HEXCTL_RAY_ADDRESS")
    how = f"the cluster at {joined} is joined" if joined else "a run starts a cluster of its own"
    yield Finding(what="Ray", verdict="ok", found=f"{importlib.metadata.version('ray')}; {how}")


def _ports() -> Iterator[Finding]:
    """Whether a port of this machine's own can be had, as Ray needs several."""
    import socket

    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
            s.bind(("127.0.0.1", 0))
            s.listen(1)
    except OSError as e:
        hint = "Ray needs ports on the loopback interface: is it up, and are ports left?"
        yield Finding(what="ports on 127.0.0.1", verdict="fault", found=e.strerror or str(e), hint=hint)
        return
    yield Finding(what="ports on 127.0.0.1", verdict="ok", found="free ones can be had")


def _gpus(gpus: Gpus) -> Iterator[Finding]:
    if gpus.count is None:
        yield Finding(what="NVIDIA driver", verdict="fault", found=gpus.reason, hint="nvidia-smi; dmesg")
        return
    if gpus.reason:
        hint = "without GPUs, paced devices on the CPU are used"
        yield Finding(what="NVIDIA driver", verdict="note", found=gpus.reason, hint=hint)
        return
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    limit = f", CUDA_VISIBLE_DEVICES={seen}" if seen is not None else ""
    driver = f", driver {gpus.driver}" if gpus.driver else ""
    yield Finding(what="NVIDIA driver", verdict="ok", found=f"{gpus.count} GPUs{limit}{driver}")


def _disk(root: Path) -> Iterator[Finding]:
    place = next(p for p in (root.absolute(), *root.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    low = free < FREE_FLOOR_BYTES
    hint = "run.disk_floor refuses to start" if low else ""
    yield Finding(what=f"free disk at {place}", verdict="fault" if low else "ok", found=size(float(free)), hint=hint)
    if not os.access(place, os.W_OK):
        yield Finding(what=f"{place}", verdict="fault", found="may not be written", hint="--root names another folder")


def _sockets() -> Iterator[Finding]:
    try:
        folder = short_root()
    except OSError as e:
        yield Finding(
            what="folder for sockets", verdict="fault", found=str(e), hint="set XDG_RUNTIME_DIR to a folder of yours"
        )
        return
    long = len(os.fsencode(folder / "00000000" / "api.sock")) > 107
    hint = "too long for a socket: set XDG_RUNTIME_DIR to a shorter folder" if long else ""
    yield Finding(what="folder for sockets", verdict="fault" if long else "ok", found=str(folder), hint=hint)


def _runs(root: Path) -> Iterator[Finding]:
    readable, unreadable = look_at_runs(root)
    for name, fault in unreadable.items():
        yield Finding(what=f"run {name}", verdict="fault", found=f"{fault.what}: {fault.got}", hint=HOW_TO_MEND)
    for run in readable:
        stands = standing(run)
        left = descendants(m for m in (run.daemon, *run.ray_processes) if m is not None)
        if stands == "live":
            yield Finding(
                what=f"run {run.id}", verdict="ok", found=f"live, {counted(len(left), 'process', 'processes')}"
            )
        elif stands == "without daemon":
            hint = f"hexctl up --run {run.id} takes it over; hexctl down --run {run.id} ends it"
            yield Finding(
                what=f"run {run.id}",
                verdict="note",
                found=f"goes on without a daemon, {counted(len(left), 'process', 'processes')}",
                hint=hint,
            )
        elif left:
            hint = f"hexctl down --run {run.id} --force ends exactly those"
            pids = ", ".join(str(m.pid) for m in left)
            yield Finding(what=f"run {run.id}", verdict="note", found=f"ended, but left processes: {pids}", hint=hint)
        elif stands == "dead":
            hint = (
                f"hexctl up --run {run.id} goes on from its ledger; hexctl down --run {run.id} puts its end on record"
            )
            yield Finding(
                what=f"run {run.id}", verdict="note", found="nothing of it lives, yet it never ended", hint=hint
            )


def _terminal() -> Iterator[Finding]:
    term, depth = os.environ.get("TERM", ""), os.environ.get("COLORTERM", "").lower()
    if not sys.stderr.isatty():
        found = "none"
    elif os.environ.get("NO_COLOR"):
        found = f"{term}, NO_COLOR is set"
    elif depth in ("truecolor", "24bit"):
        found = f"{term}, 24-bit colour"
    else:
        found = f"{term}, " + ("256 colours" if "256" in term else "16 colours")
    yield Finding(what="terminal", verdict="ok", found=found)
