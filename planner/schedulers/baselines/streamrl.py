"""`streamrl`: a generation group against everything else, each in one data centre, sized so that both take equally long.

Source: StreamRL (arXiv 2504.15930): disaggregated stream generation and training services, which may be in different data
centres and on different hardware; a profiler-based allocator sizes the two so that the stages are balanced. Here a region is
a data centre: every ordered pair of regions is tried, the training group in one and the generation group in the other, or
both in one. The split is found by bisection on C_T against C_I of the cost model. Inside a group all devices are treated
alike; between the groups they are not: devices go to training as listed, or those with most compute for their HBM bandwidth first
(its heterogeneous deployment), over all devices and over those of the first kind only.

Deviations. Skewness-aware dispatching (a ranker of output lengths that sends long samples to replicas of their own) is
beyond the plan. Its dynamic micro-batch streaming is the cost model's overlap of an async step. Where no pair of regions has
a plan, the groups may span regions. Devices pinned elsewhere are used all the same.
"""

import itertools

from planner.cost.model import Scored
from planner.schedulers.baselines.uniform import Pools, Uniform, balanced_cut
from planner.search import Search


def streamrl(search: Search) -> None:
    """Offer balanced splits for every pair of regions."""
    uniform = Uniform(search)
    regions = list(dict.fromkeys(c.place.region for c in uniform.classes))
    for train, generate in itertools.product(regions, regions):
        _between(search, uniform, (train,), (generate,))
    if search.best is None and len(regions) > 1:
        _between(search, uniform, tuple(regions), tuple(regions))


def _between(search: Search, uniform: Uniform, train: tuple[str, ...], generate: tuple[str, ...]) -> None:
    region, kind = [c.place.region for c in uniform.classes], [c.place.kind for c in uniform.classes]
    listed = tuple(i for i in uniform.order if region[i] in train)
    rest = [i for i in uniform.order if region[i] in generate and region[i] not in train]
    for order in dict.fromkeys((listed, _compute_first(uniform, listed))):
        if search.halted():
            return

        def plan(n: int, order: tuple[int, ...] = order) -> Scored | None:
            pools = uniform.cut(order, n)
            if not rest:
                return uniform.offer_best(pools)
            # Generation is in the other region: what does not train here is idle, but for pins.
            rollout = [len(c.must_roll) for c in uniform.classes]
            for i in rest:
                rollout[i] += 1
            return uniform.offer_best(Pools(train=pools.train, rollout=tuple(rollout)), apart=True)

        low, high = max(1, uniform.pinned), uniform.pinned + len(order) - (0 if rest else 1)
        alike = len(next(([*g] for _, g in itertools.groupby(kind[i] for i in order)), []))  # devices of the first kind
        for most in dict.fromkeys((high, min(high, uniform.pinned + alike))):
            balanced_cut(low, most, plan)


def _compute_first(uniform: Uniform, order: tuple[int, ...]) -> tuple[int, ...]:
    kinds = uniform.problem.cluster.kinds

    def ratio(i: int) -> float:
        kind = kinds[uniform.classes[i].place.kind]
        return kind.peak_flops / kind.hbm_bytes_per_s

    return tuple(sorted(order, key=lambda i: -ratio(i)))
