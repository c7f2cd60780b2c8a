"""The profile of the machine it runs on, as work for `runtime.backends.ray.per_node` and for the command itself."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from planner.calibration import Calibration, decode, encode
from planner.record import record
from runtime.profile.agenda import Order, agenda
from runtime.profile.find import this_machine
from runtime.profile.measure import Measured, Progress, measure


@record
class Told:
    """What a node says while it measures."""

    progress: Progress


def run(argument: Mapping[str, Any], say: Callable[[object], None], should_stop: Callable[[], bool]) -> str:
    """Measure this machine; JSON for `measured_of`."""
    order = Order(quick=bool(argument["quick"]), only=tuple(argument["only"]))
    machine = this_machine()
    if argument.get("dry_run"):
        items = agenda(machine, order)
        return json.dumps(
            {"host": machine.host, "items": [dataclasses.asdict(i) for i in items], "notes": machine.notes}
        )
    done = measure(
        machine,
        order,
        config=None,
        today=str(argument["today"]),
        on_progress=lambda p: say(Told(progress=p)),
        should_stop=should_stop,
    )
    return measured_text(done)


def measured_text(done: Measured) -> str:
    """What a machine showed, as JSON text."""
    calibration = encode(Calibration(kinds=done.tables))
    return json.dumps(
        {"host": done.host, "calibration": calibration, "notes": list(done.notes), "seconds": done.seconds}
    )


def measured_of(text: str) -> Measured:
    """The inverse of `measured_text`."""
    raw = json.loads(text)
    tables = decode(raw["calibration"], where=f"the answer of {raw['host']}").kinds
    return Measured(host=raw["host"], tables=tables, notes=tuple(raw["notes"]), seconds=raw["seconds"])
