"""Levels 3 to 5: the evolutionary search inside one arm.

Until the population is full, an evaluation makes a random individual. Then it either makes a mutated child, inserts it and
drops the worst, or swaps (GPUs across groups, tasklets within one) and accepts what is better. Population and rates are not
published; ours are the constants below.
"""

import math

from planner.judge import violations
from planner.schedulers.hetrl.genome import Breeder, Genome
from planner.schedulers.hetrl.layout import plan_of
from planner.schedulers.hetrl.levels import TaskGrouping
from planner.search import Search

_POPULATION = 8
_RANDOM = 4  # individuals drawn at random before evolution starts
_SWAP = 0.5  # of the evaluations
_DRAWS = 16  # tries to draw a legal individual


class Scorer:
    """Seconds of a genome's step, remembered; every new one is offered to the search."""

    def __init__(self, search: Search, breeder: Breeder) -> None:
        self.search, self.breeder = search, breeder
        self._seconds: dict[Genome, float] = {}
        self.best: tuple[float, Genome | None] = (math.inf, None)

    def __call__(self, genome: Genome) -> float:
        """Infinite where the genome is no valid plan."""
        if genome not in self._seconds:
            self._seconds[genome] = seconds = self._offer(genome)
            if seconds < self.best[0]:
                self.best = (seconds, genome)
        return self._seconds[genome]

    def _offer(self, genome: Genome) -> float:
        groups = self.breeder.layouts(genome)
        replicas = self.breeder.replicas(genome, groups) if groups else []
        if not groups or not replicas:
            self.search.evaluations += 1
            return math.inf
        problem = self.search.problem
        plan = plan_of(self.breeder.classes, groups, replicas, problem.in_force)
        if problem.overrides and violations(plan, problem):
            self.search.evaluations += 1
            return math.inf
        scored = self.search.offer(plan)
        return math.inf if scored is None else scored.prediction.step_s


class GpuGrouping:
    """An arm of level 2: one grouping of tasks with devices counted, and its population."""

    def __init__(self, score: Scorer, tasks: TaskGrouping, sizes: tuple[int, ...]) -> None:
        self.score, self.tasks, self.sizes = score, tasks, sizes
        self.population: list[tuple[float, Genome]] = []
        self.best_s = math.inf
        self._drawn = 0

    def spend(self, evaluations: int) -> None:
        """Search on for so many evaluations, or until the search is halted."""
        for _ in range(evaluations):
            if self.score.search.halted():
                return
            self._step()

    def _step(self) -> None:
        breeder, rng = self.score.breeder, self.score.breeder.rng
        if self._drawn < _RANDOM or not self.population:
            self._drawn += 1
            for _ in range(_DRAWS):
                made = breeder.random(self.tasks.groups, self.sizes, self.tasks.shared)
                if made is not None:
                    self._insert(self.score(made), made)
                    return
            self.score.search.evaluations += 1
            return
        at = min(rng.randrange(len(self.population)), rng.randrange(len(self.population)))
        seconds, parent = self.population[at]
        if rng.random() < _SWAP:
            swap = breeder.swapped_gpus if rng.random() < 0.5 else breeder.swapped_tasklets
            child = swap(parent)
            found = self.score(child)
            if found < seconds:
                self.population.pop(at)
                self._insert(found, child)
            return
        child = breeder.mutated(parent)
        self._insert(self.score(child), child)

    def _insert(self, seconds: float, genome: Genome) -> None:
        if seconds == math.inf or any(g == genome for _, g in self.population):
            return
        self.population.append((seconds, genome))
        self.population.sort(key=lambda p: p[0])
        del self.population[_POPULATION:]
        self.best_s = self.population[0][0]
