"""The cost model beside a run: how long measured work should have taken, and problems with calibration factors in them. Pure."""

import functools

from planner.cluster import Cluster, DeviceKind
from planner.cost.decode import ReplicaShape, begin_s, decode_step_s
from planner.cost.model import CostModel
from planner.cost.network import Spread, local_link
from planner.cost.training import StageShape, TrainerShape
from planner.plan import Placement, Plan
from planner.problem import Problem
from planner.record import replace
from planner.slowed import scored
from runtime.core.calibrating import Factors, Modelled, factor_for
from runtime.core.observation import Work

MOST_STRETCH = 8.0  # a training efficiency stays within that of its factor, whatever part of the step it is about


class CostedWork:
    """Implements `Model` over one problem's cost model; `plan` is the one in force."""

    def __init__(self, problem: Problem, plan: Plan | None) -> None:
        self._cost, self._plan = CostModel(problem), plan
        # Replicas are alike and batches whole numbers: of a large fleet's blocks nearly all were asked before.
        self._step_s = functools.cache(functools.partial(decode_step_s, self._cost.context))
        self._begin_s = functools.cache(functools.partial(begin_s, self._cost.context))

    def decode(self, kind: str, devices: int, work: Work) -> Modelled | None:
        """Seconds of these decode steps at their mean batch, and of prefilling what was prefilled."""
        ctx = self._cost.context
        if kind not in ctx.cluster.kinds or not work.steps:
            return None
        shape = ReplicaShape(kind=kind, tp=devices)
        seconds = work.steps * self._step_s(shape, max(1, round(work.tokens / work.steps)))
        # Of a calibration: a plan predicts with it, so a factor must not repeat it.
        seconds /= ctx.kind(kind).rollout_efficiency
        seconds += self._prefilled_s(shape, work)
        return Modelled(seconds=seconds, tokens_per_s=work.tokens / seconds)

    def _prefilled_s(self, shape: ReplicaShape, work: Work) -> float:
        """Of the samples that began, as many as these tokens come from, and of prefixes that were computed anew, which is what else
        was prefilled: both as the plan counts them."""
        ctx = self._cost.context
        m, used = ctx.m, ctx.kind(shape.kind).slots_used
        begun = min(work.tokens / m.response, work.prefill_tokens / m.prompt)
        again = (work.prefill_tokens - begun * m.prompt) / m.context
        held = max(1, round(work.tokens / work.steps / used))
        return begun * self._begin_s(shape) + again * self._cost.level(shape, held).recompute_s / (held * used)

    def train(self, devices: tuple[str, ...], work: Work) -> Modelled | None:
        """Seconds of these steps as the plan in force lays them out, in proportion to their tokens."""
        placement = None if self._plan is None else self._plan.train
        if placement is None or not placement.stages or set(placement.devices) != set(devices):
            return None
        if any(d not in self._cost.places for d in placement.devices):
            return None
        cost = self._cost.trainer(self._cost.trainer_shape(placement))
        if cost is None:
            return None
        seconds = cost.train_s * work.tokens / self._cost.context.batch_tokens
        return Modelled(seconds=seconds, tokens_per_s=self._cost.rules.work_tokens / cost.train_s)


def corrected(problem: Problem, factors: Factors) -> Problem:
    """The problem with every kind as fast as measured: generation times divided by its rollout factor, training times by its
    train factor. Without factors the problem itself."""
    if not factors:
        return problem
    rest = _rest_share(problem)
    kinds = {
        name: replace(
            _stretched(kind, _stretch(factor_for(factors, name, "train"), rest)),
            rollout_efficiency=kind.rollout_efficiency * factor_for(factors, name, "rollout"),
        )
        for name, kind in problem.cluster.kinds.items()
    }
    return replace(problem, cluster=replace(problem.cluster, kinds=kinds))


def _stretched(kind: DeviceKind, stretch: float) -> DeviceKind:
    """The kind with products, floors and the fixed part of a training step so many times as fast."""
    return replace(
        kind,
        train_efficiency=kind.train_efficiency * stretch,
        train_floor_s=kind.train_floor_s / stretch,
        train_fixed_s=kind.train_fixed_s / stretch,
    )


def _stretch(factor: float, rest: float) -> float:
    """By how much products, floors and the fixed part must be faster for a whole step to be `factor` times as fast.

    Of a step that takes 1 they take 1 - rest, and the rest (elementwise kernels, the optimiser, communication) stays. From
    (1 - rest) / e + rest = 1 / factor follows e.
    """
    left = 1.0 / factor - rest
    stretch = (1.0 - rest) / left if left > 0 else float("inf")
    return min(factor * MOST_STRETCH, max(factor / MOST_STRETCH, stretch))


def _rest_share(problem: Problem) -> float:
    """Share of a step of the trainer in force that does not scale with those; 0 without a trainer that can be costed."""
    train = None if problem.in_force is None else problem.in_force.train
    if train is None or not train.stages or any(s.kind not in problem.cluster.kinds for s in train.stages):
        return 0.0
    plain, twice = _step_s(problem, train, 1.0), _step_s(problem, train, 2.0)
    if plain is None or twice is None or not plain > twice:
        return 0.0
    return max(0.0, 1.0 - 2.0 * (plain - twice) / plain)


def _step_s(problem: Problem, train: Placement, stretch: float) -> float | None:
    """Seconds of a step of that trainer; where devices of it are gone, of one laid out alike in one machine."""
    kinds = {name: _stretched(k, stretch) for name, k in problem.cluster.kinds.items()}
    cluster = replace(problem.cluster, kinds=kinds)
    model = CostModel(replace(problem, cluster=cluster))
    there = all(d in model.places for d in train.devices)
    cost = model.trainer(model.trainer_shape(train) if there else _alike(cluster, train))
    return None if cost is None else cost.train_s


def _alike(cluster: Cluster, train: Placement) -> TrainerShape:
    stages = tuple(
        StageShape(
            kind=s.kind,
            dp=s.dp,
            tp=s.tp,
            layers=s.layers,
            spread=Spread(nodes=1, local=local_link(cluster, cluster.kinds[s.kind])),
        )
        for s in train.stages
    )
    links = tuple(local_link(cluster, cluster.kinds[s.kind]) for s in train.stages[1:])
    return TrainerShape(stages=stages, links=links)


def rescored(problem: Problem, plan: Plan) -> float | None:
    """Predicted trained tokens/s of a plan under a problem it was not made for, on devices as slow as that says; None where it
    cannot be scored any more."""
    found = scored(problem, plan)
    return None if found is None else found.prediction.tokens_per_s
