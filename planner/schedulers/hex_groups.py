"""`hex` for workflows of several tasks: cells of `planner.sidescan` laid out on machines, one group or two.

As with one trainer, the most promising cell comes first. Its ways (which tasks on which blocks) are laid out, the first
group on the machines, the second on what is left, and the replicas of the rollout knapsack on the rest; in sync modes with
co-location also on the devices of the groups. Then the groups are costed beside the replicas that their devices will hold.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

from planner.cost.memory import replica_resident_bytes
from planner.cost.model import side_s
from planner.cost.training import TrainerCost
from planner.hosting import HostedWay, Hosting
from planner.placing import GroupLayout, StageLayout, materialise_groups
from planner.plan import Task
from planner.record import record, replace
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.schedulers.areal_hex.training import lay_outs
from planner.schedulers.layouts import laid_out, layouts
from planner.search import Search
from planner.sides import Way
from planner.sidescan import SideCell, SideScan
from planner.space import BlockShape, DeviceClass, is_mixed, replica_shapes
from planner.workflow import TRAINING

_SEEN, _WAYS = 400, 3  # ways looked at, and the fastest of them laid out, on a large fleet
_LAYOUTS = 2  # of the first group there; the second has its fastest
_SHARES = 256  # ways for replicas to share the stages of a way that are tried on a small fleet; beyond, blocks share as a whole
_CELLS, _SPAN = 24, 1.15  # cells whose ways are estimated, and how far beyond a cell's bound
_TIE = 1e-9


@record
class _Group:
    """A group on classes."""

    tasks: tuple[Task, ...]
    stages: tuple[StageLayout, ...]
    cost: TrainerCost
    used: tuple[int, ...]
    shared: tuple[tuple[str, ...], ...]  # by stage, kinds whose devices replicas may share


@record
class _SharedStage:
    """A stage whose devices replicas may use in turn."""

    at: tuple[int, int]  # its group and its place in it
    held_bytes: float  # by its models, on each device
    kinds: tuple[str, ...]  # on which replicas may share
    devices: tuple[int, ...]  # by class


def plan_cell(search: Search, scan: SideScan, cell: SideCell, period_s: float, *, small: bool) -> None:
    """Offer the plans of a cell of that relaxed period; all of its ways where the fleet is small, else the fastest."""
    ways: Iterator[Way] = scan.sides.ways(scan.in_order(cell.used), scan.in_order(cell.actor), _to_beat_s(search))
    if small:
        for way in ways:
            for shares in _shares(scan, way):
                if _least_s(scan, way, shares) < _to_beat_s(search):
                    _plan_way(search, scan, way, shares, _most(way, shares), small=True)
        return
    # In sync modes generation comes on top, and takes at least what it would with the memory of all devices to itself.
    window_s = cell.window_s if scan.shared else 0.0
    for way in sorted(itertools.islice(ways, _SEEN), key=lambda w: w.side_s)[:_WAYS]:
        kinds = _kinds(way)
        _plan_levels(search, scan, way, window_s, [dict.fromkeys(kinds, beside) for beside in _besides(scan)])


def plan_turns(search: Search, scan: SideScan, to_beat_s: Callable[[], float], patience: int) -> bool:
    """Offer plans where generation takes turns with groups on shared devices, best estimate of any cell first, until
    `patience` ways in a row gave no better plan or none is left below `to_beat_s`. False where nothing can be estimated."""
    hosting: Hosting | None = None
    cells = scan.ascending(to_beat_s)
    waiting: list[tuple[float, int, HostedWay]] = []
    order = itertools.count()
    fruitless = looked_at = 0
    ahead = next(cells, None)
    while fruitless < patience or search.best is None:
        while ahead is not None and looked_at < _CELLS and (not waiting or ahead[0] <= waiting[0][0]):
            period_s, cell = ahead
            if hosting is None:
                hosting = _hosting(scan, cell)
                if not hosting.total > 0:
                    return False
            below_s = min(to_beat_s(), period_s * _SPAN)
            for w in hosting.ways(scan.in_order(cell.used), scan.in_order(cell.actor), below_s):
                heapq.heappush(waiting, (w.period_s, next(order), w))
            looked_at += 1
            ahead = next(cells, None)
        if not waiting or not waiting[0][0] < to_beat_s():
            return search.best is not None
        best = search.best
        _plan_hosted(search, scan, heapq.heappop(waiting)[2], hosting.window_s if hosting else 0.0)
        fruitless = 0 if search.best is not best else fruitless + 1
    return True


def _hosting(scan: SideScan, cell: SideCell) -> Hosting:
    """Estimates at the window of the most promising cell."""
    assert scan.pairing is not None, "there is a cell"
    trained = tuple(i for i, x in enumerate(cell.actor) if x)
    several = len({c.place.region for c in scan.classes}) > 1
    links = {k: scan.pairing.home_link(trained, i, several=several) for i, k in enumerate(scan.kinds)}
    return Hosting(scan.cost, scan.sides, scan.classes, links, cell.window_s)


def _plan_hosted(search: Search, scan: SideScan, hosted: HostedWay, window_s: float) -> None:
    """Offer the plans of a way beside replicas that do not slow its groups, and of what is near to that."""
    way, besides = hosted.way, sorted(_besides(scan))
    most: dict[str, float] = {}
    for blocks, rooms in zip(way.blocks, hosted.room_bytes, strict=True):
        for b, room in zip(blocks, rooms, strict=True):
            fits = besides[bisect.bisect_right(besides, max(room, 0.0)) - 1]
            most[b.kind] = max(most.get(b.kind, 0.0), fits)
    _plan_levels(search, scan, way, window_s, [most])


def _kinds(way: Way) -> tuple[str, ...]:
    return tuple(dict.fromkeys(b.kind for blocks in way.blocks for b in blocks))


def _plan_levels(
    search: Search, scan: SideScan, way: Way, window_s: float, levels_s: Sequence[Mapping[str, float]]
) -> None:
    """Offer the plans of a way beside replicas that hold so much by kind; then, from what was best so, kind by kind."""
    kinds, besides = _kinds(way), _besides(scan)
    todo = [dict(levels) for levels in levels_s]
    tried: list[dict[str, float]] = []
    while todo:
        better: dict[str, float] | None = None
        for levels in todo:
            if search.halted():
                return
            tried.append(levels)
            shares = tuple(tuple(levels[b.kind] for b in _by_stage(blocks)) for blocks in way.blocks)
            best = search.best
            if _least_s(scan, way, shares) + window_s < _to_beat_s(search):
                _plan_way(search, scan, way, shares, levels, small=False)
            if search.best is not best:
                better = levels
        near = [better | {k: beside} for k in kinds for beside in besides] if better and scan.shared else []
        todo = [levels for levels in near if levels not in tried]


def _plan_way(
    search: Search,
    scan: SideScan,
    way: Way,
    shares: tuple[tuple[float, ...], ...],
    beside: Mapping[str, float],
    *,
    small: bool,
) -> None:
    """Offer the layouts of a way."""
    if way.side_s < _to_beat_s(search):
        for groups in _laid_out(scan, way, shares, small=small):
            if search.halted():
                return
            _offer(search, scan, groups, beside)


def _least_s(scan: SideScan, way: Way, shares: tuple[tuple[float, ...], ...]) -> float:
    """Seconds of a way at best beside replicas that hold that much; infinite where it does not fit."""
    if not any(itertools.chain(*shares)):
        return way.side_s
    parts = zip(way.blocks, way.tasks, shares, strict=True)
    costs = [scan.sides.relaxed.group(blocks, tasks, beside) for blocks, tasks, beside in parts]
    return side_s(c for c in costs if c is not None) if all(costs) else float("inf")


def _to_beat_s(search: Search) -> float:
    return search.to_beat_s() * (1 + _TIE)


def _besides(scan: SideScan) -> tuple[float, ...]:
    """What replicas may hold on the devices of groups: as much as some shape holds, or nothing (they are elsewhere)."""
    if not scan.shared:
        return (0.0,)
    cost = scan.cost
    shapes = {s for k in scan.kinds for s in replica_shapes(cost, scan.classes, k)}
    return (*sorted({replica_resident_bytes(cost.context, s.tp, s.pp) for s in shapes}), 0.0)


def _by_stage(blocks: Sequence[BlockShape]) -> tuple[BlockShape, ...]:
    """The block of every stage; of ranks of two kinds, of either block of them."""
    return tuple(b for b in blocks for _ in range(b.pp))


def _shares(scan: SideScan, way: Way) -> Iterator[tuple[tuple[float, ...], ...]]:
    """By group and stage, what replicas may hold on its devices: every combination, the same everywhere first. Where no
    micro-batch has a floor scarce memory costs little, and stages of a block hold alike."""
    besides, kinds = _besides(scan), scan.cost.problem.cluster.kinds
    whole = not any(kinds[k].train_floor_s for k in _kinds(way))
    whole |= len(besides) ** sum(len(_by_stage(blocks)) for blocks in way.blocks) > _SHARES
    # By group, numbers of stages that hold alike.
    runs = [[b.pp for b in blocks] if whole else [1] * len(_by_stage(blocks)) for blocks in way.blocks]
    for flat in sorted(itertools.product(besides, repeat=sum(map(len, runs))), key=lambda f: len(set(f))):
        each = iter(flat)
        yield tuple(tuple(held for n in some for held in (next(each),) * n) for some in runs)


def _most(way: Way, shares: tuple[tuple[float, ...], ...]) -> dict[str, float]:
    """By kind, the most that replicas may hold on a stage of it."""
    out: dict[str, float] = {}
    for blocks, held in zip(way.blocks, shares, strict=True):
        for b, n in zip(_by_stage(blocks), held, strict=True):
            out[b.kind] = max(out.get(b.kind, 0.0), n)
    return out


def _laid_out(
    scan: SideScan, way: Way, shares: tuple[tuple[float, ...], ...], *, small: bool
) -> Iterator[tuple[_Group, ...]]:
    """The groups of a way on the classes. Devices pinned to train are covered by the groups that train, which score alone
    does not."""
    several = len(way.tasks) > 1
    both = several and bool(set(way.tasks[1]) & set(TRAINING))
    unpinned = [_unpinned(c) for c in scan.classes]
    # A group that trains alone has to cover every pin; the groups' devices are handed out pinned ones first.
    for first in _group(scan, unpinned if both else scan.classes, way.tasks[0], way.blocks[0], shares[0], small=small):
        if not several:
            yield (first,)
            continue
        rest = [_without(c, n) for c, n in zip(unpinned, first.used, strict=True)]
        seconds = _group(scan, rest, way.tasks[1], way.blocks[1], shares[1], small=small)
        for second in seconds if small else itertools.islice(seconds, 1):
            given = [a + b for a, b in zip(first.used, second.used, strict=True)]
            if all(n >= len(c.must_train) for n, c in zip(given, scan.classes, strict=True)):
                yield (first, second)


def _group(
    scan: SideScan,
    classes: Sequence[DeviceClass],
    tasks: tuple[Task, ...],
    blocks: tuple[BlockShape, ...],
    beside: tuple[float, ...],
    *,
    small: bool,
) -> Iterator[_Group]:
    kinds = [b.kind if held else None for b, held in zip(_by_stage(blocks), beside, strict=True)]
    together = [kinds] if is_mixed(blocks) else [[k] for k in kinds]
    shared = tuple(tuple(k for k in some if k is not None) for some in together)
    if not small:
        regions = tuple(dict.fromkeys(c.place.region for c in classes))
        found = laid_out(scan.columns, classes, blocks, regions, tasks=tasks, beside_bytes=beside, whole=False)
        for one in found[:_LAYOUTS]:
            yield _Group(tasks=tasks, stages=one.stages, cost=one.cost, used=one.used, shared=shared)
        return
    wanted = {k: sum(b.devices for b in blocks if b.kind == k) for k in scan.kinds}
    for counts in layouts(classes, wanted):
        for two in lay_outs(scan.columns, classes, counts, blocks, tasks=tasks, beside_bytes=beside):
            yield _Group(tasks=tasks, stages=two.stages, cost=two.cost, used=two.used, shared=shared)


def _offer(search: Search, scan: SideScan, groups: tuple[_Group, ...], beside: Mapping[str, float]) -> None:
    """The best replicas beside these groups, that hold no more than `beside` by kind on their devices."""
    train_s = side_s(g.cost for g in groups)
    if train_s > _to_beat_s(search):
        return
    classes = scan.classes
    counts = [c.size - sum(g.used[i] for g in groups) for i, c in enumerate(classes)]
    # Levels of sharing: the stages in the order of what their models hold.
    stages = _shared_stages(groups, len(classes)) if any(beside.values()) else []
    shared = [
        [(x.held_bytes, x.devices[i] if c.place.kind in x.kinds else 0) for x in stages] for i, c in enumerate(classes)
    ]
    actor = next(g for g in groups if "actor_training" in g.tasks)
    rollout = best_rollout(
        search.cost,
        classes,
        counts,
        trainer=tuple(classes[i].place for i, n in enumerate(actor.used) if n),
        train_s=train_s,
        mip_seconds=search.budget.mip_seconds,
        shared=shared if stages else (),
        most_resident_bytes=beside,
    )
    if rollout is None or rollout.period_s > _to_beat_s(search):
        search.evaluations += 1
        return
    laid = tuple(GroupLayout(tasks=g.tasks, stages=g.stages) for g in groups)
    levels = tuple(x.at for x in stages)
    search.offer(materialise_groups(classes, laid, rollout.replicas, search.problem.in_force, levels))


def _shared_stages(groups: Sequence[_Group], classes: int) -> list[_SharedStage]:
    """Stages whose devices replicas may share, by what their models hold."""
    found = [
        _SharedStage(
            at=(g, i),
            held_bytes=held,
            kinds=kinds,
            devices=tuple(s.tp * s.chunks.count(c) for c in range(classes)),
        )
        for g, group in enumerate(groups)
        for i, (s, held, kinds) in enumerate(zip(group.stages, group.cost.resident_bytes, group.shared, strict=True))
        if kinds
    ]
    return sorted(found, key=lambda x: (x.held_bytes, x.at))


def _unpinned(c: DeviceClass) -> DeviceClass:
    """The class without saying which of its devices must train: another group may take those."""
    return replace(c, free=(*c.must_train, *c.free), must_train=())


def _without(c: DeviceClass, taken: int) -> DeviceClass:
    return replace(c, free=c.free[taken:])
