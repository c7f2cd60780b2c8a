"""A problem with device kinds as a calibration measured their engine and trainer. Pure.

Kernel tables say how fast a card can be; rates say how fast the product's engine and trainer are on it, loops, samplers and
optimiser included. A paced kind has no kernels of its own: its whole figures follow from the rates of its engine and
trainer. Another kind keeps its figures and gets, where the problem's own model was measured, all of `planner.reached`; else,
from the reference models, a floor and an efficiency of decoding and an efficiency of training.
"""

import math
import statistics
import types
from collections.abc import Callable, Mapping, Sequence

from planner.calibration import Calibration, EngineRate, KindTables, TrainerRate
from planner.calibration.sizes import REFERENCE_MODELS
from planner.cluster import Cluster, DeviceKind
from planner.cost.context import context_of
from planner.cost.flops import head_flops, layer_flops, token_flops
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, TrainerShape
from planner.fitting import bounded_line, line
from planner.model import ModelSpec
from planner.problem import Problem
from planner.reached import (
    LEAST,
    MOST,
    SPREAD,
    decoded_like,
    like,
    modelled_step_s,
    own_rates,
    trained_like,
    updated_like,
)
from planner.record import replace
from planner.workload import Lengths, Workload

MOST_OF_KERNELS = (
    1.0  # the same of decoding beside a floor, where kernels were measured: no engine beats its own kernels
)
_HIDDEN_SHARE = 0.01  # of a paced decode step that its memory traffic may take where none was measured
_STEPS = 26  # of a bisection in logarithms
_SAMPLES = 16  # of the batch a trainer rate is held against: the rate of one batch, whatever its size


ASSUMED_DECODE_FLOOR_S: Mapping[str, float] = types.MappingProxyType({"torch": 1.5e-3, "vllm-eager": 6e-4})
"""A layer of a decode step: torch, 64-256 running, 0.6B to 1.7B, 1.4-2.3 ms; vLLM without graphs, 64 running of a model of 30
layers, 20 ms a step. With graphs none."""
ASSUMED_TRAIN_FLOOR_S = 1.0e-3
"""A layer of a micro-batch: gradients of 30 layers took 0.110 s in the median, of which the model gives kernels 0.078."""
ASSUMED_TRAIN_FIXED_S = 0.1
"""A turn: publication and flow's answers, 0.06 and more and about 0.04 s there. A checkpoint is not in it."""
ASSUMED_TURN_S = 2.5e-3
"""For which a decode step of a part waits while another part of its card has its turn. Two H200 took 0.58 s a step and one in halves
0.80 s, of 62 decode steps each (docs/gpu-runs.md); half the card for kernels explains 0.07 s of the 0.22, and this the rest. A trainer's
kernels queue up and wait for no turn of their own."""

OURS = "hexctl profile"  # how the provenance of our own engine's and trainer's rates begins


def kernels_of(calibration: Calibration) -> Calibration:
    """The calibration without the rates of our own engine and trainer: they say nothing of plans for another system, and
    for our own they count as efficiencies (`calibrated`), not a second time. Rates measured otherwise stay."""
    return Calibration(
        kinds=tuple(
            replace(t, engine=(), trainer=()) if t.provenance.source.startswith(OURS) else t for t in calibration.kinds
        )
    )


def calibrated(problem: Problem, calibration: Calibration, engine: str = "torch") -> Problem:
    """The problem with every kind that has rates of ours in the calibration as fast as those say; others as they are.

    `engine`: what generates, as `EngineRate.engine` names it; rates of another one say nothing of it."""
    kinds = dict(problem.cluster.kinds)
    for name, kind in kinds.items():
        tables = _tables_of(problem, kind, calibration, engine)
        if tables is None or (tables.provenance.how == "paced") != kind.paced:
            continue  # a paced device never has a card's figures, nor a card those of a paced device
        if not tables.provenance.source.startswith(OURS):
            continue  # of another engine
        if kind.paced:
            kinds[name] = _paced(problem, kind, tables)
        elif tables.kind == name:  # of a part beside the others: how they share the card is in its rates
            kinds[name] = _reached(problem, kind.undivided(), tables, engine)
        else:
            card = replace(kind.undivided(), name=tables.kind, part_of="")
            found = _reached(problem, card, tables, engine)
            kinds[name] = _taking_turns(
                problem, replace(found, name=name, part_of=kind.part_of).sharing(kind.card_share)
            )
    if kinds == problem.cluster.kinds:
        return problem
    return replace(_with_kinds(problem, kinds), calibration=_with_own_rates(problem, kinds, calibration, engine))


def rates_from(problem: Problem, calibration: Calibration | None, engine: str) -> Mapping[str, str]:
    """By kind of the problem's devices: the kind in whose tables `calibrated` finds rates of ours; absent without any."""
    found = {
        name: None if calibration is None else _tables_of(problem, kind, calibration, engine)
        for name, kind in problem.cluster.kinds.items()
    }
    return {
        n: t.kind for n, t in found.items() if t and t.provenance.source.startswith(OURS) and (t.engine or t.trainer)
    }


def _tables_of(problem: Problem, kind: DeviceKind, calibration: Calibration, engine: str) -> KindTables | None:
    """The tables of a kind: of a part of a card its own where both roles were measured on parts, beside each other, else the
    card's."""
    mine = calibration.of(kind.name)
    if not kind.part_of:
        return mine
    own = None if mine is None else own_rates(problem, mine, engine)
    return mine if own is not None and own.engine and own.trainer else calibration.of(kind.part_of)


def _with_own_rates(
    problem: Problem, kinds: Mapping[str, DeviceKind], calibration: Calibration, engine: str
) -> Calibration | None:
    """What the problem has of kernels, and the decode rates of its own model: where floor and efficiency do not meet those, the
    step is corrected at and near their batches (`Rates.engine_fix`). That is of steps at efficiency 1, so they are brought to it,
    and those of a card, told of a part of it, to what the part gets."""
    kept = problem.calibration or Calibration()
    found: list[KindTables] = []
    for name, kind in kinds.items():
        tables = _tables_of(problem, kind, calibration, engine)
        if tables is None or kind.paced or not tables.provenance.source.startswith(OURS):
            continue
        own = tuple(
            replace(r, tokens_per_s=r.tokens_per_s / kind.rollout_efficiency * _slowed(problem, kind, tables.kind, r))
            for r in own_rates(problem, tables, engine).engine
            if r.phase == "decode"
        )
        if own:
            old = kept.of(name) or KindTables(kind=name, provenance=tables.provenance)
            found.append(replace(old, engine=own))
    return kept.merged(Calibration(kinds=tuple(found))) if found else problem.calibration


def _slowed(problem: Problem, kind: DeviceKind, measured: str, rate: EngineRate) -> float:
    """Share of a measured card's rate that a part of it reaches; 1 where the rate is its own."""
    if kind.name == measured:
        return 1.0
    alone = replace(kind.undivided(), decode_floor_s=kind.decode_floor_s - _turn_floor_s(problem, kind))
    return modelled_step_s(problem, alone, problem.model, rate) / modelled_step_s(problem, kind, problem.model, rate)


def _taking_turns(problem: Problem, kind: DeviceKind) -> DeviceKind:
    """A part of a card with what its decode steps wait for the others' turns, where that was not measured; others as they are."""
    return replace(kind, decode_floor_s=kind.decode_floor_s + _turn_floor_s(problem, kind))


def _turn_floor_s(problem: Problem, kind: DeviceKind) -> float:
    """Of a layer; `rollout_efficiency` divides whole steps, the floor with them."""
    others = round(1 / kind.card_share) - 1 if kind.part_of else 0
    return others * ASSUMED_TURN_S / problem.model.layers * kind.rollout_efficiency


def assumed(problem: Problem, engine: str = "torch") -> Problem:
    """The problem with floors of our trainer and engine on cards that nobody measured: launches and the host's work, as small
    models met them on one H200 (`docs/gpu-runs.md`). They bind where kernels are short, and are little beside a large model's."""
    curves = context_of(problem).rates.curves
    kinds = {
        name: kind
        if kind.paced or curves(kind) is None
        else replace(
            kind,
            decode_floor_s=ASSUMED_DECODE_FLOOR_S.get(engine, 0.0),
            train_floor_s=ASSUMED_TRAIN_FLOOR_S,
            train_fixed_s=ASSUMED_TRAIN_FIXED_S,
        )
        for name, kind in problem.cluster.kinds.items()
    }
    kinds = {name: _taking_turns(problem, kind) for name, kind in kinds.items()}
    return problem if kinds == problem.cluster.kinds else _with_kinds(problem, kinds)


def _with_kinds(problem: Problem, kinds: Mapping[str, DeviceKind]) -> Problem:
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


def _reached(problem: Problem, kind: DeviceKind, tables: KindTables, engine: str) -> DeviceKind:
    """A card or CPU as fast as its engine and trainer were: with the problem's own model where that was measured
    (`planner.reached`), else at the reference models, by our own engine.

    The trainer gets an efficiency only from those. Its rates grow with the work of a micro-batch, so it has a floor too, but all
    of them have as many layers and micro-batches: whether it is one of a layer, a micro-batch or a step they do not say.
    """
    kind = replace(
        kind, decode_floor_s=0.0, prefill_efficiency=1.0, prefill_sample_s=0.0, recompute_efficiency=1.0, recompute_sample_s=0.0,
        slots_used=1.0, train_floor_s=0.0, train_fixed_s=0.0, checkpoint_s=0.0,
    )  # fmt: skip
    own = own_rates(problem, tables, engine)
    kind = updated_like(kind, own.updates)
    decode = [r for r in tables.engine if r.phase == "decode" and r.model in REFERENCE_MODELS]
    trainer = [r for r in tables.trainer if r.model in REFERENCE_MODELS]
    if own.trainer:
        kind = trained_like(problem, kind, own.trainer)
    elif trainer:
        found = [_reached_train(problem, kind, r) for r in trainer]
        kind = replace(kind, train_efficiency=_bounded(math.exp(statistics.fmean(map(math.log, found)))))
    if own.engine:
        return decoded_like(problem, kind, own.engine)
    return _decoding(problem, kind, decode) if decode and engine == "torch" else kind


def _decoding(problem: Problem, kind: DeviceKind, rates: Sequence[EngineRate]) -> DeviceKind:
    """The kind with the floor and the efficiency of its decode steps, of which each takes

        step = layers x floor + modelled work / efficiency.

    The floor is what the engine's host costs whatever the batch (Python, launches without a graph); the two add up, though
    a card may work off one part of a step while its host prepares another, so steps whose work is about as long as their
    floor are predicted up to twice too long. What a step costs once, whatever the layers, counts as the layers' too.
    A measured step never lies below the floor by more than the spread of the measurements: it is no longer than the
    longest of them. Rates of about the same work a layer (`SPREAD`) do not tell the two apart: all is efficiency then.
    """
    points = []
    for r in rates:
        model = _reference(r.model, kind)
        step = modelled_step_s(problem, kind, model, r)
        points.append((step / model.layers, r.running / r.tokens_per_s / model.layers))
    work = [x for x, _ in points]
    if max(work) < SPREAD * min(work):
        found = math.exp(statistics.fmean(math.log(x / y) for x, y in points))
        return replace(kind, rollout_efficiency=_bounded(found))
    most = MOST if context_of(problem).rates.curves(kind) is None else MOST_OF_KERNELS
    floor_s, slowness = bounded_line(points, 1 / most, 1 / LEAST)
    # `rollout_efficiency` divides whole steps (a run's calibration factor does so too), the floor with them.
    return replace(kind, rollout_efficiency=1 / slowness, decode_floor_s=floor_s / slowness)


def _bounded(value: float) -> float:
    return min(MOST, max(LEAST, value))


def _reference(name: str, kind: DeviceKind) -> ModelSpec:
    """A reference model in the dtype it was measured with: float32 on CPUs."""
    spec = REFERENCE_MODELS[name]
    return replace(spec, dtype_bytes=4) if kind.name == "host-cpu" else spec


def _reached_train(problem: Problem, kind: DeviceKind, rate: TrainerRate) -> float:
    half = rate.sequence_tokens // 2
    lengths = Lengths(mean_tokens=max(1, rate.sequence_tokens - half), max_tokens=rate.sequence_tokens)
    workload = Workload(
        prompts_per_step=_SAMPLES // 4,
        responses_per_prompt=4,
        prompt=lengths,
        response=Lengths(mean_tokens=max(1, half), max_tokens=max(1, half)),
    )
    there = like(problem, kind, _reference(rate.model, kind), workload)
    return _efficiency(there, replace(kind, train_efficiency=1.0), context_of(there).batch_tokens / rate.tokens_per_s)


def _efficiency(problem: Problem, kind: DeviceKind, target_s: float) -> float:
    """The training efficiency with which a step on one device takes `target_s`, by bisection; a bound where none does."""

    def step_s(efficiency: float) -> float | None:
        quick = replace(kind, train_efficiency=efficiency)
        there = like(problem, quick, problem.model, problem.workload)
        return _step_s(there.cluster, there, kind.name)

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
