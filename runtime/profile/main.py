"""`python -m runtime.profile`: measure this machine, or every node of the cluster in HEXCTL_RAY_ADDRESS, write the file.

Progress goes to stderr, one JSON document to stdout. The command line starts this module as a child, so that neither torch
nor Ray is imported there.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.calibration import Calibration, encode
from planner.cluster import Cluster, Device, whole_of
from planner.errors import HexError
from planner.model import load_model_spec
from runtime.backends.ray.cluster import ADDRESS_VARIABLE
from runtime.cards import divided
from runtime.config.calibration import load_calibration
from runtime.config.load import load_config
from runtime.config.problem import DEFAULT_LINK, HOST_CPU, engine_name, kind_from_config, problem_from_config
from runtime.config.schema import Config
from runtime.errors import DeadlineError, RunError
from runtime.profile.agenda import Machine, Order, OwnRun, agenda, limit_s
from runtime.profile.cluster import GRACE_S, NodeOutcome, profile_cluster
from runtime.profile.find import this_machine
from runtime.profile.measure import Progress, measure
from runtime.profile.summary import kind_summary, merged_tables


class Interrupt:
    """Ctrl-C and SIGTERM ask to stop; a second one ends at once."""

    def __init__(self) -> None:
        self._asked = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if self._asked.is_set():
            os._exit(130)
        self._asked.set()
        os.write(2, b"\nstopping: what is under way ends first; once more ends at once\n")

    def __call__(self) -> bool:
        return self._asked.is_set()


class Teller:
    """Progress for people: on a terminal one line that changes, elsewhere a line an item."""

    def __init__(self) -> None:
        self._nodes: dict[str, Progress] = {}
        self.last = ""

    def __call__(self, node: str, p: Progress) -> None:
        """One node got further."""
        if self._nodes.get(node) == p or not p.what:
            self._nodes[node] = p
            return
        self._nodes[node] = p
        left_s = max(x.left_s for x in self._nodes.values())
        text = f"{node}: {p.done + 1} of {p.of}, {p.what}, about {left_s:.0f} s left"
        if sys.stderr.isatty():
            sys.stderr.write(f"\r\x1b[K{text}")
        elif text != self.last:
            sys.stderr.write(text + "\n")
        self.last = text
        sys.stderr.flush()

    def done(self) -> None:
        """Leave the line."""
        if self.last and sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; argparse ends with 2 when it does not decode."""
    p = argparse.ArgumentParser(prog="python -m runtime.profile", description="hexctl's profile of machines")
    p.add_argument("--config", type=Path, help="configuration whose paced kinds are measured")
    p.add_argument("--cpu", action="store_true", help="the CPU beside the paced kinds too")
    p.add_argument("--quick", action="store_true", help="fewer points, less time for each")
    p.add_argument("--dry-run", action="store_true", help="only say what would be measured")
    p.add_argument("--only", action="append", default=[], help="only this part; may be repeated")
    p.add_argument("--out", type=Path, help="calibration file to write; what it has of other kinds stays")
    return p.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run; returns the exit code of the command line."""
    given = parse(argv)
    stop, tell = Interrupt(), Teller()
    try:
        document = _profile(given, stop, tell)
    except HexError as e:
        tell.done()
        sys.stderr.write(f"error: {e}\n")
        return e.exit_code if isinstance(e, RunError) else 2
    except KeyboardInterrupt:
        tell.done()
        sys.stderr.write("interrupted: nothing was written\n")
        return 130
    tell.done()
    sys.stdout.write(json.dumps(document) + "\n")
    return 0 if given.dry_run or document["kinds"] else 1


def _profile(given: argparse.Namespace, stop: Interrupt, tell: Teller) -> Mapping[str, Any]:
    config = load_config(given.config).config if given.config is not None else None
    paced = _paced_kinds(config)
    run = None if paced or config is None else _own_run(config)
    order = Order(quick=given.quick, paced=paced, cpu=given.cpu or not paced, only=tuple(given.only), run=run)
    today = datetime.now(UTC).date().isoformat()
    address = os.environ.get(ADDRESS_VARIABLE)
    if address and not paced and run is None:
        outcomes = profile_cluster(
            address, order, today=today, dry_run=given.dry_run, on_progress=tell, should_stop=stop
        )
    else:
        folder = None if given.out is None or given.dry_run else _made(given.out.parent)
        outcomes = (_here(order, config, today, given.dry_run, stop, tell, folder),)
    measured = tuple(o.measured for o in outcomes if o.measured is not None)
    fresh, notes = merged_tables(measured)
    if given.out is not None and fresh.kinds and not given.dry_run:
        _write(given.out, fresh)
    return {
        "file": str(given.out) if given.out is not None and fresh.kinds else None,
        "dry_run": given.dry_run,
        "nodes": [_node_document(o) for o in outcomes],
        "kinds": [kind_summary(t) for t in fresh.kinds],
        "notes": list(notes),
        "met": [] if run is None or config is None else _met(config, fresh),
    }


def _own_run(config: Config) -> OwnRun | None:
    """What of a configuration is measured; None for one that is for planning only."""
    if config.model.source == "shape" or config.fleet.source in ("declared", "simulated"):
        return None
    spec = load_model_spec(config.model.path)
    kinds = [d.kind for d in config.fleet.devices] or [HOST_CPU]
    return OwnRun(
        model=spec.name,
        engine=engine_name(config),
        params=float(spec.params),
        cpu_kind=kinds[0],
        parts=config.fleet.gpu_parts,
    )


def _met(config: Config, fresh: Calibration) -> list[Mapping[str, Any]]:
    """The rates of the run's own model beside what a plan says of them, once it counts with the calibration."""
    from planner.reached import met

    out: list[Mapping[str, Any]] = []
    link = DEFAULT_LINK
    for tables in fresh.kinds:
        name, parts = whole_of(tables.kind)
        device = Device(id="d", kind=name, node="n")
        card = Cluster(kinds={name: kind_from_config(config, name)}, devices=(device,), same_kind=link, cross_kind=link)
        cluster = divided(card, parts)
        problem = problem_from_config(config, cluster, load_model_spec(config.model.path), calibration=fresh)
        found = met(problem, problem.cluster.kinds[tables.kind], tables, engine_name(config))
        out += [{"kind": tables.kind, **dataclasses.asdict(m)} for m in found]
    return out


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RunError("cannot make the folder of the calibration", where=str(folder), got=e.strerror) from e
    return folder


def _paced_kinds(config: Config | None) -> tuple[str, ...]:
    if config is None or config.fleet.pacing is None or config.fleet.source not in ("paced", "auto"):
        return ()
    return tuple(dict.fromkeys(d.kind for d in config.fleet.devices))


def _here(  # noqa: PLR0917 - the parts of one call
    order: Order,
    config: Config | None,
    today: str,
    dry_run: bool,
    stop: Interrupt,
    tell: Teller,
    folder: Path | None,
) -> NodeOutcome:
    on_cpu = order.paced or (config is not None and config.fleet.source == "cpu")
    machine: Machine = this_machine(gpus=not on_cpu)
    if dry_run:
        items = tuple(dataclasses.asdict(i) for i in agenda(machine, order))
        return NodeOutcome(node=machine.host, measured=None, items=items)
    until_s = limit_s(agenda(machine, order), order)
    until_s += max(GRACE_S, until_s / 2)  # what a large model takes is known roughly
    watchdog = threading.Timer(until_s, _give_up, (tell, until_s))  # a kernel that hangs cannot be interrupted
    watchdog.daemon = True
    watchdog.start()
    try:
        done = measure(
            machine,
            order,
            config=config,
            today=today,
            folder=folder,
            on_progress=lambda p: tell(machine.host, p),
            should_stop=stop,
        )
    finally:
        watchdog.cancel()
    return NodeOutcome(node=machine.host, measured=done)


def _give_up(tell: Teller, until_s: float) -> None:
    """End a profile that does not."""
    tell.done()
    sys.stderr.write(f"error: not done within {until_s:.0f} s; last: {tell.last}\n")
    sys.stderr.flush()
    os._exit(DeadlineError.exit_code)


def _node_document(o: NodeOutcome) -> Mapping[str, Any]:
    items = [{"what": i["what"], "kind": i["kind"], "part": i["part"], "seconds": i["seconds"]} for i in o.items]
    return {
        "node": o.node,
        "failure": o.failure,
        "notes": list(o.measured.notes) if o.measured is not None else [],
        "seconds": o.measured.seconds if o.measured is not None else None,
        "kinds": [t.kind for t in o.measured.tables] if o.measured is not None else [],
        "items": items,
        "expected_s": sum(i["seconds"] for i in items),
    }


def _write(path: Path, fresh: Calibration) -> None:
    """The file with the fresh kinds in it, beside what they lack and it has; whole or not at all. RunError when it cannot be."""
    kept = load_calibration(path) if path.exists() else Calibration()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
        added = tuple(t if (old := kept.of(t.kind)) is None else t.beside(old) for t in fresh.kinds)
        temporary.write_text(encode(kept.merged(Calibration(kinds=added))))
        temporary.replace(path)
    except OSError as e:
        raise RunError("cannot write the calibration", where=str(path), got=e.strerror) from e
