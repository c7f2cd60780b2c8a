"""`deap`: plain evolutionary search over whole plans with the DEAP library (an extra: `pip install "hexctl[deap]"`).

Source: Fortin et al., "DEAP: Evolutionary Algorithms Made Easy", JMLR 13 (2012), and its documentation. A generational
scheme with one elite on the genes of `genome`: tournaments of three, uniform crossover, uniform mutation of about two
genes. Fitness is the plan's tokens/s, 0 where there is none. Rates are the library's customary ones, not tuned.

DEAP's operators draw from the module `random`, which everybody shares. Here each runs with a `random.Random` of our own
under that name, seeded with `problem.seed`: nothing global is read or written, so searches may run side by side.
"""

from collections.abc import Callable, Sequence
from random import Random
from types import FunctionType
from typing import Any

from planner.errors import InvalidInput
from planner.schedulers.baselines.genome import Genome
from planner.schedulers.baselines.uniform import offer_valid
from planner.search import Search

_POPULATION = 40
_CROSSOVER, _MUTATION = 0.5, 0.3  # probabilities
_TOURNAMENT = 3
_MUTATED_GENES = 2.0  # of a mutated individual, on average
_STABLE = 100  # generations without a better plan that end the search


def deap_search(search: Search) -> None:
    """Offer the plans of generation after generation until halted or stable. InvalidInput where DEAP is not installed."""
    algorithms, toolbox, individual = _library(search)
    genome, rng = Genome(search), Random(search.problem.seed)
    highest = list(genome.highest)
    toolbox.register("mate", _drawing_from(rng, toolbox.operators.cxUniform), indpb=0.5)
    toolbox.register(
        "mutate",
        _drawing_from(rng, toolbox.operators.mutUniformInt),
        low=0,
        up=highest,
        indpb=min(1.0, _MUTATED_GENES / len(highest)),
    )
    some = _drawing_from(rng, toolbox.operators.selRandom)
    select = _drawing_from(rng, toolbox.operators.selTournament, selRandom=some)
    vary = _drawing_from(rng, algorithms.varAnd)

    def score(genes: Any) -> bool:
        """Whether the search goes on."""
        plan = genome.decode(genes)
        if plan is None:
            search.evaluations += 1
        found = None if plan is None else offer_valid(search, plan)
        genes.fitness.values = (0.0 if found is None else found.prediction.tokens_per_s,)
        return not _over(search)

    population = [individual(rng.randint(0, n) for n in highest) for _ in range(_POPULATION)]
    unchanged = 0
    while unchanged < _STABLE:
        best = search.best
        for genes in population:
            if not genes.fitness.valid and not score(genes):
                return
        elite = toolbox.operators.selBest(population, 1)
        parents = select(population, _POPULATION - 1, tournsize=_TOURNAMENT)
        population = [*map(toolbox.clone, elite), *vary(parents, toolbox, _CROSSOVER, _MUTATION)]
        unchanged = 0 if search.best is not best else unchanged + 1


def _over(search: Search) -> bool:
    return search.halted() or search.evaluations >= search.budget.evaluations


def _library(search: Search) -> tuple[Any, Any, Callable[..., Any]]:
    """DEAP's algorithms, a toolbox, and the type of individuals (made here: DEAP's `creator` makes them global)."""
    try:
        from deap import algorithms, base, tools
    except ImportError as e:
        raise InvalidInput(
            "the scheduler deap needs the DEAP library",
            where="scheduler",
            got=str(e),
            hint='pip install "hexctl[deap]"',
        ) from e

    class Throughput(base.Fitness):  # type: ignore[misc]
        weights = (1.0,)

    class Individual(list[int]):
        def __init__(self, genes: Sequence[int]) -> None:
            super().__init__(genes)
            self.fitness = Throughput()

    toolbox = base.Toolbox()
    toolbox.operators = tools
    return algorithms, toolbox, Individual


def _drawing_from(rng: Random, operator: Callable[..., Any], **others: Any) -> Callable[..., Any]:
    """A DEAP operator whose `random` is `rng`."""
    assert isinstance(operator, FunctionType)
    names = {**operator.__globals__, "random": rng, **others}
    return FunctionType(operator.__code__, names, operator.__name__, operator.__defaults__, operator.__closure__)
