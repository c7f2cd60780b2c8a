"""A solution of the planner as a document and as text. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hexctl.cli.render.text import DASH, devices, duration, money, number, pairs, share, table
from planner.plan import Placement
from planner.solution import Feasible, Infeasible, Repaired, Solution

if TYPE_CHECKING:  # they cost a solver to import
    from planner.sensitivity import Action, Pressure
    from planner.whatif import Comparison


def plan_document(solution: Solution, solve_s: float) -> dict[str, Any]:
    """The keys of `hexctl plan --output json`. Without a plan the figures are null and `conflicts` says why."""
    feasible = isinstance(solution, Feasible)
    figures = _figures(solution) if isinstance(solution, Feasible) else dict.fromkeys(_KEYS)
    return {
        "feasible": feasible,
        "scheduler": solution.scheduler,
        **figures,
        "solve_s": solve_s,
        "placements": [_placement(p) for p in solution.plan.placements] if isinstance(solution, Feasible) else [],
        "headline": solution.explanation.headline if isinstance(solution, Feasible) else "",
        "why": list(solution.explanation.lines) if isinstance(solution, Feasible) else [],
        "conflicts": [
            {"limit": c.limit, "detail": c.detail}
            for c in (solution.conflicts if isinstance(solution, Infeasible) else ())
        ],
    }


_KEYS = (
    "step_s", "train_s", "rollout_s", "update_s", "tokens_per_s", "usd_per_h", "usd_per_mtok", "bound_tokens_per_s",
    "bound_scope", "gap", "staleness_mean", "evaluations", "finished",
)  # fmt: skip


def _figures(solution: Feasible) -> dict[str, Any]:
    p = solution.prediction
    values = (
        p.step_s, p.train_s, p.rollout_s, p.update_s, p.tokens_per_s, p.usd_per_h, p.usd_per_mtok,
        solution.bound_tokens_per_s, solution.bound_scope, solution.gap, p.staleness_mean, solution.evaluations, solution.finished,
    )  # fmt: skip
    return dict(zip(_KEYS, values, strict=True))


def _placement(p: Placement) -> dict[str, Any]:
    return {
        "role": p.role, "kind": p.kind, "devices": list(p.devices), "tp": p.tp, "pp": p.pp, "dp": p.dp,
        "rate_tokens_per_s": p.rate_tokens_per_s, "max_running": p.max_running, "share": p.share,
        "stages": [
            {
                "kind": s.kind, "devices": list(s.devices), "tp": s.tp, "dp": s.dp, "layers": s.layers,
                "token_shares": list(s.token_shares),
            }
            for s in p.stages
        ],
    }  # fmt: skip


def plan_text(solution: Feasible, solve_s: float) -> str:
    """A plan for people: the headline, who does what, the figures, the bound and why."""
    p = solution.prediction
    grouped = _alike(solution.plan.placements)
    rows = [
        (
            f"{len(same)} x {same[0].role}" if len(same) > 1 else same[0].role, same[0].kind,
            f"TP {same[0].tp}  PP {same[0].pp}  DP {same[0].dp}",
            number(same[0].rate_tokens_per_s),
            devices([d for one in same for d in one.devices]),
        )
        for same in grouped
    ]  # fmt: skip
    figures = [
        (
            "step",
            f"{duration(p.step_s)} (train {duration(p.train_s)}, rollout {duration(p.rollout_s)}, update {duration(p.update_s)})",
        ),
        ("throughput", f"{number(p.tokens_per_s)} trained tokens/s"),
        ("cost", f"{money(p.usd_per_h, '/h')}  {money(p.usd_per_mtok, '/Mtok')}" if p.usd_per_h is not None else DASH),
        (
            "bound",
            f"{number(solution.bound_tokens_per_s)} tokens/s over {solution.bound_scope}; gap {share(solution.gap, 1)}",
        ),
        (
            "solved",
            f"{solution.scheduler} in {duration(solve_s)}"
            + ("" if solution.finished else ", stopped early: the best so far"),
        ),
    ]
    lines = [
        solution.explanation.headline,
        "",
        table(("ROLE", "KIND", "PARALLEL", "TOK/S", "DEVICES"), rows, right=(3,)),
        "",
        pairs(figures),
    ]
    if solution.explanation.lines:
        lines += ["", "why", *(f"  {line}" for line in solution.explanation.lines)]
    return "\n".join(lines)


def comparison_text(solved: Sequence[tuple[Solution, float]]) -> str:
    """One line a scheduler, best first; a scheduler without a plan comes last and says so."""
    ranked = sorted(solved, key=lambda s: s[0].prediction.step_s if isinstance(s[0], Feasible) else float("inf"))
    return table(
        ("SCHEDULER", "STEP", "TOK/S", "$/MTOK", "GAP", "SOLVED IN", ""),
        [_compared(solution, solve_s) for solution, solve_s in ranked],
        right=(1, 2, 3, 4, 5),
    )


def _compared(solution: Solution, solve_s: float) -> tuple[str, ...]:
    if isinstance(solution, Infeasible):
        return (solution.scheduler, DASH, DASH, DASH, DASH, duration(solve_s), f"no plan: {solution.message}")
    p = solution.prediction
    return (
        solution.scheduler, duration(p.step_s), number(p.tokens_per_s), money(p.usd_per_mtok), share(solution.gap, 1),
        duration(solve_s), "" if solution.finished else "stopped early",
    )  # fmt: skip


def infeasible_text(solution: Infeasible) -> str:
    """The limits that cannot hold together, one a line."""
    return "\n".join(
        ["no plan: these limits cannot hold together", *(f"  {c.limit}: {c.detail}" for c in solution.conflicts)]
    )


def _alike(placements: tuple[Placement, ...]) -> list[list[Placement]]:
    """Placements of the same shape together, trainers first."""
    groups: dict[tuple[Any, ...], list[Placement]] = {}
    for p in sorted(placements, key=lambda p: p.role != "train"):
        rate = None if p.rate_tokens_per_s is None else round(p.rate_tokens_per_s)
        groups.setdefault((p.role, p.kind, p.tp, p.pp, p.dp, rate), []).append(p)
    return list(groups.values())


def what_if_document(c: "Comparison") -> dict[str, Any]:
    """The keys of `hexctl plan --what-if --output json`; gains are null where there is no plan on one side."""
    return {
        "changes": [str(x) for x in c.changes],
        "before": plan_document(c.before, 0.0),
        "after": plan_document(c.after, 0.0),
        "predicted_gain": c.gain,
        "proven_gain": None if c.proven is None else {"at_least": c.proven[0], "at_most": c.proven[1]},
    }


def what_if_text(c: "Comparison") -> str:
    """Figures before and after side by side, then what is predicted of the difference and what is proven."""
    lines = ["what if " + ", ".join(str(x) for x in c.changes)]
    for name, solution in (("before", c.before), ("after", c.after)):
        if isinstance(solution, Infeasible):
            lines += ["", f"{name}: {infeasible_text(solution)}"]
    if not isinstance(c.before, Feasible) or not isinstance(c.after, Feasible) or c.gain is None or c.proven is None:
        return "\n".join(lines)
    a, b = c.before, c.after
    p, q = a.prediction, b.prediction
    rows = [
        ("tokens/s", number(p.tokens_per_s), number(q.tokens_per_s), signed(c.gain)),
        ("step", duration(p.step_s), duration(q.step_s), _difference(p.step_s, q.step_s)),
        ("train", duration(p.train_s), duration(q.train_s), _difference(p.train_s, q.train_s)),
        ("rollout", duration(p.rollout_s), duration(q.rollout_s), _difference(p.rollout_s, q.rollout_s)),
        ("$/h", money(p.usd_per_h), money(q.usd_per_h), _difference(p.usd_per_h, q.usd_per_h)),
        ("$/Mtok", money(p.usd_per_mtok), money(q.usd_per_mtok), _difference(p.usd_per_mtok, q.usd_per_mtok)),
        (
            "bound tokens/s",
            number(a.bound_tokens_per_s),
            number(b.bound_tokens_per_s),
            _difference(a.bound_tokens_per_s, b.bound_tokens_per_s),
        ),
        ("gap", share(a.gap, 1), share(b.gap, 1), ""),
    ]
    least, most = c.proven
    lines += [
        "",
        table(("", "BEFORE", "AFTER", "CHANGE"), rows, right=(1, 2, 3)),
        "",
        f"{signed(c.gain)} tokens/s, predicted; of the optimum the change is proven to be between {signed(least)} and {signed(most)}",
    ]
    stopped = [name for name, s in (("before", a), ("after", b)) if not s.finished]
    if stopped:
        lines.append(f"stopped early, a longer search may change the figures: {', '.join(stopped)}")
    return "\n".join(lines)


def explanation_document(pressures: "Sequence[Pressure]", told: "Sequence[Action]") -> dict[str, Any]:
    """The keys that `--explain` adds to those of a plan."""
    return {
        "held_back_by": [{"what": p.what, "predicted_gain": p.gain} for p in pressures],
        "actions": [
            {"what": a.what, "predicted_gain": a.gain, "proven_at_most": a.at_most, "finished": a.finished}
            for a in told
        ],
    }


def explanation_text(pressures: "Sequence[Pressure]", told: "Sequence[Action]") -> str:
    """What holds the plan back and what to do about it."""
    lines = ["held back by (gain of a tenth more of it under the same plan, predicted)"]
    rows = [(f"  {p.what}", signed(p.gain)) for p in pressures[:6]]
    lines.append(
        table(("", ""), rows, right=(1,)).lstrip("\n")
        if rows
        else "  nothing single: more of any one thing helps little"
    )
    lines += ["", "what one change gives (solved anew)"]
    lines.append(
        table(
            ("", "PREDICTED", "PROVEN AT MOST", ""),
            [(f"  {a.what}", *_acted(a), "" if a.finished else "search stopped early") for a in told],
            right=(1, 2),
        )
    )
    return "\n".join(lines)


def _acted(a: "Action") -> tuple[str, str]:
    return ("no plan", DASH) if a.gain is None or a.at_most is None else (signed(a.gain), signed(a.at_most))


def signed(value: float) -> str:
    """0.0412 -> "+4.1 %"."""
    return f"{100 * value:+.1f} %".replace("-0.0 %", "+0.0 %")


def _difference(before: float | None, after: float | None) -> str:
    return DASH if before is None or after is None or before <= 0 else signed(after / before - 1)


def repaired_text(repaired: Repaired) -> str:
    """A repaired plan for people: what changed, the figures, and that there is no bound."""
    p = repaired.prediction
    figures = [
        ("step", f"{duration(p.step_s)} (train {duration(p.train_s)}, rollout {duration(p.rollout_s)})"),
        ("throughput", f"{number(p.tokens_per_s)} trained tokens/s"),
        ("bound", "not computed"),
        ("changed", devices(repaired.changed) if repaired.changed else DASH),
    ]
    why = [f"  {line}" for line in repaired.explanation.lines]
    return "\n".join([repaired.explanation.headline, "", pairs(figures), "", "why", *why])
