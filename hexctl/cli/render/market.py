"""Answers about money and robustness as documents and as text. Pure."""

from typing import Any

from hexctl.cli.render.plan import plan_document, plan_text
from hexctl.cli.render.text import DASH, duration, money, number, pairs, share, table
from planner.frontier import Frontier
from planner.rental import Rental
from planner.robust import Robust

_UNITS = {
    "tokens_per_s": "tokens/s",
    "usd_per_h": "USD/h",
    "tokens_per_usd": "tokens per USD",
    "usd": "USD in all",
}


def rental_document(rental: Rental, solve_s: float) -> dict[str, Any]:
    """The plan's document with `rental`: the machines, what is measured, what was achieved and the bound."""
    b = rental.bill
    return {
        **plan_document(rental.plan, solve_s),
        "rental": {
            "mix": [{"instance": name, "count": n} for name, n in rental.mix],
            "spot": rental.spot,
            "usd_per_h": rental.plan.prediction.usd_per_h,
            "egress_usd_per_h": rental.egress_usd_per_h,
            "measure": rental.measure,
            "achieved": rental.achieved,
            "bound": rental.bound,
            "gap": rental.gap,
            "scope": rental.scope,
            "mixes_planned": rental.planned,
            "mixes_bounded": rental.costed,
            "finished": rental.finished,
            "job": None
            if b is None
            else {
                "seconds": b.seconds,
                "machines_usd": b.machines_usd,
                "egress_usd": b.egress_usd,
                "interruptions": b.interruptions,
                "lost_s": b.lost_s,
                "total_usd": b.total_usd,
            },
        },
    }


def rental_text(rental: Rental, solve_s: float) -> str:
    """What to rent, what it costs and what cannot be beaten; then the plan."""
    p, b = rental.plan.prediction, rental.bill
    rows = [
        ("rent", mix_text(rental) + (" at spot prices" if rental.spot else "")),
        ("price", f"{money(p.usd_per_h, '/h')}  {money(p.usd_per_mtok, '/Mtok')}  {number(p.tokens_per_s)} tokens/s"),
    ]
    if rental.egress_usd_per_h is None or rental.egress_usd_per_h > 0:
        rows.append(("egress", f"{money(rental.egress_usd_per_h, '/h')} on top, between regions"))
    if b is not None:
        parts = f"{money(b.machines_usd)} machines, {money(b.egress_usd)} egress"
        if b.interruptions > 0:
            parts += f"; {b.interruptions:.1f} interruptions expected, {duration(b.lost_s)} lost to them"
        rows.append(("job", f"{money(b.total_usd)} in {duration(b.seconds)}: {parts}"))
    better = "more than" if rental.measure in ("tokens_per_s", "tokens_per_usd") else "less than"
    rows.append(
        (
            "bound",
            f"no plan on {rental.scope} {'does' if better == 'more than' else 'costs'} {better} "
            f"{_amount(rental.measure, rental.bound)}; gap {share(rental.gap, 1)}",
        )
    )
    rows.append(
        (
            "search",
            f"mixes: {rental.planned} planned, {rental.costed} bounded"
            + ("" if rental.finished else "; stopped early: the best so far"),
        )
    )
    return pairs(rows) + "\n\n" + plan_text(rental.plan, solve_s)


def mix_text(rental: Rental) -> str:
    """ "2 x h800x8, 1 x h20x8"."""
    return ", ".join(f"{n} x {name}" for name, n in rental.mix)


def progress_text(rental: Rental) -> str:
    """One line while the search goes on."""
    return f"{mix_text(rental)}: {_amount(rental.measure, rental.achieved)}, gap {share(rental.gap, 1)}"


def frontier_document(found: Frontier, solve_s: float) -> dict[str, Any]:
    """The points with their plans, cheapest first."""
    return {
        "scope": found.scope,
        "finished": found.finished,
        "solve_s": solve_s,
        "points": [rental_document(p, solve_s) for p in found.points],
    }


def frontier_text(found: Frontier, solve_s: float) -> str:
    """One line a point, cheapest first."""
    rows = [
        (
            money(r.plan.prediction.usd_per_h),
            number(r.achieved),
            money(r.plan.prediction.usd_per_mtok),
            share(r.gap, 1),
            mix_text(r),
        )
        for r in found.points
    ]
    tail = f"{found.scope}; in {duration(solve_s)}" + (
        "" if found.finished else "; stopped early: cheaper points may lack"
    )
    return table(("$/H", "TOK/S", "$/MTOK", "GAP", "MIX"), rows, right=(0, 1, 2, 3)) + "\n\n" + tail


def robust_document(found: Robust, solve_s: float) -> dict[str, Any]:
    """The plan's document with `robust`: the regret in every scenario and where to plan again."""
    return {
        **plan_document(found.plan, solve_s),
        "robust": {
            "worst_regret": found.worst,
            "candidates": found.candidates,
            "finished": found.finished,
            "threshold": found.threshold,
            "regrets": [
                {
                    "response_mean": r.scenario.response_mean,
                    "eta": r.scenario.eta,
                    "tokens_per_s": r.tokens_per_s,
                    "best_tokens_per_s": r.best_tokens_per_s,
                    "bound_tokens_per_s": r.bound_tokens_per_s,
                    "regret": r.regret,
                }
                for r in found.regrets
            ],
            "replan_at": [{"response_mean": r.response_mean, "eta": r.eta, "side": r.side} for r in found.replan_at],
        },
    }


def robust_text(found: Robust, solve_s: float) -> str:
    """The regret in every scenario, where to plan again, then the plan."""
    rows = [
        (
            number(r.scenario.response_mean),
            str(r.scenario.eta),
            number(r.tokens_per_s) if r.tokens_per_s else f"{DASH} does not fit",
            number(r.best_tokens_per_s),
            share(r.regret, 1),
        )
        for r in found.regrets
    ]
    lines = [
        f"worst-case regret {share(found.worst, 1)} over {len(found.regrets)} scenarios, {found.candidates} candidate plans"
        + ("" if found.finished else "; stopped early: the best so far"),
        "",
        table(("RESPONSE", "ETA", "TOK/S", "BEST", "REGRET"), rows, right=(0, 1, 2, 3, 4)),
        "",
    ]
    better = f"another plan is more than {share(found.threshold)} better"
    for r in found.replan_at:
        where = (
            f"at {number(r.response_mean)} tokens"
            if r.side == "here"
            else f"where responses are {r.side} than {number(r.response_mean)} tokens"
        )
        lines.append(f"at eta {r.eta} plan again {where}: {better} there")
    if not found.replan_at and found.finished:
        lines.append(f"nowhere in that range {better}")
    return "\n".join(lines) + "\n\n" + plan_text(found.plan, solve_s)


def _amount(measure: str, value: float) -> str:
    if measure == "usd_per_h":
        return money(value, "/h")
    return money(value) if measure == "usd" else f"{number(value)} {_UNITS[measure]}"
