"""A proven upper bound on the throughput of any plan of the plan space.

The first cell of `planner.scan` bounds every plan, and so does the lowest box of its frontier where that cell is not reached
in `_STEPS` looks. With one device a role there is nothing to relax and the bound is the optimum.
"""

from collections.abc import Callable, Sequence

from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.step import Group, solve_period
from planner.cost.training import StageShape, TrainerShape
from planner.record import record
from planner.scan import scan_of
from planner.sidescan import SideScan
from planner.space import DeviceClass, device_classes, replica_shapes

_MARGIN = 1e-9
_STEPS = 200  # looks at the scan's frontier: the bound is the best by then

EXACT = "exact: every plan of one training device and single-device replicas"
RELAXED = (
    "single-kind replicas with TP inside a machine; one trainer of at most two kind-blocks in pipeline; every split of "
    "the devices; concurrency at halvings of the memory limit; where devices lie is relaxed, but for their regions"
)
GROUPS = (
    "single-kind replicas with TP inside a machine; all other tasks in one group or two, each a pipeline of at most two "
    "kind-blocks, every division of tasks and devices; concurrency at halvings of the memory limit; where devices lie is "
    "relaxed, but that a group no region holds crosses one border, and that new weights come from where the actor trains"
)
ONE_GROUP = GROUPS.replace("in one group or two, each a pipeline", "in one group, a pipeline")
COARSE = RELAXED + "; the last ranges of data-parallel degrees are taken together"
MIXED = "; or one stage with data-parallel ranks of two kinds, tokens in proportion to compute"
MERGED = "; the closest regions are taken for one"


@record
class Bound:
    """No plan has a shorter step than `step_s`."""

    step_s: float
    tokens_per_s: float
    scope: str


def upper_bound(
    cost: CostModel, should_stop: Callable[[], bool] = lambda: False, *, steps: int | None = None
) -> Bound | None:
    """The bound; None when not even the relaxed problem has a plan. Once `should_stop`, what is proven by then; with `steps` 0
    what is proven already, which after a search by `hex` is more than before."""
    looks = _STEPS if steps is None else steps
    classes = device_classes(cost.problem)
    caps = cost.problem.capabilities
    single = caps.train_max_devices == 1 and caps.rollout_max_tp == 1 and caps.rollout_max_pp == 1
    if single and caps.task_groups == 1 and not cost.shares_devices:
        step, scope = _single(cost, classes), EXACT
    else:
        scan = scan_of(cost)
        found = scan.bound_s(looks, should_stop)
        step = None if found is None else found[0]
        if isinstance(scan, SideScan):
            scope = GROUPS if scan.sides.whole else ONE_GROUP
        else:
            scope = RELAXED if found is None or found[1] else COARSE
            if len(cost.side_tasks) > 1:
                scope += "; all other tasks in one group"
            scope += MERGED if any(len(regions) > 1 for regions in scan.pools.sites) else ""
        scope += MIXED if caps.train_mixed_dp and scope != EXACT else ""
    if step is None:
        return None
    step *= 1 - _MARGIN
    return Bound(step_s=step, tokens_per_s=cost.rules.work_tokens / step, scope=scope)


def _single(cost: CostModel, classes: Sequence[DeviceClass]) -> float | None:
    """Each class in turn gives the trainer; all other devices may roll out."""
    cluster, best = cost.problem.cluster, None
    pinned = sum(len(c.must_train) for c in classes)
    for t, c in enumerate(classes):
        if pinned - len(c.must_train) or len(c.must_train) > 1 or not (c.must_train or c.free):
            continue
        kind = cluster.kinds[c.place.kind]
        stage = StageShape(
            kind=kind.name,
            dp=1,
            tp=1,
            layers=cost.problem.model.layers,
            spread=Spread(nodes=1, local=local_link(cluster, kind)),
        )
        trainer = cost.trainer(TrainerShape(stages=(stage,)))
        if trainer is None:
            continue
        groups: list[Group] = []
        links = cost.widest_links((c.place,), [other.place for other in classes])
        for i, other in enumerate(classes):
            free = len(other.free) - (1 if i == t and not c.must_train else 0)
            link = links[other.place]
            offers = tuple(o for s in replica_shapes(cost, classes, other.place.kind) for o in cost.offers(s, link))
            for count, mandatory in ((len(other.must_roll), True), (free, False)):
                if count and (offers or mandatory):
                    groups.append(Group(offers=offers, count=count, mandatory=mandatory))
        solved = solve_period(trainer.train_s, groups, cost.rules)
        if solved is not None and (best is None or solved[0] < best):
            best = solved[0]
    return best
