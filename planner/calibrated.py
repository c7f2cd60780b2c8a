"""A problem with device kinds as a calibration measured their engine and trainer. Pure.

Kernel tables say how fast a card can be; rates say how fast the product's engine and trainer are on it, loops, samplers and
optimiser included. A paced kind has no kernels of its own: its whole figures follow from the rates of its engine and
trainer. Another kind keeps its figures and gets two efficiencies, measured over modelled at the reference models' shapes.
"""

import math
import statistics
from collections.abc import Callable, Sequence

from planner.calibration import Calibration, EngineRate, KindTables, TrainerRate
from planner.calibration.sizes import REFERENCE_MODELS
from planner.cluster import Cluster, DeviceKind
from planner.cost.context import context_of
from planner.cost.decode import ReplicaShape, decode_step_s
from planner.cost.flops import head_flops, layer_flops, token_flops
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, TrainerShape
from planner.model import ModelSpec
from planner.problem import Problem
from planner.record import replace
from planner.workload import Lengths, Workload

LEAST, MOST = 1 / 64, 4.0  # bounds of a measured efficiency
_HIDDEN_SHARE = 0.01  # of a paced decode step that its memory traffic may take where none was measured
_STEPS = 26  # of a bisection in logarithms
_SAMPLES = 16  # of the batch a trainer rate is held against: the rate of one batch, whatever its size


OURS = "hexctl profile"  # how the provenance of our own engine's and trainer's rates begins


def kernels_of(calibration: Calibration) -> Calibration:
    """The calibration without the rates of our own engine and trainer: they say nothing of plans for another system, and
    for our own they count as efficiencies (`calibrated`), not a second time. Rates measured otherwise stay."""
    return Calibration(
        kinds=tuple(
            replace(t, engine=(), trainer=()) if t.provenance.source.startswith(OURS) else t for t in calibration.kinds
        )
    )


def calibrated(problem: Problem, calibration: Calibration) -> Problem:
    """The problem with every kind that has rates of ours in the calibration as fast as those say; others as they are."""
    kinds = dict(problem.cluster.kinds)
    for name, kind in kinds.items():
        tables = calibration.of(name)
        if tables is None or (tables.provenance.how == "paced") != kind.paced:
            continue  # a paced device never has a card's figures, nor a card those of a paced device
        if not tables.provenance.source.startswith(OURS):
            continue  # of another engine
        kinds[name] = _paced(problem, kind, tables) if kind.paced else _reached(problem, kind, tables)
    if kinds == problem.cluster.kinds:
        return problem
    return replace(problem, cluster=replace(problem.cluster, kinds=kinds))


def _paced(problem: Problem, kind: DeviceKind, tables: KindTables) -> DeviceKind:
    """A paced kind from its rates: launches from the step without samples, compute from what a sample adds to a step or from
    prefill, whichever is slower (the model knows one rate for both), and memory so fast that it is not felt."""
    model, m = problem.model, context_of(problem).m
    decode = [r for r in tables.engine if r.phase == "decode"]
    prefill = [r for r in tables.engine if r.phase == "prefill"]
    if decode:
        if prefill:
            n = float(prefill[-1].context)
            flops = model.layers * layer_flops(model, n, n * n) + head_flops(model, 1)
            kind = replace(kind, peak_flops=flops * prefill[-1].tokens_per_s / n)
        step_s, sample_s = line([(float(r.running), r.running / r.tokens_per_s) for r in decode])
        most = max(r.running for r in decode)
        if sample_s > 0:
            kind = replace(kind, peak_flops=min(kind.peak_flops, token_flops(model) / sample_s))
        felt_s = _HIDDEN_SHARE * (step_s + sample_s * most)
        hbm = max(most * m.context * model.kv_bytes_per_token, model.weight_bytes) / felt_s
        kind = replace(kind, hbm_bytes_per_s=max(hbm, kind.hbm_bytes_per_s), launch_s=step_s / model.layers)
    if tables.trainer:
        rate = statistics.median(t.tokens_per_s for t in tables.trainer)
        target = context_of(problem).batch_tokens / rate
        kind = replace(kind, train_efficiency=_efficiency(problem, kind, target))
    return kind


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(a, b) of y = a + b x with the least squared relative errors, neither negative."""
    if len(points) == 1:
        return points[0][1], 0.0
    weights = [1 / y**2 for _, y in points]
    sw = sum(weights)
    mx = sum(w * x for w, (x, _) in zip(weights, points, strict=True)) / sw
    my = sum(w * y for w, (_, y) in zip(weights, points, strict=True)) / sw
    sxx = sum(w * (x - mx) ** 2 for w, (x, _) in zip(weights, points, strict=True))
    sxy = sum(w * (x - mx) * (y - my) for w, (x, y) in zip(weights, points, strict=True))
    b = max(0.0, sxy / sxx) if sxx > 0 else 0.0
    a = my - b * mx
    if a >= 0:
        return a, b
    swxx = sum(w * x * x for w, (x, _) in zip(weights, points, strict=True))
    return 0.0, sum(w * x * y for w, (x, y) in zip(weights, points, strict=True)) / swxx


def _reached(problem: Problem, kind: DeviceKind, tables: KindTables) -> DeviceKind:
    """A card or CPU with the efficiencies that its engine and trainer reached at the reference models."""
    decode = [r for r in tables.engine if r.phase == "decode" and r.model in REFERENCE_MODELS]
    trainer = [r for r in tables.trainer if r.model in REFERENCE_MODELS]
    if decode:
        found = [r.tokens_per_s / _modelled_decode(problem, kind, r) for r in decode]
        kind = replace(kind, rollout_efficiency=_bounded(math.exp(statistics.fmean(map(math.log, found)))))
    if trainer:
        found = [_reached_train(problem, kind, r) for r in trainer]
        kind = replace(kind, train_efficiency=_bounded(math.exp(statistics.fmean(map(math.log, found)))))
    return kind


def _bounded(value: float) -> float:
    return min(MOST, max(LEAST, value))


def _like(problem: Problem, kind: DeviceKind, model: ModelSpec, workload: Workload) -> Problem:
    """The problem's cost model for another model and workload, on that one kind."""
    cluster = replace(problem.cluster, kinds={**problem.cluster.kinds, kind.name: kind})
    return replace(problem, cluster=cluster, model=model, workload=workload, overrides=(), in_force=None, caps=())


def _reference(name: str, kind: DeviceKind) -> ModelSpec:
    """A reference model in the dtype it was measured with: float32 on CPUs."""
    spec = REFERENCE_MODELS[name]
    return replace(spec, dtype_bytes=4) if kind.name == "host-cpu" else spec


def _modelled_decode(problem: Problem, kind: DeviceKind, rate: EngineRate) -> float:
    # Two tokens of response have a mean context of one beyond the prompt.
    lengths = (
        Lengths(mean_tokens=max(1, rate.context - 1), max_tokens=rate.context),
        Lengths(mean_tokens=2, max_tokens=2),
    )
    workload = Workload(prompts_per_step=1, responses_per_prompt=1, prompt=lengths[0], response=lengths[1])
    ctx = context_of(_like(problem, kind, _reference(rate.model, kind), workload))
    shape = ReplicaShape(kind=kind.name, tp=rate.tp, pp=rate.pp)
    return rate.running / decode_step_s(ctx, shape, rate.running)


def _reached_train(problem: Problem, kind: DeviceKind, rate: TrainerRate) -> float:
    half = rate.sequence_tokens // 2
    lengths = Lengths(mean_tokens=max(1, rate.sequence_tokens - half), max_tokens=rate.sequence_tokens)
    workload = Workload(
        prompts_per_step=_SAMPLES // 4,
        responses_per_prompt=4,
        prompt=lengths,
        response=Lengths(mean_tokens=max(1, half), max_tokens=max(1, half)),
    )
    like = _like(problem, kind, _reference(rate.model, kind), workload)
    return _efficiency(like, replace(kind, train_efficiency=1.0), context_of(like).batch_tokens / rate.tokens_per_s)


def _efficiency(problem: Problem, kind: DeviceKind, target_s: float) -> float:
    """The training efficiency with which a step on one device takes `target_s`, by bisection; a bound where none does."""

    def step_s(efficiency: float) -> float | None:
        quick = replace(kind, train_efficiency=efficiency)
        like = _like(problem, quick, problem.model, problem.workload)
        return _step_s(like.cluster, like, kind.name)

    return _solved(step_s, target_s)


def _step_s(cluster: Cluster, problem: Problem, name: str) -> float | None:
    spread = Spread(nodes=1, local=local_link(cluster, cluster.kinds[name]))
    stage = StageShape(kind=name, dp=1, tp=1, layers=problem.model.layers, spread=spread)
    cost = CostModel(problem).trainer(TrainerShape(stages=(stage,)))
    return None if cost is None else cost.train_s


def _solved(step_s: Callable[[float], float | None], target_s: float) -> float:
    low, high = math.log(1e-4), math.log(1e4)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        found = step_s(math.exp(middle))
        if found is None:
            return 1.0  # one device does not hold it: nothing can be said
        low, high = (middle, high) if found > target_s else (low, middle)
    return math.exp(high)
