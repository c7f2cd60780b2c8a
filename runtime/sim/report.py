"""`simulate`: a problem and a plan in, the figures of a simulated run out."""

import itertools
import statistics
from collections import Counter
from collections.abc import Callable, Sequence

from planner.plan import Plan
from planner.problem import Problem
from runtime.sim.decoding import PHASES
from runtime.sim.figures import StepSeen
from runtime.sim.options import Options, SimulatedRun, Staleness
from runtime.sim.run import Run
from runtime.sim.timeline import Timeline

FEWEST_STEPS = 3  # after the warm-up, for steady figures


def simulate(
    problem: Problem,
    plan: Plan | None = None,
    options: Options | None = None,
    *,
    timeline: Timeline | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    on_progress: Callable[[int, float], None] | None = None,
) -> SimulatedRun:
    """Carry out `plan` (None: one is made by `options.scheduler`) in virtual time. The same seed gives the same run.

    `should_stop` is asked in every window; what was reached until then is answered. `on_progress` is told steps and virtual
    seconds. InvalidInput for what the planner refuses.
    """
    run = Run(problem, plan, options or Options(), timeline)
    return summary(run, run.go(should_stop, on_progress))


def summary(run: Run, ended: str) -> SimulatedRun:
    """The figures of a run, over or not."""
    flow, books = run.flow, run.flow.books
    steps = books.steps
    ages: Counter[int] = Counter()
    for s in steps:
        ages.update(s.ages)
    done = books.trained_tokens + books.masked_tokens
    now = flow.now_s
    usd_per_h = run.usd / now * 3600 if run.usd_known and now > 0 else None
    rollout = dict(books.rollout_s)
    for spent in flow.decoding.spent:
        for name, seconds in zip(PHASES, spent, strict=True):
            rollout[name] += float(seconds)
    steady = _steady(steps, run.rules.policy.eta)
    return SimulatedRun(
        ended=ended,
        steps=flow.version,
        time_s=now,
        tokens_per_s=done / now if now > 0 else 0.0,
        steady_tokens_per_s=None if steady is None else steady[0],
        steady_step_s=None if steady is None else steady[1],
        usd_per_h=usd_per_h,
        usd_per_mtok=run.usd / done * 1e6 if usd_per_h is not None and done else None,
        generated_tokens=books.generated_tokens + flow.partial_tokens(),
        trained_tokens=books.trained_tokens,
        masked_tokens=books.masked_tokens,
        in_flight_tokens=flow.in_flight_tokens(),
        wasted_tokens=dict(books.wasted),
        redone_tokens=books.redone_tokens,
        recomputed_tokens=books.recomputed_tokens,
        redone_steps=books.redone_steps,
        preempted=books.preempted,
        staleness=staleness_of(ages),
        group_staleness_mean=statistics.fmean(s.group_age_mean for s in steps) if steps else None,
        trainer_s=dict(books.trainer_s),
        rollout_s=rollout,
        running_mean=books.running_area / books.time_s if books.time_s > 0 else 0.0,
        latency_mean_s=books.sample_seconds / books.finished if books.finished else None,
        step_s=tuple(b.ended_s - a.ended_s for a, b in itertools.pairwise(steps)),
        plans=tuple(run.plans),
        predicted=run.predicted,
    )


def staleness_of(ages: Counter[int]) -> Staleness:
    """Mean, 95th percentile (the lowest age that at least 95 % of tokens do not exceed) and maximum."""
    total = sum(ages.values())
    if not total:
        return Staleness(mean=None, p95=None, most=None)
    below, p95 = 0, 0
    for age in sorted(ages):
        below, p95 = below + ages[age], age
        if below * 100 >= 95 * total:
            break
    return Staleness(
        mean=sum(a * n for a, n in ages.items()) / total, p95=float(p95), most=max(a for a, n in ages.items() if n)
    )


def _steady(steps: Sequence[StepSeen], eta: int) -> tuple[float, float] | None:
    """(tokens/s, seconds a step) over the steps after the warm-up: the first fifth, at least eta + 2 steps."""
    after = steps[max(len(steps) // 5, eta + 2) :]
    if len(after) < FEWEST_STEPS + 1:
        return None
    seconds = after[-1].ended_s - after[0].ended_s
    tokens = sum(s.trained_tokens + s.masked_tokens for s in after[1:])
    return tokens / seconds, seconds / (len(after) - 1)
