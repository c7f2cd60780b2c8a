"""The oracle for tiny clusters: every valid plan, told valid by the judge alone, scored by the cost model.

It shares nothing with the other schedulers but the cost model and the definition of the plan space (shapes, layer split): roles are given
device by device, groups of tasks are enumerated over ordered selections of devices, replicas over set partitions. Relabelled
copies of a plan are scored once. Concurrency is chosen by the cost model.
"""

import itertools
from collections.abc import Iterator, Mapping

from planner.cluster import Device
from planner.columns import Columns
from planner.cost.decode import ReplicaShape
from planner.cost.ranks import shares_by_compute
from planner.errors import InvalidInput
from planner.judge import violations
from planner.plan import Placement, Plan, Stage, Task
from planner.search import Search
from planner.space import TP_DEGREES, BlockShape, device_classes, replica_shapes, role_limits
from planner.workflow import TRAINING, groupings, side_tasks

MAX_DEVICES = 7

Signature = tuple[object, ...]


def exhaustive(search: Search) -> None:
    """Offer every plan. InvalidInput for more than `MAX_DEVICES` usable devices."""
    problem = search.problem
    barred = {d for d, role in role_limits(problem.overrides).items() if role == "idle"}
    devices = [d for d in problem.cluster.devices if d.id not in barred]
    if len(devices) > MAX_DEVICES:
        raise InvalidInput(
            "the exhaustive scheduler is for tiny clusters", got=len(devices), expected=f"at most {MAX_DEVICES} devices"
        )
    seen: set[Signature] = set()
    classes = device_classes(problem)
    shapes = {k: replica_shapes(search.cost, classes, k) for k in {d.kind for d in devices}}
    shared = search.cost.shares_devices
    for sides in _sides(search, devices, len(devices) if shared else len(devices) - 1):
        used = set() if shared else {d for s in sides for d in s.devices}
        for rollouts in _replica_sets(shapes, [d for d in devices if d.id not in used]):
            if search.halted():
                return
            signature = _signature(sides, rollouts, devices, search)
            if signature in seen:
                continue
            seen.add(signature)
            plan = Plan(placements=(*sides, *rollouts))
            if not violations(plan, problem):
                search.offer(plan)


def _sides(search: Search, devices: list[Device], most: int) -> Iterator[tuple[Placement, ...]]:
    """Every way to run all tasks but generation on at most `most` devices."""
    tasks = side_tasks(search.problem.workload)
    columns = Columns(search.cost)

    def go(groups: tuple[tuple[Task, ...], ...], left: list[Device], most: int) -> Iterator[tuple[Placement, ...]]:
        if not groups:
            yield ()
            return
        for first in _trainers(columns, left, groups[0], most - len(groups) + 1):
            rest = [d for d in left if d.id not in first.devices]
            for others in go(groups[1:], rest, most - len(first.devices)):
                yield (first, *others)

    for groups in groupings(tasks, search.problem.capabilities.task_groups):
        yield from go(groups, devices, most)


def _trainers(columns: Columns, devices: list[Device], tasks: tuple[Task, ...], most: int) -> Iterator[Placement]:
    caps = columns.cost.problem.capabilities
    limit = min(most, caps.train_max_devices or most)
    for size in range(1, limit + 1):
        for chosen in itertools.combinations(devices, size):
            kinds = list(dict.fromkeys(d.kind for d in chosen))
            if len(kinds) > caps.trainer_kinds:
                continue
            for order in itertools.permutations(kinds) if len(kinds) <= caps.train_max_kinds else ():
                groups = [[d for d in chosen if d.kind == k] for k in order]
                for blocks in itertools.product(*(_blocks(k, len(g)) for k, g in zip(order, groups, strict=True))):
                    yield from _arranged(columns, blocks, groups, tasks)
            if caps.train_mixed_dp and len(kinds) == 2:
                yield from _mixed(columns, [[d for d in chosen if d.kind == k] for k in kinds], tasks)


def _mixed(columns: Columns, groups: list[list[Device]], tasks: tuple[Task, ...]) -> Iterator[Placement]:
    """One stage with DP ranks of two kinds, tokens by compute."""
    context = columns.cost.context
    lead: Task = "actor_training" if "actor_training" in tasks else tasks[0]
    for tp in TP_DEGREES:
        if any(len(g) % tp for g in groups):
            continue
        ranks = [(g[0].kind, len(g) // tp) for g in groups]
        shares = shares_by_compute(context, ranks, tp)
        for orders in itertools.product(*(_orders(g) for g in groups)):
            devices = tuple(d.id for order in orders for d in order)
            stage = Stage(
                devices=devices,
                kind="+".join(k for k, _ in ranks),
                dp=len(devices) // tp,
                tp=tp,
                layers=context.of(lead).model.layers,
                token_shares=tuple(x for x, (_, n) in zip(shares, ranks, strict=True) for _ in range(n)),
            )
            yield Placement(
                role="train" if set(tasks) & set(TRAINING) else "score",
                kind=stage.kind,
                devices=devices,
                tp=tp,
                dp=stage.dp,
                tasks=tasks,
                stages=(stage,),
            )


def _blocks(kind: str, devices: int) -> Iterator[BlockShape]:
    for tp in TP_DEGREES:
        for pp in range(1, devices // tp + 1):
            if devices % (tp * pp) == 0:
                yield BlockShape(kind=kind, tp=tp, dp=devices // (tp * pp), pp=pp)


def _arranged(
    columns: Columns, blocks: tuple[BlockShape, ...], groups: list[list[Device]], tasks: tuple[Task, ...]
) -> Iterator[Placement]:
    layers = columns.split(blocks, tasks)
    if layers is None:
        return
    for orders in itertools.product(*(_orders(g) for g in groups)):
        stages: list[Stage] = []
        for b, order in zip(blocks, orders, strict=True):
            size = b.dp * b.tp
            for s in range(b.pp):
                stages.append(
                    Stage(
                        devices=tuple(d.id for d in order[s * size : (s + 1) * size]),
                        kind=b.kind,
                        dp=b.dp,
                        tp=b.tp,
                        layers=layers[len(stages)],
                    )
                )
        yield Placement(
            role="train" if set(tasks) & set(TRAINING) else "score",
            kind="+".join(b.kind for b in blocks),
            devices=tuple(d for s in stages for d in s.devices),
            tp=stages[0].tp,
            dp=stages[0].dp,
            pp=len(stages),
            tasks=tasks,
            stages=tuple(stages),
        )


def _orders(devices: list[Device]) -> Iterator[tuple[Device, ...]]:
    """Arrangements that differ in the machine at some position: devices of a machine are alike."""
    seen: set[tuple[str, ...]] = set()
    for order in itertools.permutations(devices):
        nodes = tuple(d.node for d in order)
        if nodes not in seen:
            seen.add(nodes)
            yield order


def _replica_sets(
    shapes: Mapping[str, tuple[ReplicaShape, ...]], devices: list[Device]
) -> Iterator[tuple[Placement, ...]]:
    """Every set of disjoint replicas on some of the devices."""
    if not devices:
        yield ()
        return
    first, rest = devices[0], devices[1:]
    yield from _replica_sets(shapes, rest)  # the first device stays idle
    peers = [d for d in rest if d.kind == first.kind]
    for shape in shapes[first.kind]:
        for others in itertools.combinations(peers, shape.devices - 1):
            # In node order, a set of devices has TP groups inside machines if any order has.
            mine = tuple(d.id for d in sorted((first, *others), key=lambda d: d.node))
            replica = Placement(role="rollout", kind=first.kind, devices=mine, tp=shape.tp, pp=shape.pp)
            left = [d for d in rest if d not in others]
            for more in _replica_sets(shapes, left):
                yield (replica, *more)


def _signature(
    sides: tuple[Placement, ...], rollouts: tuple[Placement, ...], devices: list[Device], search: Search
) -> Signature:
    """What a plan's score depends on, device ids apart; overridden devices keep their ids."""
    limits = role_limits(search.problem.overrides)
    names = {d.id: (d.node, d.kind, d.region, d.id if d.id in limits else "") for d in devices}
    stages = tuple(
        (p.tasks, tuple((s.kind, s.dp, s.tp, s.layers, tuple(names[d] for d in s.devices)) for s in p.stages))
        for p in sides
    )
    beside = {
        d: i for i, p in enumerate(sides) for d in p.devices
    }  # where replicas share devices, it matters with whom
    replicas = sorted((r.tp, r.pp, tuple(sorted((*names[d], beside.get(d, -1)) for d in r.devices))) for r in rollouts)
    return (stages, tuple(replicas))
