"""A solution of the planner as a document and as text. Pure."""

from collections.abc import Sequence
from typing import Any

from hexctl.cli.render.text import DASH, devices, duration, money, number, pairs, share, table
from planner.plan import Placement
from planner.solution import Feasible, Infeasible, Solution


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
            {"kind": s.kind, "devices": list(s.devices), "tp": s.tp, "dp": s.dp, "layers": s.layers} for s in p.stages
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
