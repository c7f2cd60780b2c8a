"""`random`: plans drawn at random until the budget ends, the floor that any search must clear.

Every gene of `genome` is drawn uniformly and independently from a generator seeded with `problem.seed`; plans that the judge
refuses are drawn again and count as evaluations. Uniform over genomes is not uniform over plans: plans that more genomes
decode to are likelier.
"""

from random import Random

from planner.schedulers.baselines.genome import Genome
from planner.schedulers.baselines.uniform import offer_valid
from planner.search import Search

_BARREN = 5000  # draws without a single valid plan that end the search


def random_plans(search: Search) -> None:
    """Offer random plans until the search is halted, or until hope of a first one is given up."""
    genome, rng = Genome(search), Random(search.problem.seed)
    while not search.halted():
        if search.best is None and search.evaluations >= _BARREN:
            return
        plan = genome.decode([rng.randint(0, n) for n in genome.highest])
        if plan is None:
            search.evaluations += 1
        else:
            offer_valid(search, plan)
