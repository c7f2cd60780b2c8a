"""From counts to devices: which devices of a class a trainer's chunks and the replicas take.

Devices of a class are interchangeable, so this choice never changes a score; it keeps roles and whole replicas of the
plan in force where it can.
"""

import itertools
from collections.abc import Mapping, Sequence

from planner.cost.decode import ReplicaShape
from planner.plan import Placement, Plan, Stage, Task
from planner.record import record
from planner.space import DeviceClass
from planner.workflow import TRAINING


@record
class StageLayout:
    """A training stage as chunks: for each of its `dp` groups the index of the class it lies in."""

    kind: str
    tp: int
    layers: int
    chunks: tuple[int, ...]
    token_shares: tuple[float, ...] = ()  # by group; () for equal shares


@record
class ReplicaLayout:
    """A replica as chunks: for each of its `pp` stages the index of the class its `tp` devices lie in."""

    shape: ReplicaShape
    chunks: tuple[int, ...]
    level: int = 0  # 0: on free devices only; n: also on devices of the first n stages, by what their models hold


@record
class GroupLayout:
    """A group of tasks: its stages."""

    tasks: tuple[Task, ...]
    stages: tuple[StageLayout, ...]


def materialise(
    classes: Sequence[DeviceClass],
    trainer: Sequence[StageLayout],
    replicas: Sequence[ReplicaLayout],
    in_force: Plan | None,
) -> Plan:
    """Hand out devices: first to the trainer, which runs all other tasks, then to replicas, larger TP first."""
    return materialise_groups(classes, (GroupLayout(tasks=(), stages=tuple(trainer)),), replicas, in_force)


def materialise_groups(
    classes: Sequence[DeviceClass],
    groups: Sequence[GroupLayout],
    replicas: Sequence[ReplicaLayout],
    in_force: Plan | None,
    levels: Sequence[tuple[int, int]] = (),
) -> Plan:
    """Hand out devices: first to the groups, the actor's trainer first, then to replicas, larger TP first.

    A replica of level n may take devices of the first n stages of `levels`, each a group and a stage of it by position;
    of the first n groups where there are none.
    """
    shared = levels or [(g, s) for g, group in enumerate(groups) for s in range(len(group.stages))]
    upto = list(itertools.accumulate([1] * len(levels) or [len(g.stages) for g in groups]))
    kept = _kept_replicas(in_force)
    train_free, roll_free = {}, {}
    for i, c in enumerate(classes):
        train_free[i] = [*c.must_train, *_ordered(c.free, in_force, "train")]
        roll_free[i] = c.must_roll
    taken: dict[tuple[int, int], dict[int, list[str]]] = {}  # by stage and class, for replicas that share
    sides: list[Placement] = []
    for g, group in enumerate(groups):
        stages = []
        for at, s in enumerate(group.stages):
            devices: list[str] = []
            mine = taken.setdefault((g, at), {})
            for i in s.chunks:
                chunk = [train_free[i].pop(0) for _ in range(s.tp)]
                mine.setdefault(i, []).extend(chunk)
                devices += chunk
            stages.append(
                Stage(
                    devices=tuple(devices),
                    kind=s.kind,
                    dp=len(s.chunks),
                    tp=s.tp,
                    layers=s.layers,
                    token_shares=s.token_shares,
                )
            )
        sides.append(_side(group.tasks, stages))
    pools = {i: [*roll_free[i], *_ordered(tuple(train_free[i]), in_force, "rollout")] for i in roll_free}
    for i, c in enumerate(classes):
        pools[i] = [d for d in pools[i] if d not in c.must_train]
    rollouts = []
    for level in range(max((r.level for r in replicas), default=0) + 1):
        for stage in shared[upto[level - 2] if level > 1 else 0 : upto[level - 1]] if level else ():
            for i in pools:
                pools[i] += taken[stage].get(i, [])
        rollouts += [_replica(r, pools, kept) for r in sorted(replicas, key=lambda r: -r.shape.tp) if r.level == level]
    return Plan(placements=(*sides, *sorted(rollouts, key=lambda p: p.devices)))


def _side(tasks: tuple[Task, ...], stages: Sequence[Stage]) -> Placement:
    first = stages[0]
    return Placement(
        role="train" if not tasks or set(tasks) & set(TRAINING) else "score",
        kind="+".join(dict.fromkeys(s.kind for s in stages)),
        devices=tuple(d for s in stages for d in s.devices),
        tp=first.tp,
        dp=first.dp,
        pp=len(stages),
        tasks=tasks,
        stages=tuple(stages),
    )


def _ordered(devices: tuple[str, ...], in_force: Plan | None, role: str) -> list[str]:
    """Devices that have the role now come first, idle ones next."""
    if in_force is None:
        return list(devices)
    rank = {role: 0, "idle": 1}
    return sorted(devices, key=lambda d: rank.get(in_force.role_of(d), 2))


def _kept_replicas(in_force: Plan | None) -> Mapping[str, tuple[str, ...]]:
    """Each device of a replica in force with the whole replica, one-machine replicas only."""
    if in_force is None:
        return {}
    return {d: p.devices for p in in_force.rollouts if p.pp == 1 for d in p.devices}


def _replica(r: ReplicaLayout, pools: dict[int, list[str]], kept: Mapping[str, tuple[str, ...]]) -> Placement:
    devices: list[str] = []
    for i in r.chunks:
        pool = pools[i]
        whole = next(
            (kept[d] for d in pool if d in kept and len(kept[d]) == r.shape.tp and set(kept[d]) <= set(pool)), None
        )
        chosen = list(whole) if whole and r.shape.pp == 1 else pool[: r.shape.tp]
        pools[i] = [d for d in pool if d not in chosen]
        devices += chosen
    return Placement(role="rollout", kind=r.shape.kind, devices=tuple(devices), tp=r.shape.tp, pp=r.shape.pp)
