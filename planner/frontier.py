"""The frontier of price and throughput: the mixes that no other mix beats in both."""

import math
from collections.abc import Callable

from planner.desk import RentalDesk
from planner.objectives import WithinBudget
from planner.record import record
from planner.rental import Rental

_LESS = 1 - 1e-9


@record
class Frontier:
    """Rentals by rising price and throughput. Each is the cheapest of the mixes with its throughput, and no mix of the market
    at its price or below does more than its `bound`."""

    points: tuple[Rental, ...]
    scope: str
    finished: bool  # False: stopped early, cheaper points may be missing


def frontier(
    desk: RentalDesk,
    *,
    most_usd_per_h: float,
    spot: bool = False,
    on_point: Callable[[Rental], None] | None = None,
    least_gain: float = 0.0,
) -> Frontier:
    """All points up to a price, from the dearest down: the best within a budget, then within a little less than it costs.

    With `least_gain` a dearer point is kept only where it does more by that share than the next cheaper one.
    """
    points: list[Rental] = []
    budget, finished = most_usd_per_h, True
    while budget > 0:
        found = desk.answer(WithinBudget(usd_per_h=budget), spot=spot)
        if not isinstance(found, Rental):
            finished = finished and not desk.stopped()
            break
        finished = finished and found.finished
        points.append(found)
        if on_point is not None:
            on_point(found)
        usd = found.plan.prediction.usd_per_h or 0.0
        if desk.stopped() or usd == 0:
            break
        budget = usd * _LESS
    kept: list[Rental] = []
    for point in reversed(points):
        rate = kept[-1].achieved if kept else -math.inf
        if not kept or point.achieved > rate * (1 + max(least_gain, 1e-9)):
            kept.append(point)
    return Frontier(points=tuple(kept), scope=f"mixes within ${most_usd_per_h:,.2f}/h", finished=finished)
