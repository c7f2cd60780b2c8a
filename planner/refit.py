"""A trainer (or another group of tasks) on the devices it may have now, as near to what it was as they allow."""

import itertools
from collections.abc import Callable, Iterator, Sequence

from planner.cluster import Device
from planner.columns import Columns
from planner.cost.ranks import shares_by_compute
from planner.plan import Placement, Stage, Task
from planner.record import replace
from planner.space import BlockShape, tp_degrees

_STAGES = (1, 2, 3, 4, 6, 8)  # pipeline depths tried where the old blocks do not fit
_TRIES = 12  # shapes costed in full, best lower bound first


def blocks_of(placement: Placement) -> tuple[BlockShape, ...]:
    """The kind-blocks of a group: runs of stages of one kind and shape."""
    runs = itertools.groupby(placement.stages, key=lambda s: (s.kind, s.tp, s.dp))
    return tuple(BlockShape(kind=k, tp=tp, dp=dp, pp=len(list(run))) for (k, tp, dp), run in runs)


def refitted(
    columns: Columns,
    old: Placement,
    devices: Sequence[Device],
    *,
    must: frozenset[str] = frozenset(),
    room: Callable[[str], int] = lambda _: 10**9,
) -> Placement | None:
    """`old` on some of `devices`, the first of them preferred: its blocks with as much of their DP as fits, else the shape with
    the best lower bound that holds the models, on no more devices than before where that goes. None when none does.

    `must`: devices that have to be in it; `room`: the most devices of a kind.
    """
    if len(old.stages) == 1 and "+" in old.kind:
        kept = _kept_ranks(columns, old, devices, room)
        if kept is not None and must <= set(kept.devices):
            return kept
    ordered = sorted(devices, key=lambda d: d.id not in must)
    chunks = _Chunks(ordered)

    def fit(blocks: tuple[BlockShape, ...]) -> Placement | None:
        found = _laid_out(columns, old, blocks, chunks)
        return found if found is not None and must <= set(found.devices) else None

    same = tuple(_shrunk(b, chunks.count(b.kind, b.tp), room(b.kind)) for b in blocks_of(old))
    if same and all(b.dp > 0 for b in same) and (found := fit(same)) is not None:
        return found
    for most in (max(len(old.devices), len(must)), 10**9):  # no larger than it was, unless it has to be
        shapes = [s for s in _shapes(columns, chunks, room, most) if sum(b.devices for b in s) >= len(must)]
        bounds = [(columns.bound_s(s, ()), i) for i, s in enumerate(shapes)]
        for bound_s, i in sorted(bounds)[:_TRIES]:
            if bound_s < float("inf") and (found := fit(shapes[i])) is not None:
                return found
    return None


def _kept_ranks(
    columns: Columns, old: Placement, devices: Sequence[Device], room: Callable[[str], int]
) -> Placement | None:
    """The DP ranks of a stage of two kinds that have all their devices still, tokens divided anew; None where that does not
    do."""
    (stage,), cost, kinds = old.stages, columns.cost, {d.id: d.kind for d in devices}
    left: dict[str, list[tuple[str, ...]]] = {}
    for i in range(stage.dp):
        rank = stage.devices[i * stage.tp : (i + 1) * stage.tp]
        if all(d in kinds for d in rank):
            left.setdefault(kinds[rank[0]], []).append(rank)
    left = {k: some[: room(k) // stage.tp] for k, some in left.items() if room(k) >= stage.tp}
    if not left or (len(left) > 1 and not cost.problem.capabilities.train_mixed_dp):
        return None
    shares = shares_by_compute(cost.context, [(k, len(some)) for k, some in left.items()], stage.tp)
    by_rank = tuple(x for x, some in zip(shares, left.values(), strict=True) for _ in some)
    mine = tuple(d for some in left.values() for rank in some for d in rank)
    kind, dp = "+".join(left), len(by_rank)
    new = replace(stage, devices=mine, kind=kind, dp=dp, token_shares=by_rank if len(left) > 1 else ())
    found = replace(old, kind=kind, devices=mine, dp=dp, stages=(new,))
    return found if cost.trainer(cost.trainer_shape(found, old.tasks)) is not None else None


class _Chunks:
    """Devices as TP groups: by kind and machine, in their order of preference."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.by_kind: dict[str, dict[str, list[str]]] = {}
        for d in devices:
            self.by_kind.setdefault(d.kind, {}).setdefault(d.node, []).append(d.id)

    def count(self, kind: str, tp: int) -> int:
        """TP groups that the kind's machines hold."""
        return sum(len(ds) // tp for ds in self.by_kind.get(kind, {}).values())

    def take(self, kind: str, tp: int, used: set[str]) -> Iterator[tuple[str, ...]]:
        """TP groups of devices that are not in `used`."""
        for ds in self.by_kind.get(kind, {}).values():
            free = [d for d in ds if d not in used]
            for i in range(0, len(free) - tp + 1, tp):
                yield tuple(free[i : i + tp])


def _shrunk(block: BlockShape, chunks: int, room: int) -> BlockShape:
    dp = min(block.dp, chunks // block.pp, room // (block.tp * block.pp))
    return BlockShape(kind=block.kind, tp=block.tp, dp=dp, pp=block.pp)


def _shapes(columns: Columns, chunks: _Chunks, room: Callable[[str], int], most: int) -> list[tuple[BlockShape, ...]]:
    """Single blocks on all devices of a kind, and pairs of them, of at most `most` devices."""
    problem = columns.cost.problem
    caps, samples = problem.capabilities, problem.workload.samples_per_step
    most = min(most, caps.train_max_devices or most)
    single: dict[str, list[BlockShape]] = {}
    for kind in chunks.by_kind:
        for tp in tp_degrees(problem, caps.train_max_tp):
            for pp in _STAGES:
                dp = min(chunks.count(kind, tp) // pp, min(most, room(kind)) // (tp * pp), samples)
                if dp > 0 and pp <= min(caps.train_max_pp, problem.model.layers):
                    single.setdefault(kind, []).append(BlockShape(kind=kind, tp=tp, dp=dp, pp=pp))
    out: list[tuple[BlockShape, ...]] = [(b,) for bs in single.values() for b in bs]
    if caps.train_max_kinds > 1:
        for a, b in itertools.permutations(single, 2):
            few = (single[a][: len(_STAGES)], single[b][: len(_STAGES)]) if len(single) > 2 else (single[a], single[b])
            out += [(x, y) for x, y in itertools.product(*few) if x.devices + y.devices <= most]
    return out


def _laid_out(columns: Columns, old: Placement, blocks: tuple[BlockShape, ...], chunks: _Chunks) -> Placement | None:
    """The blocks on TP groups in order of preference; None when they do not fit in number or memory."""
    tasks: tuple[Task, ...] = old.tasks
    layers = columns.split(blocks, tasks)
    if layers is None:
        return None
    used: set[str] = set()
    stages: list[Stage] = []
    for b in blocks:
        mine = list(itertools.islice(chunks.take(b.kind, b.tp, used), b.dp * b.pp))
        if len(mine) < b.dp * b.pp:
            return None
        used.update(d for chunk in mine for d in chunk)
        for s in range(b.pp):
            devices = tuple(d for chunk in mine[s * b.dp : (s + 1) * b.dp] for d in chunk)
            stages.append(Stage(devices=devices, kind=b.kind, dp=b.dp, tp=b.tp, layers=layers[len(stages)]))
    found = Placement(
        role=old.role,
        kind="+".join(dict.fromkeys(b.kind for b in blocks)),
        devices=tuple(d for s in stages for d in s.devices),
        tp=stages[0].tp,
        dp=stages[0].dp,
        pp=len(stages),
        tasks=tasks,
        stages=tuple(stages),
    )
    cost = columns.cost
    return found if cost.trainer(cost.trainer_shape(found, tasks)) is not None else None
