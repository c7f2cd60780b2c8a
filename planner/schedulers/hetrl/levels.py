"""Levels 1 and 2: how tasks are grouped, and how many GPUs each group gets.

Generation is a group of its own; in sync modes, where the executor can co-locate, it may also run on the devices of some
group of other tasks. Device counts are multiples of a machine on fleets too large to try every count; `evolution` refines them.
"""

import itertools
from collections.abc import Sequence

from planner.plan import Task
from planner.problem import Problem
from planner.record import record
from planner.space import DeviceClass
from planner.workflow import groupings, side_tasks

_SMALL = 8  # devices up to which every count is an arm
_MOST = 256  # arms of one task grouping

Groups = tuple[tuple[Task, ...], ...]


@record
class TaskGrouping:
    """An arm of level 1. `shared`: the groups whose devices generation uses too."""

    groups: Groups
    shared: tuple[int, ...] = ()


def task_groupings(problem: Problem) -> tuple[TaskGrouping, ...]:
    """All arms of level 1: 16 for PPO in at most two groups besides generation, and with co-location as many times the
    sets of groups that generation may join."""
    caps = problem.capabilities
    shares = caps.colocate and problem.workload.synchronous
    out: list[TaskGrouping] = []
    for groups in groupings(side_tasks(problem.workload), caps.task_groups):
        joins: list[tuple[int, ...]] = [()]
        if shares:
            joins += [(g,) for g in range(len(groups))]
            joins += [tuple(range(len(groups)))] if len(groups) > 1 else []
        out += [TaskGrouping(groups=groups, shared=s) for s in joins]
    return tuple(out)


def gpu_groupings(
    problem: Problem, classes: Sequence[DeviceClass], grouping: TaskGrouping
) -> tuple[tuple[int, ...], ...]:
    """All arms of level 2 below one task grouping: devices of every group but generation, which gets the others."""
    total = sum(c.size for c in classes)
    groups = len(grouping.groups)
    most = total if grouping.shared else total - 1
    each = min(most - groups + 1, problem.capabilities.train_max_devices or most)
    if each < 1:
        return ()
    unit = 1 if total <= _SMALL else max(c.size for c in classes)
    while unit > 1 and (unit > each or unit * groups > most):
        unit //= 2
    while True:
        steps = sorted({*range(unit, each + 1, unit), *((each,) if each < unit else ())})
        if grouping.shared and each == total and each not in steps:
            steps.append(each)
        if len(steps) ** groups <= 4 * _MOST or unit >= each:
            break
        unit *= 2
    found = [c for c in itertools.product(steps, repeat=groups) if sum(c) <= most]
    return tuple(found[i * len(found) // min(_MOST, len(found))] for i in range(min(_MOST, len(found))))
