"""A simulated run as a document and as text, always labelled. Pure."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hexctl.cli.render.text import DASH, duration, money, number, pairs, share, table
from runtime.sim.options import SimulatedRun

_PLANS_SHOWN = 12


def simulated_document(run: SimulatedRun, name: str, wall_s: float) -> dict[str, Any]:
    """The keys of `hexctl simulate --output json`: the fields of a simulated run, and how long it took to simulate."""
    fields = {f.name: getattr(run, f.name) for f in dataclasses.fields(run)}
    predicted = run.predicted
    return {
        **fields,
        "name": name,
        "wall_s": wall_s,
        "staleness": dataclasses.asdict(run.staleness),
        "plans": [{"at_s": at_s, "why": why} for at_s, why in run.plans],
        "step_s": list(run.step_s),
        "predicted": None if predicted is None else dataclasses.asdict(predicted),
    }


def simulated_text(run: SimulatedRun, name: str, wall_s: float) -> str:
    """For people: what was reached, the model's prediction beside it, where time and tokens went."""
    head = (
        f"simulated: {name}, {run.steps} steps in {duration(run.time_s)} of virtual time ({wall_s:.1f} s to simulate)"
    )
    if run.ended != "steps":
        head += f"\nended before its steps: {run.ended}"
    parts = [head, _beside(run), _where(run)]
    if len(run.plans) > 1:
        shown = [(duration(at_s), why) for at_s, why in run.plans[:_PLANS_SHOWN]]
        more = len(run.plans) - len(shown)
        parts.append(table(("AT", "PLAN"), shown) + (f"\nand {more} more" if more else ""))
    return "\n\n".join(parts)


def _beside(run: SimulatedRun) -> str:
    p = run.predicted
    rows = [
        ("tokens/s", number(run.tokens_per_s), number(run.steady_tokens_per_s), number(p.tokens_per_s) if p else DASH),
        ("step", duration(_mean(run.step_s)), duration(run.steady_step_s), duration(p.step_s) if p else DASH),
        ("$/h", money(run.usd_per_h), "", money(p.usd_per_h) if p else DASH),
        ("$/Mtok", money(run.usd_per_mtok), "", money(p.usd_per_mtok) if p else DASH),
        (
            "staleness of groups, mean",
            number(run.group_staleness_mean, 2),
            "",
            number(p.staleness_mean, 2) if p else DASH,
        ),
    ]
    return table(("", "simulated", "after warm-up", "predicted"), rows, right=(1, 2, 3))


def _where(run: SimulatedRun) -> str:
    s = run.staleness
    done = run.trained_tokens + run.masked_tokens
    wasted = ", ".join(f"{why} {number(n)}" for why, n in run.wasted_tokens.items()) or "none"
    return pairs(
        [
            ("trainer", _shares(run.trainer_s)),
            ("rollout", _shares(run.rollout_s)),
            ("staleness", f"of tokens: mean {number(s.mean, 2)}  p95 {number(s.p95)}  max {number(s.most)}"),
            ("tokens", f"trained {number(run.trained_tokens)}  in flight {number(run.in_flight_tokens)}"),
            ("masked", f"{number(run.masked_tokens)} ({share(run.masked_tokens / done if done else None, 2)})"),
            ("wasted", wasted),
            (
                "done again",
                f"sampled {number(run.redone_tokens)}  prefilled {number(run.recomputed_tokens)}  steps {run.redone_steps}"
                f"  preemptions {number(run.preempted)}",
            ),
            ("running", f"{number(run.running_mean)} samples at once, {duration(run.latency_mean_s)} each"),
        ]
    )


def _shares(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    return "  ".join(f"{name} {share(s / total, 1)}" for name, s in seconds.items() if total > 0 and s > 0) or DASH


def _mean(values: tuple[float, ...]) -> float | None:
    return sum(values) / len(values) if values else None
