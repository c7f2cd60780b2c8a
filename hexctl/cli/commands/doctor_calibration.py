"""Whether a calibration is still about this machine: its age, driver, torch, devices. The judgement is pure."""

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path

from hexctl.cli.finding import Finding
from hexctl.cli.probe import Gpus
from planner.calibration import Calibration, KindTables
from planner.cluster import whole_of
from planner.errors import HexError
from planner.record import record
from runtime.cards import parts_by_default

OLD_DAYS = 30  # drivers, clocks and our own engine change; a month is a guess at how fast
ANEW = "hexctl profile measures it anew"


@record
class MachineFacts:
    """The machine as it is now."""

    today: date
    host: str
    torch: str  # "" when it is not installed
    driver: str  # "" without one
    devices: tuple[str, ...]  # names the driver gives


def calibration_findings(path: Path, gpus: Gpus, gpu_parts: int | None = None) -> Iterator[Finding]:
    """What is to be said of the file at `path`, and of GPUs in parts. Reads the file and nothing else."""
    from runtime.config.calibration import load_calibration

    if not path.exists():
        yield from parts_finding(gpu_parts, None, gpus)
        yield Finding(
            what="calibration",
            verdict="note",
            found=f"none at {path}: plans count with datasheets and published measurements",
            hint="hexctl profile measures this machine",
        )
        return
    try:
        calibration = load_calibration(path)
    except HexError as e:
        hint = f"remove it or measure anew: hexctl profile --out {path}"
        yield Finding(what="calibration", verdict="fault", found=f"{path}: {e.what}", hint=hint)
        return
    yield from parts_finding(gpu_parts, calibration, gpus)
    yield from judged(calibration, facts_of(gpus))


def parts_finding(gpu_parts: int | None, calibration: Calibration | None, gpus: Gpus) -> Iterator[Finding]:
    """How many devices each GPU counts as, and whose rates plans count them with; nothing where it is one. Pure."""
    parts = gpu_parts or parts_by_default(gpus.count or 0)
    if parts == 1 or not gpus.count:
        return
    counts = f"a GPU counts as {parts} devices that take turns on it" + ("" if gpu_parts else ", as there is one alone")
    known = () if calibration is None else calibration.kinds
    here = [t for t in known if t.provenance.device in gpus.names]
    own = [t for t in here if whole_of(t.kind)[1] == parts and t.engine and t.trainer]
    alone = [t for t in here if whole_of(t.kind)[1] == 1 and (t.engine or t.trainer)]
    if own:
        names = ", ".join(t.kind for t in own)
        yield Finding(
            what="GPUs in parts",
            verdict="ok",
            found=f"{counts}; planned by {names}, each role measured beside the other",
        )
        return
    whose = f"by {', '.join(t.kind for t in alone)}, measured on whole cards" if alone else "with nothing measured"
    yield Finding(
        what="GPUs in parts",
        verdict="note",
        found=f"{counts}; planned {whose}, and the rest assumed",
        hint="hexctl profile CONFIG measures both roles beside each other on parts",
    )


def facts_of(gpus: Gpus) -> MachineFacts:
    """This machine, now."""
    import importlib.metadata
    import socket

    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = ""
    return MachineFacts(
        today=datetime.now(UTC).date(), host=socket.gethostname(), torch=torch, driver=gpus.driver, devices=gpus.names
    )


def judged(calibration: Calibration, now: MachineFacts) -> Iterator[Finding]:
    """A finding a measured kind, and one for devices of the machine that were not measured. Pure."""
    for tables in calibration.kinds:
        wrong = tuple(_wrong(tables, now))
        p = tables.provenance
        found = "; ".join(wrong) or f"measured on {p.measured_on} ({p.how})"
        yield Finding(
            what=f"calibration of {tables.kind}",
            verdict="note" if wrong else "ok",
            found=found,
            hint=ANEW if wrong else "",
        )
    measured = {t.provenance.device for t in calibration.kinds}
    missing = sorted(set(now.devices) - measured)
    if missing:
        yield Finding(
            what="calibration",
            verdict="note",
            found=f"not of {', '.join(missing)}, which this machine has",
            hint="hexctl profile measures them",
        )


def _wrong(t: KindTables, now: MachineFacts) -> Iterator[str]:
    p = t.provenance
    age = _age_days(p.measured_on, now.today)
    if age is None:
        yield "without a date"
    elif age > OLD_DAYS:
        yield f"{age} days old"
    elif age < 0:
        yield f"dated {p.measured_on}, which is to come"
    card = p.how == "measured" and p.device not in ("", "CPU")
    if card and now.devices and p.device not in now.devices:
        yield f"of {p.device}, which this machine does not have"
        return  # then driver and torch are another machine's too
    if p.host and p.host != now.host:
        yield f"of another machine ({p.host})"
        return
    if card and p.driver and now.driver and p.driver != now.driver:
        yield f"with driver {p.driver}, now {now.driver}"
    if p.torch and now.torch and p.torch != now.torch:
        yield f"with torch {p.torch}, now {now.torch}"


def _age_days(text: str, today: date) -> int | None:
    try:
        return (today - date.fromisoformat(text)).days
    except ValueError:
        return None
