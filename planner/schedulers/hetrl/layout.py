"""From classes to devices: groups of tasks and replicas as seats on device classes become a plan.

A *seat* is one device of a class as a replica sees it: of its own, or shared with one stage of a group of tasks
(co-location). Devices of a class are interchangeable, so which one is taken never changes a score.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from planner.cost.decode import ReplicaShape
from planner.placing import StageLayout
from planner.plan import Placement, PlacementRole, Plan, Stage, Task
from planner.record import record
from planner.space import DeviceClass
from planner.workflow import TRAINING


class Seat(NamedTuple):
    """A device of class `at`; `group` and `stage` where it is shared, -1 for a device of generation's own."""

    at: int
    group: int = -1
    stage: int = -1


@record
class GroupLayout:
    """A group of tasks on classes: its stages, each as chunks (the class of every one of its `dp` TP groups)."""

    tasks: tuple[Task, ...]
    stages: tuple[StageLayout, ...]

    @property
    def trains(self) -> bool:
        """Whether it changes weights, hence has the role "train"."""
        return bool(set(self.tasks) & set(TRAINING))

    def used(self, classes: int) -> tuple[int, ...]:
        """Devices by class."""
        out = [0] * classes
        for s in self.stages:
            for i in s.chunks:
                out[i] += s.tp
        return tuple(out)


@record
class SeatedReplica:
    """A replica on its seats, TP group by TP group."""

    shape: ReplicaShape
    seats: tuple[Seat, ...]


def role_of(tasks: Sequence[Task]) -> PlacementRole:
    """The role of a group of tasks."""
    return "train" if set(tasks) & set(TRAINING) else "score"


def plan_of(
    classes: Sequence[DeviceClass],
    groups: Sequence[GroupLayout],
    replicas: Sequence[SeatedReplica],
    in_force: Plan | None,
) -> Plan:
    """Hand out devices. Groups that train take pinned devices first; devices keep their role of the plan in force where
    they can."""
    free = {i: _ordered(c.free, in_force, "train") for i, c in enumerate(classes)}
    pinned = {i: list(c.must_train) for i, c in enumerate(classes)}
    pools: dict[Seat, list[str]] = {}
    staged: dict[tuple[int, int], tuple[str, ...]] = {}
    for g in sorted(range(len(groups)), key=lambda g: not groups[g].trains):
        for k, s in enumerate(groups[g].stages):
            mine: list[str] = []
            for i in s.chunks:
                chunk = [_take(pinned[i] if groups[g].trains else [], free[i]) for _ in range(s.tp)]
                pools.setdefault(Seat(at=i, group=g, stage=k), []).extend(chunk)
                mine += chunk
            staged[g, k] = tuple(mine)
    for i, c in enumerate(classes):
        pools[Seat(at=i)] = [*c.must_roll, *_ordered(tuple(free[i]), in_force, "rollout")]
    rollouts = [_replica(r, pools) for r in replicas]
    sides = [_side(g, [staged[n, k] for k in range(len(g.stages))]) for n, g in enumerate(groups)]
    return Plan(placements=(*sides, *sorted(rollouts, key=lambda p: p.devices)))


def _take(first: list[str], then: list[str]) -> str:
    return first.pop(0) if first else then.pop(0)


def _replica(r: SeatedReplica, pools: dict[Seat, list[str]]) -> Placement:
    devices = tuple(pools[s].pop(0) for s in r.seats)
    return Placement(role="rollout", kind=r.shape.kind, devices=devices, tp=r.shape.tp, pp=r.shape.pp)


def _side(g: GroupLayout, devices: Sequence[tuple[str, ...]]) -> Placement:
    stages = tuple(
        Stage(devices=d, kind=s.kind, dp=len(s.chunks), tp=s.tp, layers=s.layers)
        for s, d in zip(g.stages, devices, strict=True)
    )
    return Placement(
        role=role_of(g.tasks),
        kind="+".join(dict.fromkeys(s.kind for s in stages)),
        devices=tuple(itertools.chain(*devices)),
        tp=stages[0].tp,
        dp=stages[0].dp,
        pp=len(stages),
        tasks=g.tasks,
        stages=stages,
    )


def _ordered(devices: tuple[str, ...], in_force: Plan | None, role: str) -> list[str]:
    """Devices that have the role now come first, idle ones next."""
    if in_force is None:
        return list(devices)
    rank = {role: 0, "idle": 1}
    return sorted(devices, key=lambda d: rank.get(in_force.role_of(d), 2))
