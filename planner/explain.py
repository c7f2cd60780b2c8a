"""Why this plan, in words, all from the cost model."""

import itertools
from collections import Counter

from planner.bound import Bound
from planner.cost.arrivals import slowest_of
from planner.cost.host import host_use, usable_bytes
from planner.cost.model import CostModel, Scored
from planner.cost.routes import egress_usd
from planner.cost.training import TrainerCost
from planner.cost.update import update_bytes
from planner.plan import Placement, Plan, Prediction, Stage
from planner.search import trained_on
from planner.solution import Explanation

UNEVEN = 0.1  # a rate that was so much lower in one of its spells is said to have been
_TELLING = 0.05  # share of something from which a part of it is told


def explain(cost: CostModel, scored: Scored, bound: Bound, runner_up: Scored | None = None) -> Explanation:
    """A headline that says who waits for whom, then reasons, and the next best way to train where one was seen."""
    p = scored.prediction
    train, rollouts = scored.plan.train, scored.plan.rollouts
    assert train is not None
    unit = _seconds
    if cost.rules.sync:
        head = f"one after the other: rollout {unit(p.rollout_s)}, then training {unit(p.train_s)}"
    elif p.step_s > max(p.train_s, p.rollout_s) * (1 + 1e-6):
        head = f"the staleness bound paces the step: {unit(p.step_s)} for training {unit(p.train_s)} and rollout {unit(p.rollout_s)}"
    elif p.train_s > p.rollout_s * 1.02:
        head = f"training is the bottleneck: {unit(p.train_s)} a step, rollout would take {unit(p.rollout_s)}"
    elif p.rollout_s > p.train_s * 1.02:
        head = f"rollout is the bottleneck: {unit(p.rollout_s)} a step, training would take {unit(p.train_s)}"
    else:
        head = f"training and rollout are balanced at {unit(p.step_s)} a step"
    lines = [*(_group_line(cost, p, c, len(scored.sides) > 1) for p, c in scored.sides), _rollout_line(rollouts)]
    lines += (
        _long_samples(rollouts) + _shared_prompts(cost, rollouts) + _uneven(cost, rollouts, p) + _checkpoints(cost, p)
    )
    lines += _sharing(scored.plan) + _weights(cost, scored.plan, p.update_s) + _host(cost, scored.plan)
    lines += _roles(cost, train, rollouts)
    if p.egress_usd_per_step:
        lines.append(f"${p.egress_usd_per_step:.2f} of egress a step, counted in $/Mtok")
    if runner_up is not None:
        counts = Counter(trained_on(cost, runner_up.plan))
        other = " + ".join(f"{n} x {k}" for k, n in counts.items())
        slower = runner_up.prediction.step_s / p.step_s - 1
        lines.append(
            f"next best: training on {other}, "
            + (f"{slower:.1%} slower{_why_slower(runner_up, scored)}" if slower >= 5e-4 else "as fast")
        )
    gap = max(0.0, 1 - p.tokens_per_s / bound.tokens_per_s)
    if gap < 1e-6:
        lines.append("no plan of this plan space is faster")
    else:
        lines.append(f"no plan of this plan space is more than {gap / (1 - gap):.1%} faster")
    return Explanation(headline=head, lines=tuple(lines))


def _why_slower(other: Scored, best: Scored) -> str:
    """The side that loses it the time."""
    a, b = other.prediction, best.prediction
    sides = (("training", a.train_s, b.train_s), ("rollout", a.rollout_s, b.rollout_s))
    word, mine, theirs = max(sides, key=lambda s: s[1] - s[2])
    return f": its {word} takes {_seconds(mine)} instead of {_seconds(theirs)}" if mine > theirs else ""


def _seconds(s: float) -> str:
    return f"{s:.3g} s" if s < 100 else f"{s:.0f} s"


def _count(devices: tuple[str, ...], kind: str) -> str:
    return f"{len(devices)} x {kind}"


def _stage_words(cost: CostModel, s: Stage) -> str:
    """A stage on its devices; where its DP ranks are not alike, what each takes of a batch."""
    shape = f"(dp {s.dp}, tp {s.tp}, {s.layers} layers)"
    ranks = Counter(
        (cost.places[s.devices[i * s.tp]].kind, s.token_shares[i] if s.token_shares else 1 / s.dp) for i in range(s.dp)
    )
    if {kind for kind, _ in ranks} == {s.kind} and not s.token_shares:
        return f"{_count(s.devices, s.kind)} {shape}"
    on = " + ".join(f"{n * s.tp} x {kind}" for (kind, _), n in ranks.items())
    shares = ", ".join(
        f"{n} ranks on {kind} take {share:.1%} each" if n > 1 else f"1 rank on {kind} takes {share:.1%}"
        for (kind, share), n in ranks.items()
    )
    return f"{on} side by side {shape}: of a batch's tokens {shares}"


def _group_line(cost: CostModel, train: Placement, t: TrainerCost, several: bool) -> str:
    alike = [(len(tuple(run)), what) for what, run in itertools.groupby(_stage_words(cost, s) for s in train.stages)]
    parts = " -> ".join(f"{n} stages of {what}" if n > 1 else what for n, what in alike)
    what = "training" if train.role == "train" else "scoring"
    if several or len(train.tasks) > 1:
        what = " + ".join(x.replace("_", " ") for x in train.tasks)
    words = [
        f"{what} on {parts}",
        f"{t.micro_batches} micro-batch{'' if t.micro_batches == 1 else 'es'}"
        + (", recomputing activations" if t.recompute else ""),
    ]
    if t.communication_s > 0.02 * t.train_s:
        words.append(f"communication {t.communication_s / t.train_s:.0%} of it")
    if t.bubble_s > 0.02 * t.train_s:
        words.append(f"pipeline bubbles {t.bubble_s / t.train_s:.0%}")
    return ", ".join(words)


def _long_samples(rollouts: tuple[Placement, ...]) -> list[str]:
    """Who takes the long samples, where replicas differ."""
    strong = Counter(r.kind for r in rollouts if r.strong)
    if sum(strong.values()) == len(rollouts):
        return []
    return ["long samples go first to the replicas on " + " and ".join(f"{n} x {k}" for k, n in strong.items())]


def _shared_prompts(cost: CostModel, rollouts: tuple[Placement, ...]) -> list[str]:
    """What the samples of a group share on a replica, where it is a twentieth of what running ones hold."""
    shared, m = cost.context.shared, cost.moments
    running = max(r.max_running or 1 for r in rollouts)
    if shared.spared_tokens(running) < _TELLING * running * m.context:
        return []
    each = m.prompt - shared.each_spared * shared.tokens
    return [
        f"{shared.group} samples of a prompt share {shared.tokens:.0f} of its {m.prompt:.0f} tokens on a replica: {each:.0f} are "
        f"prefilled a sample, and {running} running ones hold {shared.held_groups(running):.0f} prompts"
    ]


def _uneven(cost: CostModel, rollouts: tuple[Placement, ...], p: Prediction) -> list[str]:
    """Kinds whose engine was slower for a while when it was measured, and what such a while makes of rollout: a prediction is of
    the mean."""
    known = cost.problem.calibration
    shares = {
        kind: min((r.slowest for r in tables.engine if r.slowest is not None), default=1.0)
        for kind in dict.fromkeys(cost.problem.cluster.kinds[r.kind].measured_as for r in rollouts)
        if known is not None and (tables := known.of(kind)) is not None
    }
    uneven = {kind: share for kind, share in shares.items() if share < 1 - UNEVEN}
    if not uneven:
        return []
    words = " and ".join(f"{1 - share:.0%} slower on {kind}" for kind, share in uneven.items())
    most_s = p.rollout_s / min(uneven.values())
    return [
        f"the engine was {words} for seconds when measured: while it is, rollout takes up to {_seconds(most_s)} a step"
    ]


def _checkpoints(cost: CostModel, p: Prediction) -> list[str]:
    """What checkpoints come to, where it is a twentieth of training."""
    every = cost.problem.workload.checkpoint_every
    if every is None or p.checkpoint_s < _TELLING * p.train_s:
        return []
    often = "each step" if every == 1 else f"one in {every} steps"
    return [
        f"checkpoints are {_seconds(p.checkpoint_s)} of a step's training ({often}: {_seconds(p.checkpoint_s * every)} each)"
    ]


def _sharing(plan: Plan) -> list[str]:
    """Devices that take turns."""
    others = {d for p in plan.sides for d in p.devices}
    both = sum(d in others for r in plan.rollouts for d in r.devices)
    return [f"{both} devices generate and do other tasks, in turns"] if both else []


def _weights(cost: CostModel, plan: Plan, update_s: float) -> list[str]:
    """How new weights travel where replicas are in several regions: each border is crossed once, to a relay."""
    train = plan.train
    assert train is not None
    source, target = cost.places_of(train.devices), cost.places_of(d for r in plan.rollouts for d in r.devices)
    if len({p.region for p in (*source, *target)}) == 1:
        return []
    hops = cost.weight_tree(source, target)
    every = cost.context.weights_full_every
    size = update_bytes(cost.problem.model, every, cost.context.a)
    over = sorted({f"{h.source.region} -> {h.target.region}" for h in hops if h.crosses})
    if not over:
        return ["weights stay inside the regions they are trained in"]
    usd = egress_usd(hops, size)
    paid = f", ${usd:.2f} of egress an update" if usd else ""
    each = (
        f"{size / 1e9:.1f} GB each"
        if every == 1
        else f"{size / 1e9:.2g} GB each in the mean: all weights once in {every}"
    )
    slowest = slowest_of([*cost.arrivals(source, target).values()]).over
    last = (
        f"{slowest.source.region} -> {slowest.target.region}" if slowest.crosses else f"inside {slowest.target.region}"
    )
    return [
        f"weights cross {', '.join(over)} once an update ({each}), then spread inside{paid}; the last replica has them after "
        f"{_seconds(update_s)}, the slowest hop being {last}"
    ]


def _host(cost: CostModel, plan: Plan) -> list[str]:
    """Host memory by machine: those that need as much and have as much together."""
    ctx, alike = cost.context, dict[tuple[str, str], list[str]]()
    for node, use in host_use(ctx, plan).items():
        most = usable_bytes(ctx, node)
        said = "not declared" if most is None else f"of {most / 1e9:.0f} GB that a run may take"
        alike.setdefault((f"{use.total / 1e9:.1f} GB", said), []).append(node)
    parts = [
        f"{need} ({said}) on {', '.join(nodes[:3])}" + (f" and {len(nodes) - 3} more" if len(nodes) > 3 else "")
        for (need, said), nodes in alike.items()
    ]
    shown = [*parts[:4], *([f"{len(parts) - 4} other amounts elsewhere"] if len(parts) > 4 else [])]
    return ["host memory needed: " + "; ".join(shown)] if parts else []


def _rollout_line(rollouts: tuple[Placement, ...]) -> str:
    groups: dict[tuple[str, int, int, int], list[Placement]] = {}
    for r in rollouts:
        groups.setdefault((r.kind, r.tp, r.pp, r.max_running or 0), []).append(r)
    parts = []
    for (kind, tp, pp, running), rs in groups.items():
        shape = "" if tp * pp == 1 else f" of tp {tp}" + (f" pp {pp}" if pp > 1 else "")
        rate, share = rs[0].rate_tokens_per_s or 0.0, sum(r.share or 0.0 for r in rs)
        parts.append(
            f"{len(rs)} x {kind}{shape} at {running} running ({rate:,.0f} tokens/s each, {share:.0%} of the samples)"
        )
    return "rollout on " + "; ".join(parts)


def _roles(cost: CostModel, train: Placement, rollouts: tuple[Placement, ...]) -> list[str]:
    """The figures that decide roles: memory bandwidth for generation, FLOP/s for training."""
    cluster = cost.problem.cluster
    roll = {r.kind for r in rollouts}
    out = []
    trains = {cost.places[d].kind for d in train.devices}
    for a in sorted(trains):
        for b in sorted(roll - trains):
            ka, kb = cluster.kinds[a], cluster.kinds[b]
            flops, hbm = ka.peak_flops / kb.peak_flops, ka.hbm_bytes_per_s / kb.hbm_bytes_per_s
            if flops > hbm:
                out.append(
                    f"{a} trains and {b} generates: {a} has {flops:.2g}x the FLOP/s of {b}, {hbm:.2g}x its memory bandwidth"
                )
    used = set(train.devices) | {d for r in rollouts for d in r.devices}
    idle = [d.id for d in cluster.devices if d.id not in used]
    if idle:
        shown = ", ".join(idle[:4]) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        out.append(f"idle: {shown}")
    return out
