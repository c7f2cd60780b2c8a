"""Rates of a kind by its measured curves, drawn once per (kind, model, TP) and looked up afterwards.

Kinds of the catalogue have curves unless they are paced, a CPU, or the user's own name; for all others the formula of
`planner.cost.flops` with its assumptions holds. A kind's own `train_efficiency` multiplies either. Curves are of whole cards:
kernels of a kind whose devices take turns on one get its `card_share` of them.
"""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from planner.calibration.curves import Curves
from planner.calibration.fitted import curves_with
from planner.calibration.grid import Array, Correction, correction
from planner.calibration.records import Calibration, EngineRate
from planner.cluster import DeviceKind
from planner.cost.kernels import decode_attention_s, head_s, prefill_attention_s, products, products_s, reduce_s
from planner.model import ModelSpec

_LOG2_ROWS = np.arange(0.0, 20.01, 0.5)
DTYPES = {1: "fp8"}  # bytes of a weight -> dtype of the products; bf16 for all others


class Rates:
    """The curves behind one cost model. Answers are remembered in the instance."""

    def __init__(self, calibration: Calibration | None = None) -> None:
        self.calibration = calibration
        self._curves: dict[str, Curves | None] = {}
        self._products: dict[tuple[str, ModelSpec, int], tuple[Array, list[float]]] = {}
        self._engines: dict[tuple[str, ModelSpec, int, int], Correction | None] = {}
        self._attention: dict[tuple[str, ModelSpec, int, float], float] = {}

    def curves(self, kind: DeviceKind) -> Curves | None:
        """The curves of a kind; None where the assumptions' formula holds."""
        name = kind.name  # a cluster has one kind of each name
        if name not in self._curves:
            self._curves[name] = None if kind.paced else curves_with(kind, self.calibration)
        return self._curves[name]

    def product_rate(self, kind: DeviceKind, model: ModelSpec, tp: int, rows: ArrayLike) -> Array:
        """FLOP/s that one device gets on the products of a layer of `rows` tokens.

        Never falling with rows, though measured kernels dip in places: bounds of the search count on it, and a trainer may
        split its rows.
        """
        table, _ = self._product_table(kind, model, tp)
        out: Array = np.exp2(np.interp(np.log2(np.maximum(rows, 1.0)), _LOG2_ROWS, table)) * kind.card_share
        return out

    def product_rate_of(self, kind: DeviceKind, model: ModelSpec, tp: int, rows: float) -> float:
        """`product_rate` of one number of rows: the same interpolation without arrays, which the search asks for often."""
        return self._product_rate_of(kind, model, tp, rows) * kind.card_share

    def _product_rate_of(self, kind: DeviceKind, model: ModelSpec, tp: int, rows: float) -> float:
        """That of the whole card."""
        _, steps = self._product_table(kind, model, tp)
        x = min(max(0.0, 2 * math.log2(max(rows, 1.0))), len(steps) - 1.0)
        i = min(int(x), len(steps) - 2)
        return float(2.0 ** (steps[i] + (x - i) * (steps[i + 1] - steps[i])))

    def _product_table(self, kind: DeviceKind, model: ModelSpec, tp: int) -> tuple[Array, list[float]]:
        """log2 of the rate at `_LOG2_ROWS`, as an array and as a list."""
        key = (kind.name, model, tp)
        if key not in self._products:
            curves = self.curves(kind)
            assert curves is not None, "asked only where there are curves"
            at = np.exp2(_LOG2_ROWS)
            flops = 2 * at * sum(n * k for n, k in products(model, tp))
            seconds = products_s(curves, model, at, tp, DTYPES.get(model.dtype_bytes, "bf16"))
            table = np.log2(np.maximum.accumulate(flops / seconds))
            self._products[key] = table, table.tolist()
        return self._products[key]

    def attention_rate(self, kind: DeviceKind, model: ModelSpec, tp: int, tokens: float) -> float:
        """FLOP/s that one device gets on causal attention over sequences of `tokens`."""
        key = (kind.name, model, tp, tokens)
        if key not in self._attention:
            curves = self.curves(kind)
            assert curves is not None, "asked only where there are curves"
            flops = 2 * tokens**2 * model.heads / tp * model.head_dim
            self._attention[key] = flops / float(prefill_attention_s(curves, model, 4, tokens, tp)) * 4
        return self._attention[key] * kind.card_share

    def engine_fix(
        self, kind: DeviceKind, model: ModelSpec, tp: int, pp: int, modelled: Callable[[EngineRate], float]
    ) -> Correction | None:
        """Measured over modelled seconds of a decode step, by running samples; None where the engine was not measured with a
        model of that size (within 2 %) on that shape. `modelled` gives tokens/s at a point. Of parts of a card only what was
        measured on parts."""
        tables = None if self.calibration is None or kind.paced else self.calibration.of(kind.measured_as)
        if tables is None or not tables.engine:
            return None
        key = (kind.name, model, tp, pp)
        if key not in self._engines:
            mine = [
                p
                for p in tables.engine
                if (p.phase, p.tp, p.pp) == ("decode", tp, pp) and abs(p.params / model.params - 1) < 0.02
            ]
            rates = [1 / p.tokens_per_s for p in mine], [1 / modelled(p) for p in mine]
            self._engines[key] = correction([[p.running] for p in mine], *rates) if mine else None
        return self._engines[key]

    def decode_layer_s(self, kind: DeviceKind, model: ModelSpec, tp: int, batch: float, context: float) -> float:
        """Seconds of a card for one layer for one new token of each of `batch` samples, all-reduces apart."""
        curves = self.curves(kind)
        assert curves is not None, "asked only where there are curves"
        flops = 2 * batch * sum(n * k for n, k in products(model, tp))
        attention = decode_attention_s(curves, model, batch, context, tp=tp, kv_bytes=model.dtype_bytes)
        return flops / self._product_rate_of(kind, model, tp, batch) + float(attention)

    def head_s(self, kind: DeviceKind, model: ModelSpec, tp: int, rows: float) -> float:
        """Seconds of a card of a TP group for the vocabulary projection."""
        curves = self.curves(kind)
        assert curves is not None, "asked only where there are curves"
        return float(head_s(curves, model, rows, tp))

    def reduce_s(self, kind: DeviceKind, model: ModelSpec, tp: int, rows: float) -> float | None:
        """Seconds of the engine's all-reduce inside a machine; None where the kind's host was not measured so."""
        curves = self.curves(kind)
        found = None if curves is None else reduce_s(curves, model, rows, tp)
        return None if found is None else float(found)
