"""`hexctl plan` with money or several futures in the question: what to rent, the frontier, the robust plan."""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from hexctl.cli.exits import Exit, Progress, error
from hexctl.cli.options import answer, seconds, stdout_kept_pure
from hexctl.cli.render.plan import infeasible_text, plan_document
from hexctl.cli.stopping import Stop, stop_after
from planner.solution import Infeasible

if TYPE_CHECKING:
    from planner.desk import RentalDesk
    from planner.objectives import MarketObjective
    from planner.problem import Problem
    from planner.robust import Scenario

Ask = Callable[[Stop], tuple[Any, Any]]  # the answer, and how it is told as (document, text)
F = TypeVar("F", bound=Callable[..., Any])
LEAST_TIME_S = 60.0  # a question about mixes may take this long, where --solve-time says nothing


def _finite(_: click.Context, option: click.Parameter, value: float | None) -> float | None:
    """More than 0 and finite: click's own ranges let NaN pass."""
    if value is not None and not 0 < value < math.inf:
        raise click.BadParameter(f"{value:g} is not a number above 0", param=option)
    return value


_OPTIONS = (
    click.option("--market", metavar="FILE", type=click.Path(path_type=Path), help="What can be rented; default: the fleet."),
    click.option("--budget", metavar="USD/H", help='Most throughput for at most that price, such as "126.72".'),
    click.option("--reach", metavar="TOKENS/S", type=float, callback=_finite, help="The cheapest mix of instances that is as fast."),
    click.option("--per-dollar", is_flag=True, help="With --reach: most tokens a dollar at no less than that."),
    click.option("--steps", metavar="N", type=int, help="With --within: that many steps for the least total cost."),
    click.option("--within", metavar="DURATION", help='The deadline of --steps, such as "24h".'),
    click.option("--spot", is_flag=True, help="Rent at spot prices; with --steps only where that is cheaper in all."),
    click.option("--spot-interruptions-per-h", metavar="RATE", type=float, help="Interruptions of one spot instance an hour, for --steps."),
    click.option("--restart-time", metavar="DURATION", default="10m", show_default=True, help="What the run loses to an interruption."),
    click.option("--frontier", is_flag=True, help="Price against throughput: every mix that no other beats; --budget is its end."),
    click.option("--robust", is_flag=True, help="The plan with the least worst-case regret over --lengths and --etas."),
    click.option("--lengths", metavar="N,N", help='Mean responses in tokens or in parts: "0.5x,1x,2x".'),
    click.option("--etas", metavar="N,N", help="Staleness bounds; default: the configuration's."),
    click.option("--threshold", metavar="SHARE", type=float, callback=_finite, default=0.05,
                 help="With --robust: how much better another plan must be."),
)  # fmt: skip


def money_options(f: F) -> F:
    """The options of this module."""
    for option in reversed(_OPTIONS):
        f = option(f)
    return f


def wanted(asked: dict[str, Any]) -> bool:
    """Whether the question is one for this module. Options that mean nothing alone are refused."""
    main = ("budget", "reach", "steps", "within", "frontier", "robust")
    if any(asked[k] not in (None, False) for k in main):
        return True
    for name in ("market", "per_dollar", "spot", "spot_interruptions_per_h", "lengths", "etas"):
        if asked[name] not in (None, False):
            with_ = "--robust" if name in ("lengths", "etas") else "--budget, --reach, --steps or --frontier"
            raise click.UsageError(f"--{name.replace('_', '-')} needs {with_}")
    return False


def run(config: Any, problem: "Problem", asked: dict[str, Any], *, scheduler: str, limit_s: float, output: str) -> int:
    """Answer on stdout; the exit code."""
    _one_question(asked)
    began = time.monotonic()
    ask = _robust(problem, asked, scheduler) if asked["robust"] else _money(config, problem, asked, scheduler)
    with stop_after(limit_s) as stop, stdout_kept_pure():
        found, render = ask(stop)
    solve_s = time.monotonic() - began
    if isinstance(found, Infeasible):
        if output == "json":
            answer(output, plan_document(found, solve_s), "")
        error(infeasible_text(found), hint="loosen the limit, or offer more with --market")
        return Exit.INFEASIBLE
    document, text = render
    answer(output, document(found, solve_s), text(found, solve_s) if output == "text" else "")
    return Exit.FINE


def _money(config: Any, problem: "Problem", asked: dict[str, Any], scheduler: str) -> Ask:
    from planner.desk import RentalDesk
    from planner.market import market_of
    from runtime.config.market import kinds_for, load_market

    market = load_market(asked["market"]) if asked["market"] else market_of(problem.cluster)
    budget = None if asked["budget"] is None else usd_per_h(asked["budget"])
    if asked["frontier"] and budget is None:
        if any(i.available is None for i in market.instances):
            raise click.UsageError("--frontier needs --budget: the market does not say how much there is")
        budget = max(market.usd_per_h([i.available or 0 for i in market.instances]), 1e-9)
    objective = None if asked["frontier"] else _objective(asked, budget)
    kinds, spot = kinds_for(config, market), asked["spot"]

    def ask(stop: Stop) -> tuple[Any, Any]:
        desk = RentalDesk(problem, market, kinds=kinds, scheduler=scheduler, should_stop=stop)
        if objective is not None:
            return _rent(desk, objective, spot)
        assert budget is not None
        return _frontier(desk, budget, spot)

    return ask


def _one_question(asked: dict[str, Any]) -> None:
    given = [
        name
        for name, there in (
            ("--robust", asked["robust"]),
            ("--frontier", asked["frontier"]),
            ("--reach", asked["reach"] is not None),
            ("--steps", asked["steps"] is not None or asked["within"] is not None),
            ("--budget", asked["budget"] is not None and not asked["frontier"]),
        )
        if there
    ]
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} are different questions: give one of them")
    if (asked["steps"] is None) != (asked["within"] is None):
        raise click.UsageError("--steps and --within go together")
    if asked["per_dollar"] and asked["reach"] is None:
        raise click.UsageError("--per-dollar needs --reach: without a floor the smallest plan wins")
    if asked["robust"] and (asked["market"] or asked["spot"]):
        raise click.UsageError("--robust is about the fleet of the configuration: leave out --market and --spot")


def _objective(asked: dict[str, Any], budget: float | None) -> "MarketObjective":
    from planner.objectives import Deadline, PerDollar, Reach, SpotRisk, WithinBudget

    if budget is not None:
        return WithinBudget(usd_per_h=budget)
    if asked["reach"] is not None:
        return (
            PerDollar(floor_tokens_per_s=asked["reach"]) if asked["per_dollar"] else Reach(tokens_per_s=asked["reach"])
        )
    risk = None
    if asked["spot"]:
        if asked["spot_interruptions_per_h"] is None:
            raise click.UsageError(
                "--steps with --spot needs --spot-interruptions-per-h: what an hour of spot costs depends on it"
            )
        risk = SpotRisk(
            interruptions_per_h=asked["spot_interruptions_per_h"],
            restart_s=seconds(asked["restart_time"], where="--restart-time"),
        )
    return Deadline(steps=asked["steps"], seconds=seconds(asked["within"], where="--within"), spot=risk)


def _rent(desk: "RentalDesk", objective: "MarketObjective", spot: bool) -> tuple[Any, Any]:
    from hexctl.cli.render.market import progress_text, rental_document, rental_text

    with _talking() as talk:
        found = desk.answer(objective, spot=spot, on_incumbent=lambda r: talk(progress_text(r)))
    return found, (rental_document, rental_text)


def _frontier(desk: "RentalDesk", budget: float, spot: bool) -> tuple[Any, Any]:
    from hexctl.cli.render.market import frontier_document, frontier_text, progress_text
    from planner.frontier import frontier
    from planner.objectives import WithinBudget

    with _talking() as talk:
        found = frontier(desk, most_usd_per_h=budget, spot=spot, on_point=lambda r: talk(progress_text(r)))
    if not found.points:  # why is told by the question at the end of the frontier
        return desk.answer(WithinBudget(usd_per_h=budget), spot=spot), None
    return found, (frontier_document, frontier_text)


def _robust(problem: "Problem", asked: dict[str, Any], scheduler: str) -> Ask:
    from hexctl.cli.render.market import robust_document, robust_text
    from planner.robust import solve_robust

    scenarios, threshold = _scenarios(problem, asked), asked["threshold"]

    def ask(stop: Stop) -> tuple[Any, Any]:
        with _talking() as talk:
            found = solve_robust(
                problem, scenarios, scheduler=scheduler, threshold=threshold, on_progress=talk, should_stop=stop
            )
        return found, (robust_document, robust_text)

    return ask


@contextmanager
def _talking() -> Iterator[Callable[[str], None]]:
    """A line on a terminal that changes, gone at the end; elsewhere silence."""
    progress = Progress()
    try:
        yield lambda text: progress(text) if sys.stderr.isatty() else None
    finally:
        progress.done()


def _scenarios(problem: "Problem", asked: dict[str, Any]) -> list["Scenario"]:
    from planner.robust import Scenario

    mean = problem.workload.response.mean_tokens
    lengths = [
        _figure(t.removesuffix("x"), "--lengths") * (mean if t.endswith("x") else 1.0)
        for t in _list(asked["lengths"] or "0.5x,1x,2x")
    ]
    etas = _list(asked["etas"]) if asked["etas"] else [str(problem.workload.eta)]
    if any(not e.isdigit() for e in etas):
        raise click.UsageError(f"--etas {asked['etas']}: expected whole numbers such as 1,4")
    return [Scenario(response_mean=length, eta=int(e)) for e in etas for length in lengths]


def _list(text: str) -> list[str]:
    return [t.strip() for t in text.split(",") if t.strip()]


def _figure(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise click.UsageError(f"{where} {text}: expected positive numbers")
    return value


def usd_per_h(text: str) -> float:
    """ "126.72", "$126.72" or "126.72/h" as USD an hour."""
    bare = text.strip().removesuffix("/h").removeprefix("$").replace(",", "")
    try:
        value = float(bare)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        hint = "; seconds to search are --solve-time" if bare[-1:] in ("s", "m", "h") else ""
        raise click.UsageError(f'--budget {text}: expected USD an hour, more than 0, such as "126.72"{hint}')
    return value
