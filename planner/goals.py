"""The goals of a search over mixes (`planner.mixes`): what a mix is worth, and at most, for each objective."""

import math
from collections.abc import Callable

from planner.fluid import Fluid
from planner.market import Counts
from planner.mixes import Box, Machines
from planner.record import record
from planner.solution import Feasible

_REACHED = 1 - 1e-9


def _affordable(box: Box, machines: Machines, usd_per_h: float) -> Box | None:
    """The box without what no mix of it within that price has; None where nothing is left."""
    left = usd_per_h * (1 + 1e-12) - machines.usd_per_h(box.low)
    if left < 0:
        return None
    high = tuple(
        b if p <= 0 or left == math.inf else min(b, a + math.floor(left / p))
        for a, b, p in zip(box.low, box.high, machines.prices, strict=True)
    )
    return Box(low=box.low, high=high)


@record
class MostTokens:
    """Most tokens/s within a price. A box's affordable upper corner stands for all of it."""

    machines: Machines
    fluid: Fluid
    usd_per_h: float

    def clip(self, box: Box) -> Box | None:
        """No more of a type than the rest of the budget pays for."""
        return _affordable(box, self.machines, self.usd_per_h)

    def optimistic(self, box: Box, tokens_per_s: float) -> float | None:
        """Tokens/s, or None where nothing can be done."""
        most = min(tokens_per_s, self.fluid.most_tokens_per_s(box.low, box.high, self.usd_per_h))
        return most if most > 0 else None

    def corner(self, box: Box) -> Counts | None:
        """The upper corner where it can be paid."""
        return box.high if self.machines.usd_per_h(box.high) <= self.usd_per_h * (1 + 1e-12) else None

    def score(self, counts: Counts, found: Feasible) -> float | None:
        """Tokens/s."""
        return found.prediction.tokens_per_s


@record
class LeastPrice:
    """The lowest price that reaches a throughput. Scores are prices, negated."""

    machines: Machines
    fluid: Fluid
    tokens_per_s: float

    def clip(self, box: Box) -> Box | None:
        """Every mix may do."""
        return box

    def optimistic(self, box: Box, tokens_per_s: float) -> float | None:
        """The lowest price in the box, None where it cannot reach the throughput."""
        if tokens_per_s < self.tokens_per_s * _REACHED:
            return None
        least = max(
            self.machines.usd_per_h(box.low),
            self.fluid.least_usd_per_h(box.low, box.high, self.tokens_per_s * _REACHED),
        )
        return -least if least < math.inf else None

    def corner(self, box: Box) -> Counts | None:
        """A box of one mix."""
        return box.low if box.low == box.high else None

    def score(self, counts: Counts, found: Feasible) -> float | None:
        """The price, where the throughput is reached."""
        reached = found.prediction.tokens_per_s >= self.tokens_per_s * _REACHED
        return -self.machines.usd_per_h(counts) if reached else None


@record
class MostPerUsd:
    """Most tokens/s for each USD/h at no less than a throughput and no more than a price."""

    machines: Machines
    fluid: Fluid
    floor_tokens_per_s: float
    limit_usd_per_h: float

    def clip(self, box: Box) -> Box | None:
        """No more of a type than the rest of the limit pays for."""
        return _affordable(box, self.machines, self.limit_usd_per_h)

    def optimistic(self, box: Box, tokens_per_s: float) -> float | None:
        """The best ratio in the box, None where it cannot reach the floor."""
        floor = self.floor_tokens_per_s * _REACHED
        most = min(tokens_per_s, self.fluid.most_tokens_per_s(box.low, box.high, self.limit_usd_per_h))
        if most < floor or most <= 0:
            return None
        usd = self.machines.usd_per_h(box.low)
        return min(self.fluid.most_per_usd(box.low, box.high), tokens_per_s / usd if usd > 0 else math.inf)

    def corner(self, box: Box) -> Counts | None:
        """A box of one mix."""
        return box.low if box.low == box.high else None

    def score(self, counts: Counts, found: Feasible) -> float | None:
        """The ratio, egress counted, where the floor is reached."""
        p = found.prediction
        rate, usd = p.tokens_per_s, self.machines.usd_per_h(counts) + p.egress_usd_per_step / p.step_s * 3600
        if rate < self.floor_tokens_per_s * _REACHED:
            return None
        return rate / usd if usd > 0 else math.inf


@record
class LeastTotal:
    """The least total cost of a job of `tokens` at no less than a throughput; scores are USD, negated.

    `total_usd` tells a planned mix's cost, egress and interruptions included, and None where it is late. Machines alone cost
    at least tokens / (tokens per USD), which bounds it.
    """

    per_usd: MostPerUsd
    tokens: float
    total_usd: Callable[[Counts, Feasible], float | None]

    def clip(self, box: Box) -> Box | None:
        """As its ratio."""
        return self.per_usd.clip(box)

    def optimistic(self, box: Box, tokens_per_s: float) -> float | None:
        """What machines cost at least, None where the job would be late."""
        ratio = self.per_usd.optimistic(box, tokens_per_s)
        return None if ratio is None else -self.tokens / 3600 / ratio

    def corner(self, box: Box) -> Counts | None:
        """A box of one mix."""
        return self.per_usd.corner(box)

    def score(self, counts: Counts, found: Feasible) -> float | None:
        """The total cost, where the job is in time."""
        usd = self.total_usd(counts, found)
        return None if usd is None else -usd
