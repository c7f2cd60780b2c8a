"""Our own scheduler (`hex`): plans in the order of what they could be at best.

The cells of the plan space (`planner.scan`) come with the shortest relaxed period first. Each is laid out on the real
machines, whole machines first, with the fastest trainer that fits there and the replicas of the rollout MILP. When the next
cell could at best be as slow as the incumbent, no cell is left that could beat it and the search is over. Where the first
cell can be laid out as relaxed, as on machines of one size, that is at once: the plan meets its bound. On larger fleets a cell
is tried in a few layouts only (`schedulers.layouts`) and patience ends the search too: what is proven then is the bound, not
the plan. Bound and search share one scan, so the search starts where the bound stopped.
"""

from collections.abc import Iterator, Sequence

from planner.judge import violations
from planner.placing import materialise
from planner.scan import Cell, Scan, scan_of
from planner.schedulers.areal_hex.rollout import best_rollout
from planner.schedulers.areal_hex.training import Trainer, best_trainer
from planner.schedulers.hex_groups import plan_cell, plan_turns
from planner.schedulers.layouts import LaidOut, laid_out, layouts
from planner.schedulers.mixed import MixedTrainer, best_mixed
from planner.search import Search
from planner.sidescan import SideScan
from planner.space import DeviceClass

_SMALL = 8  # devices
_LARGE_LAYOUTS = 4  # ways to lay out a cell that are tried on larger fleets
_LARGE = 64  # devices from which only the layouts of `schedulers.layouts` are tried
_PATIENCE = 32  # cells without a better plan that end the search on a large fleet
_GROUPS_PATIENCE = 8  # the same for workflows of several tasks, whose cells have many ways each
_TURNS_PATIENCE = 24  # ways without a better plan where generation shares devices
_STEPS = 200  # looks at the scan's frontier that a fleet beyond the smallest gets
_TIE = 1e-9


def hex_scheduler(search: Search) -> None:
    """Offer plans, best cell first, until no cell can beat the incumbent, patience ends or the search is halted."""
    force = search.problem.in_force
    if force is not None and not violations(force, search.problem):
        search.offer(force)
    scan = scan_of(search.cost)
    if isinstance(scan, SideScan):
        _groups(search, scan)
    else:
        _trainers(search, scan)


def _groups(search: Search, scan: SideScan) -> None:
    """Workflows whose tasks may have devices of their own."""
    small = sum(c.size for c in scan.classes) <= _SMALL
    # Over regions many cells tie that cannot all be laid out as well.
    patience = _GROUPS_PATIENCE * (1 if len({c.place.region for c in scan.classes}) == 1 else 2)
    fruitless = 0  # cells since the last better plan

    def to_beat_s() -> float:
        if search.halted():
            return float("-inf")
        return search.to_beat_s() * (1 - _TIE)

    if scan.sides.hosts and not small and plan_turns(search, scan, to_beat_s, _TURNS_PATIENCE):
        return
    for period_s, cell in scan.ascending(to_beat_s):
        best = search.best
        if best is not None and fruitless >= patience:
            return
        plan_cell(search, scan, cell, period_s, small=small)
        fruitless = 0 if search.best is not best or small else fruitless + 1


def _trainers(search: Search, scan: Scan) -> None:
    """One trainer that runs all tasks but generation."""
    classes = scan.classes
    devices = sum(c.size for c in classes)
    tried: set[tuple[int, ...]] = set()
    fruitless = 0

    def to_beat_s() -> float:
        if search.halted():
            return float("-inf")
        return search.to_beat_s() * (1 - _TIE)

    def cells() -> Iterator[Cell]:
        # Where the order cannot be proven in time, what is likely comes next.
        steps = _STEPS if devices > _SMALL else None
        yield from (cell for _, cell in scan.ascending(to_beat_s, steps=steps))
        if steps is not None and scan.lowest_s() < to_beat_s():
            yield from scan.likely(_PATIENCE)

    for cell in cells():
        best = search.best
        if search.halted() or (best is not None and fruitless >= _PATIENCE):
            return
        if devices > _SMALL:
            _plan_cell(search, scan, cell)
        if devices <= _LARGE:
            for counts in layouts(classes, dict(zip(scan.kinds, cell.used, strict=True))):
                if search.halted():
                    return
                if counts not in tried:
                    tried.add(counts)
                    for trainer in (
                        best_trainer(scan.columns, classes, counts, exactly=True),
                        best_mixed(scan.columns, classes, counts),
                    ):
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


def _plan(search: Search, classes: Sequence[DeviceClass], trainer: Trainer | LaidOut | MixedTrainer) -> None:
    """The best replicas on the devices a trainer leaves."""
    if trainer.cost.train_s > search.to_beat_s() * (1 + _TIE):
        return
    rollout = best_rollout(
        search.cost,
        classes,
        [c.size - n for c, n in zip(classes, trainer.used, strict=True)],
        trainer=tuple(classes[i].place for i, n in enumerate(trainer.used) if n),
        train_s=trainer.cost.train_s,
        mip_seconds=search.budget.mip_seconds,
    )
    if rollout is None or rollout.period_s > search.to_beat_s() * (1 + _TIE):
        search.evaluations += 1
        return
    search.offer(materialise(classes, trainer.stages, rollout.replicas, search.problem.in_force))
