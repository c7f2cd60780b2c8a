"""What a mix of machines could do at most if work flowed freely: bounds for whole boxes of mixes at once, in microseconds.

Give every device the better of its two uses: training at `s` tokens/s or rollout at `r` tokens/s. A plan that does F
tokens/s has sum s t >= F and sum r (x - t) >= F over its devices, so for any weight w in [0, 1]

    F <= sum over devices of max(w s, (1 - w) r)

and the least over some weights is a bound. Under a budget the right side is a fractional knapsack. Links, memory, staleness,
whole replicas and the layout of the trainer are all relaxed: this orders and prunes the search and is far looser than
`planner.bound`, which settles single mixes.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.cost.decode import ReplicaShape
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, layer_s
from planner.record import record
from planner.space import tp_degrees

_WEIGHTS = 33
_SLACK = 1 + 1e-9
Array = NDArray[np.float64]


@record
class DeviceRates:
    """The most one device of a kind can do, in trained tokens/s; 0 where the model cannot be served or trained so."""

    train: float
    rollout: float


def device_rates(cost: CostModel, kinds: Iterable[str]) -> Mapping[str, DeviceRates]:
    """The rates of each kind, in any shape the plan space knows."""
    return {k: DeviceRates(train=_train_rate(cost, k), rollout=_rollout_rate(cost, k)) for k in kinds}


def _train_rate(cost: CostModel, kind: str) -> float:
    """One layer on the whole batch is quickest a device without DP; heads, bubbles and borders come on top."""
    problem = cost.problem
    spread = Spread(nodes=1, local=local_link(problem.cluster, problem.cluster.kinds[kind]))
    least = min(
        layer_s(cost.context, StageShape(kind=kind, dp=1, tp=t, layers=1, spread=spread), share=1.0, recompute=False)
        * t
        for t in tp_degrees(problem, problem.capabilities.train_max_tp)
    )
    return cost.rules.work_tokens / (least * problem.model.layers)


def _rollout_rate(cost: CostModel, kind: str) -> float:
    caps, link = cost.problem.capabilities, cost.problem.cluster.same_kind.bulk()
    rates = [
        offer.level.rate_tokens_per_s / shape.devices
        for tp in tp_degrees(cost.problem, caps.rollout_max_tp)
        for pp in range(1, caps.rollout_max_pp + 1)
        for shape in (ReplicaShape(kind=kind, tp=tp, pp=pp),)
        for offer in cost.offers(shape, link)
    ]
    return max(rates, default=0.0)


class Fluid:
    """Bounds over boxes of mixes: `low` to `high` machines of each type."""

    def __init__(
        self,
        rates: Mapping[str, DeviceRates],
        holds: Sequence[Mapping[str, int]],
        prices: Sequence[float],
        *,
        always: Mapping[str, int],
        always_usd_per_h: float,
    ) -> None:
        """`holds`: devices by kind of a machine of each type; `always`: those that every mix has."""
        inner = [i / (_WEIGHTS - 1) for i in range(_WEIGHTS)]
        even = [r.rollout / (r.train + r.rollout) for r in rates.values() if r.train + r.rollout > 0]
        weights = sorted({*inner, *even})
        self._prices: Array = np.array(prices, dtype=float)
        self._base_usd = always_usd_per_h
        self._gain: Array = np.array([[_gain(rates, h, w) for h in holds] for w in weights]).reshape(len(weights), -1)
        self._base: Array = np.array([_gain(rates, always, w) for w in weights])
        worth = self._gain / np.maximum(self._prices, 1e-12)
        self._order: NDArray[np.intp] = np.argsort(-worth, axis=1, kind="stable")

    def _laid_out(self, low: Sequence[int], high: Sequence[int]) -> tuple[Array, float, Array, Array]:
        """(gain, price) of the low corner, and (gains, prices) of what may be added, best value first, by weight."""
        lo, extra = np.array(low, dtype=float), np.array(high, dtype=float) - np.array(low, dtype=float)
        gain = self._base + self._gain @ lo
        usd = self._base_usd + float(self._prices @ lo)
        gains = np.take_along_axis(self._gain * extra, self._order, axis=1)
        prices = (self._prices * extra)[self._order]
        return gain, usd, gains, prices

    def most_tokens_per_s(self, low: Sequence[int], high: Sequence[int], usd_per_h: float) -> float:
        """Most tokens/s of any mix of the box within that price; minus infinity where the low corner exceeds it."""
        gain, usd, gains, prices = self._laid_out(low, high)
        if usd > usd_per_h * _SLACK:
            return -np.inf
        if np.isinf(usd_per_h):
            return float((gain + gains.sum(axis=1)).min()) * _SLACK
        part = _filled(prices, usd_per_h - usd)
        return float((gain + (part * gains).sum(axis=1)).min()) * _SLACK

    def least_usd_per_h(self, low: Sequence[int], high: Sequence[int], tokens_per_s: float) -> float:
        """The least price at which some mix of the box could do that many tokens/s; infinite where none could."""
        gain, usd, gains, prices = self._laid_out(low, high)
        if ((gain + gains.sum(axis=1)) * _SLACK < tokens_per_s).any():
            return np.inf
        part = _filled(gains, (tokens_per_s / _SLACK - gain)[:, None])
        return float(usd + (part * prices).sum(axis=1).max()) / _SLACK

    def most_per_usd(self, low: Sequence[int], high: Sequence[int]) -> float:
        """Most tokens/s for each USD/h of any mix of the box."""
        gain, usd, gains, prices = self._laid_out(low, high)
        tokens = np.cumsum(np.concatenate([gain[:, None], gains], axis=1), axis=1)
        cost = np.cumsum(np.concatenate([np.full((len(gain), 1), usd), prices], axis=1), axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(cost > 0, tokens / cost, np.where(tokens > 0, np.inf, 0.0))
        return float(ratio.max(axis=1).min()) * _SLACK


def _gain(rates: Mapping[str, DeviceRates], holds: Mapping[str, int], weight: float) -> float:
    return sum(n * max(weight * rates[k].train, (1 - weight) * rates[k].rollout) for k, n in holds.items())


def _filled(sizes: Array, room: Array | float) -> Array:
    """The part of each item, in order, that fits into the room."""
    before = np.cumsum(sizes, axis=1) - sizes
    with np.errstate(divide="ignore", invalid="ignore"):
        part = np.where(sizes > 0, (room - before) / np.where(sizes > 0, sizes, 1.0), 1.0)
    return np.clip(part, 0.0, 1.0)
