"""From counts to devices: which devices of a class a trainer's chunks and the replicas take.

Devices of a class are interchangeable, so this choice never changes a score; it keeps roles and whole replicas of the
plan in force where it can.
"""

from collections.abc import Mapping, Sequence

from planner.cost.decode import ReplicaShape
from planner.plan import Placement, Plan, Stage
from planner.record import record
from planner.space import DeviceClass


@record
class StageLayout:
    """A training stage as chunks: for each of its `dp` groups the index of the class it lies in."""

    kind: str
    tp: int
    layers: int
    chunks: tuple[int, ...]


@record
class ReplicaLayout:
    """A replica as chunks: for each of its `pp` stages the index of the class its `tp` devices lie in."""

    shape: ReplicaShape
    chunks: tuple[int, ...]


def materialise(
    classes: Sequence[DeviceClass],
    trainer: Sequence[StageLayout],
    replicas: Sequence[ReplicaLayout],
    in_force: Plan | None,
) -> Plan:
    """Hand out devices: first to the trainer, then to replicas, larger TP first."""
    kept = _kept_replicas(in_force)
    train_free, roll_free = {}, {}
    for i, c in enumerate(classes):
        train_free[i] = [*c.must_train, *_ordered(c.free, in_force, "train")]
        roll_free[i] = c.must_roll
    stages: list[Stage] = []
    for s in trainer:
        devices: list[str] = []
        for i in s.chunks:
            devices += [train_free[i].pop(0) for _ in range(s.tp)]
        stages.append(Stage(devices=tuple(devices), kind=s.kind, dp=len(s.chunks), tp=s.tp, layers=s.layers))
    pools = {i: [*roll_free[i], *_ordered(tuple(train_free[i]), in_force, "rollout")] for i in roll_free}
    for i, c in enumerate(classes):
        pools[i] = [d for d in pools[i] if d not in c.must_train]
    rollouts = [_replica(r, pools, kept) for r in sorted(replicas, key=lambda r: -r.shape.tp)]
    first = stages[0]
    train = Placement(
        role="train",
        kind="+".join(dict.fromkeys(s.kind for s in stages)),
        devices=tuple(d for s in stages for d in s.devices),
        tp=first.tp,
        dp=first.dp,
        pp=len(stages),
        stages=tuple(stages),
    )
    return Plan(placements=(train, *sorted(rollouts, key=lambda p: p.devices)))


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
