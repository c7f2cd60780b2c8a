"""`areal`: separate pools in a fixed 3:1 ratio, kinds ignored.

Source: AReaL (arXiv 2505.24298) and its v0.3 notes: generation and training on devices of their own, asynchronous. Three
quarters of the devices for inference is the ratio its experiments are known by; the passage itself was not checked, and
public launch scripts differ (`sglang.d4p1m1+d2p2m1` halves eight GPUs). Inference servers come first in the list of
devices, the trainer takes the rest. TP, PP and DP are the best uniform ones by the cost model.

Deviations. Where the trainer does not fit on a quarter, it gets as many devices more as it needs (a user would have to give
them), and fewer where no replica fits on three quarters. All scoring models lie beside the actor. What an update does to
running samples is what the workload's `kv_on_update` says, for this scheduler as for the others.
"""

from planner.schedulers.baselines.uniform import Uniform
from planner.search import Search

_TRAINING_SHARE = 0.25


def areal(search: Search) -> None:
    """Offer the plans of the fixed split; of the nearest split that has one where there is none."""
    uniform = Uniform(search)
    wanted = max(1, round(uniform.size * _TRAINING_SHARE))
    others = [*range(wanted + 1, uniform.size), *range(wanted - 1, 0, -1)]
    last_first = uniform.order[::-1]
    for train in (wanted, *others):
        if search.halted() or search.best is not None:
            return
        uniform.offer_best(uniform.cut(last_first, train))
