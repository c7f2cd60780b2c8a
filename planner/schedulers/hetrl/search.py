"""`hetrl`: five levels searched by nested successive halving (1 and 2) and evolution (3 to 5)."""

import random

from planner.judge import violations
from planner.schedulers.hetrl.evolution import GpuGrouping, Scorer
from planner.schedulers.hetrl.genome import Breeder
from planner.schedulers.hetrl.halving import nested_halving
from planner.schedulers.hetrl.levels import gpu_groupings, task_groupings
from planner.schedulers.hetrl.ways import Ways
from planner.search import Search
from planner.space import device_classes, replica_shapes

_HALVING = 0.6  # of the evaluations; the others refine device counts around the best plan found
_IDLE = 150  # draws in a row without a new genome that end the refinement
_RESTARTS = 4  # small fleets spend few evaluations in one pass; the rest goes to new populations
_TURN = 8  # evaluations of an arm where halving found no plan at all


def hetrl(search: Search) -> None:
    """Offer plans until the evaluations are spent or the search is halted."""
    evolve(search, search.budget.evaluations)


def evolve(search: Search, evaluations: int) -> None:
    """The search with a budget of its own."""
    problem = search.problem
    force = problem.in_force
    if force is not None and not violations(force, problem):
        search.offer(force)
    classes = device_classes(problem)
    if not classes:
        return
    kinds = dict.fromkeys(c.place.kind for c in classes)
    shapes = {k: replica_shapes(search.cost, classes, k) for k in kinds}
    breeder = Breeder(Ways(search.cost, classes), shapes, random.Random(problem.seed))
    score = Scorer(search, breeder)
    until = search.evaluations + evaluations
    for _ in range(_RESTARTS):
        left = until - search.evaluations
        if left <= 0 or search.halted():
            return
        _halve(score, left)
        _refine(score, max(c.size for c in classes), until)


def _halve(score: Scorer, evaluations: int) -> None:
    """Levels 1 and 2 from new populations."""
    search, classes = score.search, score.breeder.classes
    arms = [
        [GpuGrouping(score, tasks, sizes) for sizes in gpu_groupings(search.problem, classes, tasks)]
        for tasks in task_groupings(search.problem)
    ]
    nested_halving(arms, max(1, int(evaluations * _HALVING)), search.halted)
    # Thinned arms may all have been barren: then each of the others gets a turn.
    for arm in (a for grouping in arms for a in grouping):
        if score.best[1] is not None or search.halted():
            return
        arm.spend(_TURN)


def _refine(score: Scorer, unit: int, until: int) -> None:
    """Climb from the best plan: device counts by halvings of a machine, layouts, packings and swaps; better is accepted."""
    breeder, search = score.breeder, score.search
    fruitless = 0
    while search.evaluations < until and not search.halted() and fruitless < _IDLE:
        best = score.best[1]
        if best is None:
            return
        before = search.evaluations
        draw = breeder.rng.random()
        if draw < 0.4:
            size = max(1, unit >> breeder.rng.randrange(max(1, unit.bit_length())))
            child = breeder.regrown(best, size)
        elif draw < 0.6:
            child = breeder.mutated(best)
        elif draw < 0.8:
            child = breeder.swapped_gpus(best)
        else:
            child = breeder.swapped_tasklets(best)
        score(child)
        fruitless = 0 if search.evaluations > before else fruitless + 1
