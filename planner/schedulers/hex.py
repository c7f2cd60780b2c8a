"""Our own scheduler (`hex`): plans in the order of what they could be at best.

The cells of the plan space (`planner.scan`) come with the shortest relaxed period first. Each is laid out on the real
machines, whole machines first, with the fastest trainer that fits there and the replicas of the rollout MILP. When the next
cell could at best be as slow as the incumbent, no cell is left that could beat it and the search is over. Where the first
cell can be laid out as relaxed, as on machines of one size, that is at once: the plan meets its bound. On larger fleets a cell
is tried in a few layouts only (`schedulers.layouts`) and patience ends the search too: what is proven then is the bound, not
the plan. Bound and search share one scan, so the search starts where the bound stopped.
"""

import itertools
from collections.abc import Iterator, Sequence

from planner.judge import violations
from planner.placing import materialise
from planner.scan import Cell, Scan, scan_of
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.schedulers.areal_hex.training import Trainer, best_trainer
from planner.schedulers.layouts import LaidOut, laid_out
from planner.search import Search
from planner.space import DeviceClass

_SMALL = 8  # devices
_LAYOUTS, _LARGE_LAYOUTS = 48, 4  # ways to lay out a cell that are tried, on small fleets and on larger ones
_LARGE = 64  # devices from which only the layouts of `schedulers.layouts` are tried
_PATIENCE = 32  # cells without a better plan that end the search on a large fleet
_STEPS = 200  # looks at the scan's frontier that a fleet beyond the smallest gets
_TIE = 1e-9


def hex_scheduler(search: Search) -> None:
    """Offer plans, best cell first, until no cell can beat the incumbent, patience ends or the search is halted."""
    force = search.problem.in_force
    if force is not None and not violations(force, search.problem):
        search.offer(force)
    scan = scan_of(search.cost)
    classes = scan.classes
    devices = sum(c.size for c in classes)
    tried: set[tuple[int, ...]] = set()
    fruitless = 0

    def to_beat_s() -> float:
        if search.halted():
            return float("-inf")
        return float("inf") if search.best is None else search.best.prediction.step_s * (1 - _TIE)

    def cells() -> Iterator[Cell]:
        # Where the order cannot be proven in time, what is likely comes next.
        steps = _STEPS if devices > _SMALL else None
        yield from (cell for _, cell in scan.ascending(to_beat_s, steps=steps))
        if steps is not None and scan.lowest_s() < to_beat_s():
            yield from scan.likely(_PATIENCE)

    for cell in cells():
        best = search.best
        if best is not None and fruitless >= _PATIENCE:
            return
        if devices > _SMALL:
            _plan_cell(search, scan, cell)
        if devices <= _LARGE:
            for counts in layouts(classes, dict(zip(scan.kinds, cell.used, strict=True))):
                if search.halted():
                    return
                if counts not in tried:
                    tried.add(counts)
                    trainer = best_trainer(scan.columns, classes, counts, exactly=True)
                    if trainer is not None:
                        _plan(search, classes, trainer)
        fruitless = 0 if search.best is not best or devices <= _SMALL else fruitless + 1


def _plan_cell(search: Search, scan: Scan, cell: Cell) -> None:
    """The trainer of a cell in the layouts that suit large fleets."""
    regions = [r for site in cell.sites for r in site]
    for trainer in laid_out(scan.columns, scan.classes, cell.blocks, regions)[:_LARGE_LAYOUTS]:
        if search.halted():
            return
        _plan(search, scan.classes, trainer)


def _plan(search: Search, classes: Sequence[DeviceClass], trainer: Trainer | LaidOut) -> None:
    """The best replicas on the devices a trainer leaves."""
    best = search.best
    if best is not None and trainer.cost.train_s > best.prediction.step_s * (1 + _TIE):
        return
    rollout = best_rollout(
        search.cost,
        classes,
        [c.size - n for c, n in zip(classes, trainer.used, strict=True)],
        trainer=tuple(classes[i].place for i, n in enumerate(trainer.used) if n),
        train_s=trainer.cost.train_s,
        mip_seconds=search.budget.mip_seconds,
    )
    if rollout is None or (best is not None and rollout.period_s > best.prediction.step_s * (1 + _TIE)):
        search.evaluations += 1
        return
    search.offer(materialise(classes, trainer.stages, rollout.replicas, search.problem.in_force))


def layouts(classes: Sequence[DeviceClass], used: dict[str, int]) -> Iterator[tuple[int, ...]]:
    """Ways to take `used` devices by kind from the classes: large machines filled first, then small ones first.

    Machines that look alike are filled in order, so that no two ways differ by names only.
    """
    order, looks = list(range(len(classes))), _looks(classes)
    limit = _LAYOUTS if sum(_most(c) for c in classes) <= _SMALL else _LARGE_LAYOUTS
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
