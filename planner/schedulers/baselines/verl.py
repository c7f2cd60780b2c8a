"""`verl`: the hybrid engine and its disaggregated recipes, mixed GPUs treated alike.

Sources: HybridFlow (arXiv 2409.19256) for the hybrid engine, in which generation and all other tasks take turns on the same
devices, resharded from the training layout to one TP for generation; and verl's documentation, "Recipe: Fully Async Policy
Trainer" (docs/advance/fully_async.md, October 2025), for disaggregation: the user says how many devices train
(`trainer.nnodes`) and how many generate (`rollout.nnodes`), its published runs have equal halves (16:16, 32:32, 64:64),
and it advises to move devices until both sides take equally long.

In sync modes where the problem lets generation share devices, everything runs on all of them. Elsewhere the devices are
cut once, as listed: the published equal halves first, then a grid of eighths (what a user who follows that advice would
find), and the best counts. TP, PP and DP are the best uniform ones by the cost model, as by a patient user.

In sync modes every rollout worker gets an equal part of the batch (verl splits it so), and the slowest paces.

Deviations. A trainer of more kinds than the plan space allows
uses the kinds with most devices. Offloading, which lets models take turns in memory, is not modelled for training tasks:
models of the group lie side by side.
"""

from planner.schedulers.baselines.uniform import Pools, Uniform
from planner.search import Search

_EIGHTHS = (4, 3, 5, 2, 6, 1, 7)


def verl(search: Search) -> None:
    """Offer the co-located plans where that is allowed, else those of a grid of splits."""
    uniform = Uniform(search, even=search.cost.rules.sync)
    if search.cost.shares_devices:
        _colocated(search, uniform)
        if search.best is not None:
            return
    splits = [round(uniform.size * n / 8) for n in _EIGHTHS]
    for train in dict.fromkeys(max(1, min(uniform.size - 1, n)) for n in splits):
        if search.halted():
            return
        uniform.offer_best(uniform.cut(uniform.order, train))


def _colocated(search: Search, uniform: Uniform) -> None:
    pools: Pools = uniform.cut(uniform.order, uniform.size)
    everywhere = [c.size for c in uniform.classes]
    for group in uniform.trainers(pools.train):
        if search.halted():
            return
        uniform.offer_each(everywhere, group, level=1)
