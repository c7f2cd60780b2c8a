"""Rollout MILP: replicas on the devices D_I for a given trainer.

Columns are configurations psi = (devices, TP, PP, rate h); y_psi replicas of each and x_psi samples they generate.
As published it is bilinear (x len <= Theta y h); at a fixed period it is linear: maximise the samples generated in the
period. The period is then lowered to the root of the plan found, until no plan does more just below it (Dinkelbach's iteration; the
work a plan does never falls with the period, so that is the optimum).

Replicas inside machines share nothing but their machine, so each type of machine is a knapsack of its own, solved by
a table over its devices; the MILP is for replicas that span machines.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pulp

from planner import solvers
from planner.cluster import Link
from planner.cost.decode import ReplicaShape
from planner.cost.memory import replica_resident_bytes
from planner.cost.model import CostModel
from planner.cost.network import Place
from planner.cost.step import Group, Offer, solve_period
from planner.knapsack import fill
from planner.placing import ReplicaLayout
from planner.record import record
from planner.space import DeviceClass, replica_shapes

_ROUNDS = 12
_BELOW = 1 - 1e-9


@record
class _NodeType:
    """Machines that are alike to a replica: same kind, same free devices, same way to the trainer."""

    kind: str
    size: int
    link: Link
    classes: tuple[int, ...]
    must: int  # devices of it that must be used (then it is one class)
    levels: tuple[
        tuple[float, int], ...
    ]  # (bytes that other tasks hold, devices on which they hold no more), ascending


@record
class _Column:
    """A configuration on a node type, or on all types of a kind where it spans machines."""

    shape: ReplicaShape
    offers: tuple[Offer, ...]
    types: tuple[int, ...]
    level: int = 0


@record
class Rollout:
    """The replicas chosen."""

    replicas: tuple[ReplicaLayout, ...]
    period_s: float


def best_rollout(
    cost: CostModel,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    *,
    trainer: tuple[Place, ...],
    train_s: float,
    mip_seconds: float,
    shared: Sequence[Sequence[tuple[float, int]]] = (),
    most_resident_bytes: Mapping[str, float] | None = None,
) -> Rollout | None:
    """The replicas on `counts` devices of each class that give the shortest period beside that trainer.

    `shared`: by class, for each group of other tasks in the order of what their models hold, (bytes held on a device,
    devices that replicas may share with it); without it, replicas are on free devices only. Replicas that share may
    themselves hold `most_resident_bytes` by kind, KV apart.
    """
    most = most_resident_bytes or {}
    types = _types(cost, classes, counts, trainer, shared)
    columns = [
        c
        for c in _columns(cost, classes, types)
        if not c.level
        or replica_resident_bytes(cost.context, c.shape.tp, c.shape.pp) <= most.get(c.shape.kind, float("inf"))
    ]
    if not columns:
        return None
    period = float("inf")
    best: list[int] | None = None
    for _ in range(_ROUNDS):
        # Just below the period: there only a plan that is truly faster does the work. At the period itself another may
        # give more because it has just become admissible.
        values = [_value(cost, c, period * _BELOW, train_s) for c in columns]
        chosen = _chosen(types, columns, values, mip_seconds)
        if chosen is None or not any(chosen):
            break
        parts = _groups(types, columns, chosen)
        solved = solve_period(train_s, [g for _, g in parts], cost.rules)
        if solved is None or solved[0] >= period * (1 - 1e-9):
            break
        period = solved[0]
        # A replica that may not run at the period is left out, unless an operator wants its devices in use.
        best = [0] * len(columns)
        for (i, g), offer in zip(parts, solved[1], strict=True):
            best[i] += g.count if offer is not None else 0
        if period <= train_s * (1 + 1e-12):
            break
    if best is None or not any(best):
        return None
    return Rollout(replicas=_assign(types, columns, best, counts), period_s=period)


def _groups(types: list[_NodeType], columns: list[_Column], chosen: list[int]) -> list[tuple[int, Group]]:
    """The chosen replicas by column; those that hold devices pinned to rollout are mandatory."""
    out: list[tuple[int, Group]] = []
    for i, (c, n) in enumerate(zip(columns, chosen, strict=True)):
        must = sum(types[t].must for t in c.types)
        forced = min(n, must) if c.shape.devices == 1 else (n if must else 0)
        for count, mandatory in ((forced, True), (n - forced, False)):
            if count:
                out.append((i, Group(offers=c.offers, count=count, mandatory=mandatory)))
    return out


def _types(
    cost: CostModel,
    classes: Sequence[DeviceClass],
    counts: Sequence[int],
    trainer: tuple[Place, ...],
    shared: Sequence[Sequence[tuple[float, int]]] = (),
) -> list[_NodeType]:
    found: dict[tuple[str, tuple[tuple[float, int], ...], Link, int], list[int]] = {}
    # Weights may be passed on by replicas on any of these machines.
    links = cost.widest_links(trainer, [c.place for c in classes])
    for i, c in enumerate(classes):
        levels = _levels(counts[i], shared[i] if shared else ())
        if levels[-1][1] > 0:
            link = links[c.place]
            alone = i if c.must_roll else -1
            found.setdefault((c.place.kind, levels, link, alone), []).append(i)
    return [
        _NodeType(
            kind=kind,
            size=levels[-1][1],
            link=link,
            classes=tuple(ix),
            must=len(classes[alone].must_roll) if alone >= 0 else 0,
            levels=levels,
        )
        for (kind, levels, link, alone), ix in found.items()
    ]


def _levels(free: int, shared: Sequence[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    out = [(0.0, free)]
    for held, devices in shared:
        out.append((max(held, out[-1][0]), out[-1][1] + devices))
    return tuple(out)


def _columns(cost: CostModel, classes: Sequence[DeviceClass], types: list[_NodeType]) -> list[_Column]:
    out: list[_Column] = []
    for kind in dict.fromkeys(t.kind for t in types):
        mine = [j for j, t in enumerate(types) if t.kind == kind]
        for shape in replica_shapes(cost, classes, kind):
            if shape.pp > 1:
                slowest = min((types[j].link for j in mine), key=lambda link: link.bytes_per_s)
                held = max(types[j].levels[-1][0] for j in mine)
                offers = cost.offers(shape, slowest, held)
                if offers:
                    top = len(types[mine[0]].levels) - 1
                    out.append(_Column(shape=shape, offers=offers, types=tuple(mine), level=top))
                continue
            for j in mine:
                for level, (held, devices) in enumerate(types[j].levels):
                    before = types[j].levels[level - 1][1] if level else 0
                    offers = cost.offers(shape, types[j].link, held) if max(before, shape.tp - 1) < devices else ()
                    if offers:
                        out.append(_Column(shape=shape, offers=offers, types=(j,), level=level))
    return out


def _value(cost: CostModel, column: _Column, period: float, train_s: float) -> float:
    """Tokens one replica gives in the period; for an endless period, its best rate."""
    if period == float("inf"):
        return max(o.level.rate_tokens_per_s for o in column.offers)
    offer = cost.rules.best(column.offers, period, train_s)
    return 0.0 if offer is None else cost.rules.given_tokens(offer, period, train_s)


def _chosen(
    types: list[_NodeType], columns: list[_Column], values: list[float], mip_seconds: float
) -> list[int] | None:
    """Replicas of each column that maximise the tokens given; None where pinned devices cannot all be used, or the solver
    has no answer in time."""
    if any(c.shape.pp > 1 for c in columns):
        return _milp(types, columns, values, mip_seconds)
    out = [0] * len(columns)
    for t, node in enumerate(types):
        mine = sorted(
            (i for i, c in enumerate(columns) if c.types == (t,)), key=lambda i: (columns[i].level, columns[i].shape.tp)
        )
        items = [(columns[i].level, columns[i].shape.tp, values[i]) for i in mine]
        one = fill(items, [n for _, n in node.levels], node.must)
        if one is None:
            return None
        for i, n in zip(mine, one, strict=True):
            out[i] = n * len(node.classes)
    return out


def _milp(types: list[_NodeType], columns: list[_Column], values: list[float], mip_seconds: float) -> list[int] | None:
    """`_chosen` where replicas span machines."""
    covered = [t for c in columns for t in c.types]
    if len(set(covered)) == len(covered):  # one configuration for each machine: nothing to choose
        return [sum(len(types[t].classes) * (types[t].size // c.shape.tp) for t in c.types) // c.shape.pp
                for c in columns]  # fmt: skip
    top = max(values)
    if top <= 0:
        return None
    problem = pulp.LpProblem("rollout", pulp.LpMaximize)
    y = [problem.add_variable(f"y{i}", lowBound=0, cat=pulp.LpInteger) for i in range(len(columns))]
    x = [problem.add_variable(f"x{i}", lowBound=0) for i in range(len(columns))]
    problem += pulp.lpSum(x)
    for i in range(len(columns)):
        problem += x[i] <= values[i] / top * y[i]
    chunks: dict[tuple[int, int], list[Any]] = {}
    for i, c in enumerate(columns):
        if c.shape.pp == 1:
            chunks.setdefault((c.types[0], c.shape.tp), []).append(y[i])
            continue
        z = [problem.add_variable(f"z{i}_{t}", lowBound=0, cat=pulp.LpInteger) for t in c.types]
        problem += pulp.lpSum(z) == c.shape.pp * y[i]
        for t, var in zip(c.types, z, strict=True):
            chunks.setdefault((t, c.shape.tp), []).append(var)
    degrees = sorted({tp for _, tp in chunks})
    for t, node in enumerate(types):
        mine = [(tp, v) for (u, tp), vs in chunks.items() if u == t for v in vs]
        # Powers of two pack greedily: enough room for the chunks of every size and above is enough room.
        for size in degrees:
            larger = [tp * v for tp, v in mine if tp >= size]
            if larger:
                problem += pulp.lpSum(larger) <= len(node.classes) * (node.size // size) * size
        if node.must:
            problem += pulp.lpSum(tp * v for tp, v in mine) >= node.must
    answer = solvers.run(problem, time_limit_s=mip_seconds)
    return [round(answer.values[v.name]) for v in y] if answer.values else None


def _assign(
    types: list[_NodeType], columns: list[_Column], chosen: list[int], counts: Sequence[int]
) -> tuple[ReplicaLayout, ...]:
    """Put replicas on classes, larger TP first, each chunk on the first machine of its type with room."""
    left = dict.fromkeys(range(len(counts)), 0)
    at_level = {i: t.levels for t in types for i in t.classes}
    out: list[ReplicaLayout] = []
    raised = -1
    ordered = sorted(zip(columns, chosen, strict=True), key=lambda p: (p[0].level, -p[0].shape.tp, -p[0].shape.pp))
    for c, n in ordered:
        while raised < c.level:  # devices that only replicas of this level may share come into play
            raised += 1
            for i, levels in at_level.items():
                if raised < len(levels):
                    left[i] += levels[raised][1] - (levels[raised - 1][1] if raised else 0)
        room = [i for t in c.types for i in types[t].classes]
        at = 0  # machines before it have no room left for this shape
        for _ in range(n):
            chunks: list[int] = []
            for _ in range(c.shape.pp):
                while at < len(room) and left[room[at]] < c.shape.tp:
                    at += 1
                if at == len(room):
                    break
                spot = room[at]
                left[spot] -= c.shape.tp
                chunks.append(spot)
            if len(chunks) == c.shape.pp:
                out.append(ReplicaLayout(shape=c.shape, chunks=tuple(chunks), level=c.level))
    return tuple(out)
