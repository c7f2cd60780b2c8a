"""Changes of a fleet over time, read from `t_s,capacity` or `t_s,event,node[,factor]` tables."""

import csv
import math
from collections.abc import Iterable, Sequence
from typing import Literal

from planner.errors import InvalidInput
from planner.record import record

Event = Literal["add", "remove", "slow"]
_FORMS = 't_s,capacity or t_s,event,node (events "add", "remove", "slow" with a column factor)'
NAMES_SHOWN = 12  # machines of the fleet that an error names


@record
class Change:
    """Machines come, go, or run at another speed from `at_s` on."""

    at_s: float
    event: Event
    nodes: tuple[str, ...]
    factor: float = 1.0  # slow: times as long as before; 1 is its own speed again


def read_changes(text: str, nodes: Sequence[str], *, where: str = "trace") -> tuple[Change, ...]:
    """The changes that a table says, in order of time, for a fleet of these machines.

    A capacity is a number of machines, the first ones of the fleet. Machines of an event table that the fleet has keep
    their names; others take the place of machines nobody named, in the order in which they come, and give it back when
    they go. Machines of the fleet that a table of events adds are away until then. InvalidInput for a table in no known
    form or one that wants more machines than there are.
    """
    rows = list(csv.DictReader(line for line in text.splitlines() if not line.startswith("#")))
    names = set(rows[0]) if rows else set()
    if {"t_s", "capacity"} <= names:
        return _from_capacity(rows, nodes, where)
    if {"t_s", "event", "node"} <= names:
        return _from_events(rows, nodes, where)
    raise InvalidInput(
        "not a churn trace", where=where, got=",".join(sorted(map(str, names))) or "nothing", expected=_FORMS
    )


def _number(row: dict[str, str], key: str, where: str) -> float:
    try:
        value = float(row[key])
    except (TypeError, ValueError):
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise InvalidInput("not a number of 0 or more", where=f"{where}, column {key}", got=row.get(key))
    return value


def _from_capacity(rows: Iterable[dict[str, str]], nodes: Sequence[str], where: str) -> tuple[Change, ...]:
    out: list[Change] = []
    now = len(nodes)
    for row in rows:
        at_s, capacity = _number(row, "t_s", where), _number(row, "capacity", where)
        wanted = int(capacity)
        if wanted != capacity:
            raise InvalidInput("not a whole number of machines", where=f"{where}, column capacity", got=row["capacity"])
        if wanted > len(nodes):
            raise _too_many(where, wanted, nodes)
        if wanted < now:
            out.append(Change(at_s=at_s, event="remove", nodes=tuple(nodes[wanted:now])))
        elif wanted > now:
            out.append(Change(at_s=at_s, event="add", nodes=tuple(nodes[now:wanted])))
        now = wanted
    return tuple(sorted(out, key=lambda c: c.at_s))


def _from_events(rows: Iterable[dict[str, str]], nodes: Sequence[str], where: str) -> tuple[Change, ...]:
    ordered = sorted(rows, key=lambda r: _number(r, "t_s", where))
    named = {r["node"] for r in ordered}
    free = [n for n in nodes if n not in named]
    place: dict[str, str] = {}
    first = {r["node"]: r["event"] for r in reversed(ordered)}
    away = tuple(n for n in nodes if first.get(n) == "add" or (n in free and first.keys() - set(nodes)))
    out = [Change(at_s=0.0, event="remove", nodes=away)] if away else []
    for r in ordered:
        event, node, at_s = r["event"], r["node"], _number(r, "t_s", where)
        if not node:
            raise InvalidInput("an event without a machine", where=f"{where}, t_s {r['t_s']}", expected="a node")
        if event not in ("add", "remove", "slow"):
            raise InvalidInput("unknown event", where=where, got=event, expected="add, remove or slow")
        if node not in nodes and node not in place:
            if event != "add":
                raise _foreign(where, r, nodes)
            if not free:
                raise _too_many(where, len(nodes) + 1, nodes)
            place[node] = free.pop(0)
        factor = _number(r, "factor", where) if event == "slow" else 1.0
        if factor == 0:
            raise InvalidInput(
                "a machine takes no time at all", where=f"{where}, column factor", got=r["factor"],
                expected="times as long as before, more than 0",
            )  # fmt: skip
        out.append(Change(at_s=at_s, event=event, nodes=(place.get(node, node),), factor=factor))  # type: ignore[arg-type]
        if event == "remove" and node in place:
            free.insert(0, place.pop(node))
    return merged(out)


def merged(changes: Iterable[Change]) -> tuple[Change, ...]:
    """Changes of one moment and kind as one, in order of time."""
    out: list[Change] = []
    for c in changes:
        last = out[-1] if out else None
        if last is not None and (last.at_s, last.event, last.factor) == (c.at_s, c.event, c.factor):
            out[-1] = Change(at_s=c.at_s, event=c.event, nodes=(*last.nodes, *c.nodes), factor=c.factor)
        else:
            out.append(c)
    return tuple(out)


def _foreign(where: str, row: dict[str, str], nodes: Sequence[str]) -> InvalidInput:
    """A machine goes or slows down that the fleet does not have and that no event has added."""
    told = ", ".join(nodes[:NAMES_SHOWN]) + (
        f" and {len(nodes) - NAMES_SHOWN} more" if len(nodes) > NAMES_SHOWN else ""
    )
    return InvalidInput(
        f"a machine {'goes' if row['event'] == 'remove' else 'slows down'} that this fleet does not have and no event added",
        where=f"{where}, t_s {row['t_s']}",
        got=row["node"],
        expected=f"one of {told}",
        hint="the trace belongs to another fleet: simulate that one, or write the names of this fleet's machines into it",
    )


def _too_many(where: str, wanted: int, nodes: Sequence[str]) -> InvalidInput:
    return InvalidInput(
        "the trace has more machines than the fleet",
        where=where,
        got=f"{wanted} machines at once",
        expected=f"at most {len(nodes)}",
        hint="declare more [[fleet.devices]], each machine with its own node",
    )
