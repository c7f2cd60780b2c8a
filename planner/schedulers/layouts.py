"""Ways to lay a trainer of given blocks on machines, for fleets too large to try them all.

Two questions: how many groups of TP devices each machine gives (whole machines, or all machines a little: then every machine
holds new weights and its other devices get them over the fast link), and which stage each goes to. Stages in stripes have
a part in every machine; rows keep each stage together; joined rows share a machine with the next stage too, so that
activations need not leave it (and gradients must). Rows follow a path through the regions along fast links.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

from planner.cluster import Cluster
from planner.columns import Columns
from planner.cost.network import best_link, spread_of
from planner.cost.training import StageShape, TrainerCost, TrainerShape
from planner.placing import StageLayout
from planner.plan import Task
from planner.pools import region_link
from planner.record import record
from planner.schedulers.mixed import mixed_stage
from planner.space import BlockShape, DeviceClass, is_mixed

# What machines give: all they have, one group of TP devices each in turn, or a stage each in turn; and how stages lie on it.
Given = Literal["whole", "groups", "stages"]
Order = Literal["rows", "joined", "stripes"]
_ORDERS: tuple[tuple[Given, Order], ...] = (
    ("whole", "rows"), ("whole", "joined"), ("whole", "stripes"),
    ("groups", "joined"), ("groups", "stripes"), ("stages", "rows"),
)  # fmt: skip
_SMALL = 8  # devices
_WAYS, _LARGE_WAYS = 48, 4  # ways to lay out counts of devices that are tried, on small fleets and on larger ones


@record
class LaidOut:
    """A trainer on classes."""

    stages: tuple[StageLayout, ...]
    cost: TrainerCost
    used: tuple[int, ...]  # devices by class


def laid_out(
    columns: Columns,
    classes: Sequence[DeviceClass],
    blocks: Sequence[BlockShape],
    regions: Sequence[str],
    *,
    tasks: tuple[Task, ...] = (),
    beside_bytes: Sequence[float] = (),
    whole: bool = True,
) -> list[LaidOut]:
    """Layouts of a group in those regions, fastest first; those that use each of them, unless not `whole`.

    `tasks` () are all but generation; `beside_bytes`: by stage, what replicas hold on its devices.
    """
    layers = columns.split(blocks, tasks)
    if layers is None:
        return []
    found: dict[tuple[tuple[int, ...], ...], LaidOut] = {}
    for (even, order), path in itertools.product(_ORDERS, _paths(columns, regions)):
        stages: list[tuple[int, ...]] = []
        left = [c.size - len(c.must_roll) for c in classes]
        for block in blocks:
            given = _given(classes, left, block, path, even=even)
            if given is None:
                break
            for i, n in given:
                left[i] -= n * block.tp
            stages += _stages(given, block, order)
        else:
            one = _costed(columns, classes, blocks, layers, stages, group=(tasks, beside_bytes))
            used = {classes[i].place.region for s in stages for i in s}
            if one is not None and (not whole or used >= set(regions)):
                found.setdefault(tuple(stages), one)
    return sorted(found.values(), key=lambda x: x.cost.train_s)


def _paths(columns: Columns, regions: Sequence[str]) -> list[tuple[str, ...]]:
    """Orders of the regions: the path of nearest neighbours whose slowest link is fastest."""
    if len(regions) < 3:
        return [tuple(regions)]
    cluster = columns.cost.problem.cluster
    paths = [_nearest(cluster, start, regions) for start in regions]

    def slowest(path: tuple[str, ...]) -> float:
        return min(region_link(cluster, a, b).bytes_per_s for a, b in itertools.pairwise(path))

    return [max(paths, key=slowest)]


def _nearest(cluster: Cluster, start: str, regions: Sequence[str]) -> tuple[str, ...]:
    path = [start]
    while len(path) < len(regions):
        rest = [r for r in regions if r not in path]
        path.append(max(rest, key=lambda r: region_link(cluster, path[-1], r).bytes_per_s))
    return tuple(path)


def _given(
    classes: Sequence[DeviceClass], left: Sequence[int], block: BlockShape, path: Sequence[str], *, even: Given
) -> list[tuple[int, int]] | None:
    """(class, groups of TP devices it gives) along the path; None where they do not suffice or leave out a device that
    must train."""
    mine = [i for r in path for i, c in enumerate(classes) if c.place.region == r and c.place.kind == block.kind]
    room = {i: left[i] // block.tp for i in mine}
    taken = {i: -(-len(classes[i].must_train) // block.tp) for i in mine}
    need = block.dp * block.pp - sum(taken.values())
    if need < 0 or any(taken[i] > room[i] for i in mine) or sum(room.values()) < block.dp * block.pp:
        return None
    if even != "whole":
        turn = block.dp if even == "stages" else 1
        order = sorted(((k, i) for i in mine for k in range(taken[i], room[i])), key=lambda x: x[0] // turn)
    else:
        # Whole machines, largest first; but the first machine of every region gives at least one.
        firsts = {next((i for i in mine if classes[i].place.region == r and room[i]), -1) for r in path} - {-1}
        heads = [(0, i) for i in mine if i in firsts and not taken[i]] if len(path) > 1 else []
        rest = [(1, i) for i in sorted(mine, key=lambda i: -room[i]) for _ in range(room[i] - taken[i])]
        for _, i in heads:
            rest.remove((1, i))
        order = heads + rest
    for _, i in order[:need]:
        taken[i] += 1
    return [(i, taken[i]) for i in mine if taken[i]]


def _stages(given: Sequence[tuple[int, int]], block: BlockShape, order: Order) -> list[tuple[int, ...]]:
    """The classes of every stage's groups."""
    chunks = [i for i, n in given for _ in range(n)]
    if order == "stripes":
        return [tuple(chunks[s :: block.pp]) for s in range(block.pp)]
    for border in range(block.dp, len(chunks), block.dp) if order == "joined" else ():
        # Both stages get a group in each of the two machines.
        if chunks[border - 1] != chunks[border] and block.dp > 1:
            chunks[border - 1], chunks[border] = chunks[border], chunks[border - 1]
    return [tuple(chunks[s * block.dp : (s + 1) * block.dp]) for s in range(block.pp)]


def _costed(
    columns: Columns,
    classes: Sequence[DeviceClass],
    blocks: Sequence[BlockShape],
    layers: Sequence[int],
    stages: Sequence[tuple[int, ...]],
    *,
    group: tuple[tuple[Task, ...], Sequence[float]],
) -> LaidOut | None:
    tasks, beside_bytes = group
    if is_mixed(blocks):
        mixed = mixed_stage(columns, classes, blocks, stages, tasks=tasks, beside_bytes=beside_bytes)
        return None if mixed is None else LaidOut(stages=mixed.stages, cost=mixed.cost, used=mixed.used)
    beside = beside_bytes or (0.0,) * len(layers)
    cluster = columns.cost.problem.cluster
    places = [tuple(classes[i].place for i in dict.fromkeys(ix)) for ix in stages]
    owner = [b for b in blocks for _ in range(b.pp)]
    shape = TrainerShape(
        stages=tuple(
            StageShape(kind=b.kind, dp=b.dp, tp=b.tp, layers=n, spread=spread_of(cluster, p), beside_bytes=held)
            for b, n, p, held in zip(owner, layers, places, beside, strict=True)
        ),
        links=tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(places)),
        tasks=tasks,
    )
    cost = columns.cost.trainer(shape)
    if cost is None:
        return None
    used = [0] * len(classes)
    for b, ix in zip(owner, stages, strict=True):
        for i in ix:
            used[i] += b.tp
    if any(used[i] < len(c.must_train) for i, c in enumerate(classes)):
        return None
    layout = tuple(
        StageLayout(kind=b.kind, tp=b.tp, layers=n, chunks=ix) for b, n, ix in zip(owner, layers, stages, strict=True)
    )
    return LaidOut(stages=layout, cost=cost, used=tuple(used))


def regions_of(sites: Sequence[Sequence[str]]) -> Iterator[str]:
    """The regions of some sites."""
    return itertools.chain.from_iterable(sites)


def layouts(classes: Sequence[DeviceClass], used: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Ways to take `used` devices by kind from the classes: large machines filled first, then small ones first.

    Machines that look alike are filled in order, so that no two ways differ by names only.
    """
    order, looks = list(range(len(classes))), _looks(classes)
    few = sum(_most(c) for c in classes) <= _SMALL or sum(used.values()) == 1
    limit = _WAYS if few else _LARGE_WAYS
    ways = itertools.chain(
        itertools.islice(_fill(classes, looks, order, used), limit - limit // 4),
        itertools.islice(_fill(classes, looks, order[::-1], used), limit // 4),
    )
    yield from dict.fromkeys(ways)


def _fill(
    classes: Sequence[DeviceClass], looks: Sequence[object], order: list[int], used: dict[str, int]
) -> Iterator[tuple[int, ...]]:
    """Depth first: each class in turn takes as much as it can, then less."""
    counts = [0] * len(classes)

    def go(at: int, left: dict[str, int]) -> Iterator[tuple[int, ...]]:
        if at == len(order):
            if not any(left.values()):
                yield tuple(counts)
            return
        i = order[at]
        c = classes[i]
        kind = c.place.kind
        later = sum(_most(classes[j]) for j in order[at + 1 :] if classes[j].place.kind == kind)
        top = min(_most(c), left[kind])
        if at and looks[order[at - 1]] == looks[i]:
            top = min(top, counts[order[at - 1]])
        for n in range(top, max(len(c.must_train), left[kind] - later) - 1, -1):
            counts[i] = n
            yield from go(at + 1, {**left, kind: left[kind] - n})
        counts[i] = 0

    yield from go(0, dict(used))


def _most(c: DeviceClass) -> int:
    """Devices of a class that may train."""
    return c.size - len(c.must_roll)


def _looks(classes: Sequence[DeviceClass]) -> list[object]:
    """What a score can depend on, names apart."""
    machines: dict[str, list[tuple[str, int]]] = {}
    for c in classes:
        machines.setdefault(c.place.node, []).append((c.place.kind, c.size))
    return [
        (
            c.place.kind,
            c.place.region,
            c.size,
            len(c.must_train),
            len(c.must_roll),
            tuple(sorted(machines[c.place.node])),
        )
        for c in classes
    ]
