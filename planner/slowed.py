"""Plans for devices that are slower than others of their kind. Pure.

`Problem.speeds` has the share of its kind's speed that a device reaches. A search knows kinds, not single devices, so it is
asked three times: with slow devices as kinds of their own, with everything as if nothing were slow, and with slow devices
that may only generate. Every answer is then held against the one yardstick
`scored`: the cost model's word on the plan, with each placement as fast as its slowest device lets it be. Replicas are told
to the cost model as slow: what a weight update costs them is as long as before, and their staleness bound is a tighter one. A trainer's
seconds are stretched as a whole.
"""

from collections.abc import Callable, Iterable, Mapping

from planner.cost.model import CostModel
from planner.override import Override
from planner.plan import Placement, Plan, Prediction
from planner.problem import Problem
from planner.record import record, replace
from planner.resolve import changed
from planner.solution import Explanation, Feasible, Solution

SHARE_GRAIN = 0.05  # devices whose shares round to the same multiple are of one kind to the search
_TIE = 1e-9

Solve = Callable[[Problem, Callable[[Feasible], None] | None], Solution]


@record
class ScoredPlan:
    """A plan with its rates and shares, and what is predicted of it, on devices as slow as they are."""

    plan: Plan
    prediction: Prediction


def slow_devices(problem: Problem) -> dict[str, float]:
    """Devices of the cluster that are slower than their kind, with the share of its speed that they reach."""
    there = {d.id for d in problem.cluster.devices}
    return {d: share for d, share in problem.speeds.items() if share < 1 and d in there}


def scored(problem: Problem, plan: Plan) -> ScoredPlan | None:
    """A plan on devices as slow as `problem.speeds` says; None where the cost model has no word on it."""
    there = {d.id for d in problem.cluster.devices}
    if any(d not in there for p in plan.placements for d in p.devices):
        return None
    speeds = slow_devices(problem)
    beside = {d for p in plan.sides for d in p.devices}  # a trainer on a kind apart would be another shape
    generate = [p for p in plan.rollouts if not beside & set(p.devices) and _slowest(p, speeds) < 1]
    told, names = _with_kinds(problem, {d: _slowest(p, speeds) for p in generate for d in p.devices}, grain=None)
    found = CostModel(told).evaluate(_relabelled(plan, {d.id: d.kind for d in told.cluster.devices}))
    if found is None:
        return None
    rest = {d: share for d, share in speeds.items() if d in beside}
    back = _with_real_kinds(found.plan, names)
    return slowed(back, found.prediction, rest, synchronous=problem.workload.synchronous)


def slowed(plan: Plan, prediction: Prediction, speeds: Mapping[str, float], *, synchronous: bool) -> ScoredPlan:
    """A scored plan when devices run at these shares of their speed (1 where they are not named).

    A trainer is as slow as its slowest device (too much said of a pipeline whose slow stage has few layers); replicas generate
    what they can, or, where every replica gets as many samples, what the slowest can. Of a step that was predicted to take its
    longer side (asynchronous) or both, each side is stretched; what the step was longer than that stays in proportion.
    """
    if not speeds:
        return ScoredPlan(plan=plan, prediction=prediction)
    training = min((_slowest(p, speeds) for p in plan.sides), default=1.0)
    generating = _generating(plan, speeds)
    join = sum if synchronous else max
    train_s, rollout_s = prediction.train_s / training, prediction.rollout_s / generating
    plain, now = join((prediction.train_s, prediction.rollout_s)), join((train_s, rollout_s))
    stretch = now / plain if plain > 0 else 1.0
    usd = prediction.usd_per_mtok
    return ScoredPlan(
        plan=_with_rates(plan, speeds),
        prediction=replace(
            prediction,
            step_s=prediction.step_s * stretch,
            train_s=train_s,
            rollout_s=rollout_s,
            score_s=prediction.score_s / training,
            tokens_per_s=prediction.tokens_per_s / stretch,
            usd_per_mtok=None if usd is None else usd * stretch,
        ),
    )


def solve_slowed(problem: Problem, solve: Solve, on_incumbent: Callable[[Feasible], None] | None) -> Solution:
    """The best plan found for devices as slow as they are. `solve` answers a problem without slow devices."""
    plain = replace(problem, speeds={})
    best: Feasible | None = None

    def better(found: Feasible) -> Feasible | None:
        told = _told(problem, found)
        if told is None or (best is not None and _worth(problem, told) <= _worth(problem, best) * (1 + _TIE)):
            return best
        return told

    def tell(found: Feasible) -> None:
        told = better(found)
        if on_incumbent is not None and told is not None and told is not best:
            on_incumbent(told)

    def ask(asked: Problem, back: Mapping[str, str]) -> Solution:
        return _restored(solve(asked, lambda f: tell(_restored_plan(f, back))), back)

    apart, names = with_kinds_of_their_own(plain, slow_devices(problem))
    answers = [ask(apart, names)]
    if isinstance(answers[0], Feasible):
        best = better(answers[0])
    answers.append(ask(plain, {}))
    if isinstance(answers[1], Feasible):
        best = better(answers[1])
    only = _only_generating(problem)
    if only:
        answers.append(ask(replace(plain, overrides=(*plain.overrides, *only)), {}))
        if isinstance(answers[2], Feasible):
            best = better(answers[2])
    if best is None:
        return answers[1]
    found = [a for a in answers if isinstance(a, Feasible)]
    # Nothing is faster than its kind, so what bounds the plans as if nothing were slow bounds these too.
    fastest = answers[1] if isinstance(answers[1], Feasible) else best
    return replace(
        best,
        bound_tokens_per_s=max(fastest.bound_tokens_per_s, best.prediction.tokens_per_s),
        bound_scope=fastest.bound_scope,
        evaluations=sum(a.evaluations for a in found),
        finished=all(a.finished for a in found),
    )


def with_kinds_of_their_own(problem: Problem, slow: Mapping[str, float]) -> tuple[Problem, dict[str, str]]:
    """The problem with slow devices as kinds of their own ("L40S at 0.5"), and the real kind of each of those.

    A slow kind has its kind's figures, curves, tables and links, and both efficiencies times the share. No trainer has ranks of two
    kinds here: shares of tokens by kind would not survive the way back.
    """
    found, names = _with_kinds(problem, slow, grain=SHARE_GRAIN)
    force, kinds = problem.in_force, {d.id: d.kind for d in found.cluster.devices}
    return replace(
        found,
        capabilities=replace(problem.capabilities, train_mixed_dp=False),
        in_force=None if force is None else _relabelled(force, kinds),
    ), names


def _with_kinds(problem: Problem, slow: Mapping[str, float], *, grain: float | None) -> tuple[Problem, dict[str, str]]:
    """Slow devices as kinds of their own, by shares in multiples of the grain (None: as they are)."""
    if not slow:
        return problem, {}
    cluster = problem.cluster
    kinds, names, of = dict(cluster.kinds), {}, {}
    for d in cluster.devices:
        if d.id not in slow:
            continue
        share = slow[d.id] if grain is None else max(grain, round(slow[d.id] / grain) * grain)
        kind, name = cluster.kinds[d.kind], f"{d.kind} at {share!r}" if grain is None else f"{d.kind} at {share:.2f}"
        of[d.id], names[name] = name, d.kind
        kinds[name] = kind.at(share, name)
    devices = tuple(replace(d, kind=of.get(d.id, d.kind)) for d in cluster.devices)
    return replace(problem, cluster=replace(cluster, kinds=kinds, devices=devices)), names


def _relabelled(plan: Plan, kinds: Mapping[str, str]) -> Plan:
    """The plan with the kinds that its devices have now; a placement of several kinds keeps its own word."""

    def one(devices: Iterable[str], old: str) -> str:
        found = {kinds.get(d, old) for d in devices}
        return found.pop() if len(found) == 1 else old

    return replace(
        plan,
        placements=tuple(
            replace(
                p,
                kind=one(p.devices, p.kind),
                stages=tuple(replace(s, kind=one(s.devices, s.kind)) for s in p.stages),
            )
            for p in plan.placements
        ),
    )


def _restored(answer: Solution, back: Mapping[str, str]) -> Solution:
    return _restored_plan(answer, back) if isinstance(answer, Feasible) else answer


def _restored_plan(found: Feasible, back: Mapping[str, str]) -> Feasible:
    return replace(found, plan=_with_real_kinds(found.plan, back))


def _with_real_kinds(plan: Plan, back: Mapping[str, str]) -> Plan:
    """The plan with real kinds again."""
    if not back:
        return plan

    def real(kind: str) -> str:
        return "+".join(dict.fromkeys(back.get(k, k) for k in kind.split("+")))

    placements = tuple(
        replace(p, kind=real(p.kind), stages=tuple(replace(s, kind=real(s.kind)) for s in p.stages))
        for p in plan.placements
    )
    return replace(plan, placements=placements)


def _told(problem: Problem, found: Feasible) -> Feasible | None:
    """The answer on devices as slow as they are. Where it was found for fast ones, as many samples as are best run on slow ones."""
    slow = slow_devices(problem)
    free = [replace(p, max_running=None) if slow.keys() & set(p.devices) else p for p in found.plan.rollouts]
    score = scored(problem, replace(found.plan, placements=(*found.plan.sides, *free)))
    if score is None:
        return None
    used = [d for p in score.plan.placements for d in p.devices if d in slow]
    lines = tuple(f"counts {d} at {slow[d]:.2f} of its kind's speed" for d in sorted(used)[:8])
    return replace(
        found,
        plan=score.plan,
        prediction=score.prediction,
        explanation=Explanation(headline=found.explanation.headline, lines=(*found.explanation.lines, *lines)),
    )


def _only_generating(problem: Problem) -> tuple[Override, ...]:
    """Pins of slow devices to generation; an operator's word on a device stands."""
    said = {o.device for o in problem.overrides}
    return tuple(
        Override(device=d, kind="pin", role="rollout", reason="slow")
        for d in sorted(slow_devices(problem))
        if d not in said
    )


def _worth(problem: Problem, found: Feasible) -> float:
    """What plans are compared by: tokens/s less what switching costs, or tokens a dollar."""
    p, usd = found.prediction, found.prediction.usd_per_mtok
    if problem.objective == "throughput_per_dollar" and usd is not None and usd > 0:
        return 1e6 / usd
    if problem.in_force is None or problem.switch_s == 0 or not problem.cluster.devices:
        return p.tokens_per_s
    lost_s = len(changed(found.plan, problem.in_force, problem)) * problem.switch_s
    return p.tokens_per_s * max(0.0, 1 - lost_s / (len(problem.cluster.devices) * problem.switch_horizon_s))


def _slowest(p: Placement, speeds: Mapping[str, float]) -> float:
    return min(speeds.get(d, 1.0) for d in p.devices)


def _generating(plan: Plan, speeds: Mapping[str, float]) -> float:
    """Share of what the replicas generate together that is left."""
    rates = [(p.rate_tokens_per_s or 0.0, _slowest(p, speeds)) for p in plan.rollouts]
    if plan.even_shares and any(rate > 0 for rate, _ in rates):
        return min(rate * share for rate, share in rates if rate > 0) / min(rate for rate, _ in rates if rate > 0)
    whole = sum(rate for rate, _ in rates)
    return sum(rate * share for rate, share in rates) / whole if whole > 0 else 1.0


def _with_rates(plan: Plan, speeds: Mapping[str, float]) -> Plan:
    """The plan with the rates of slowed placements, and replicas' shares in proportion."""
    placements = [
        replace(
            p,
            rate_tokens_per_s=None if p.rate_tokens_per_s is None else p.rate_tokens_per_s * _slowest(p, speeds),
            strong=p.strong and _slowest(p, speeds) == 1,
            share=p.share if p.share is None or plan.even_shares else p.share * _slowest(p, speeds),
        )
        for p in plan.placements
    ]
    total = sum(p.share for p in placements if p.share is not None)
    if total > 0:
        placements = [p if p.share is None else replace(p, share=p.share / total) for p in placements]
    return replace(plan, placements=tuple(placements))
