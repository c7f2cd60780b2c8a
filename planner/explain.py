"""Why this plan, in words, all from the cost model."""

from collections import Counter

from planner.bound import Bound
from planner.cost.model import CostModel, Scored
from planner.plan import Placement
from planner.search import trained_on
from planner.solution import Explanation


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
    lines = [_training_line(cost, scored, train), _rollout_line(rollouts)]
    lines += _roles(cost, train, rollouts)
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


def _training_line(cost: CostModel, scored: Scored, train: Placement) -> str:
    parts = " -> ".join(f"{_count(s.devices, s.kind)} (dp {s.dp}, tp {s.tp}, {s.layers} layers)" for s in train.stages)
    t = scored.trainer
    words = [
        f"training on {parts}",
        f"{t.micro_batches} micro-batches" + (", recomputing activations" if t.recompute else ""),
    ]
    if t.communication_s > 0.02 * t.train_s:
        words.append(f"communication {t.communication_s / t.train_s:.0%} of it")
    if t.bubble_s > 0.02 * t.train_s:
        words.append(f"pipeline bubbles {t.bubble_s / t.train_s:.0%}")
    return ", ".join(words)


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
    for a in sorted({s.kind for s in train.stages}):
        for b in sorted(roll - {s.kind for s in train.stages}):
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
