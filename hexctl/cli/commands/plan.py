"""`hexctl plan`: the planner as a command. Reads a configuration, and where it asks for them the GPUs that are here: no daemon,
no torch, no Ray."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hexctl.cli.commands import plan_market
from hexctl.cli.commands.plan_export import answer_exported
from hexctl.cli.commands.plan_whatif import answer_explained, answer_infeasible, answer_what_if
from hexctl.cli.exits import Exit, say
from hexctl.cli.main import COMMANDS
from hexctl.cli.options import (
    answer,
    calibration_option,
    load,
    output_option,
    seconds,
    set_option,
    stdout_kept_pure,
)
from hexctl.cli.render.plan import comparison_text, plan_document, plan_text
from hexctl.cli.solving import solve
from hexctl.cli.stopping import stop_after
from planner.export import EXPORTERS
from planner.problem import Budget, Problem
from planner.record import replace
from planner.solution import Feasible, Infeasible, Solution

if TYPE_CHECKING:  # it costs numpy to import
    from planner.calibration import Calibration


ASSUMED_OF_PARTS = "with its part of the card for kernels and waits for turns assumed"


@click.command(help=COMMANDS["plan"][1] + "\n\nCONFIG is a file or the name of a shipped one.")
@click.argument("config", metavar="CONFIG")
@click.option("--scheduler", metavar="NAME", help="Another scheduler than planner.scheduler of the configuration.")
@click.option(
    "--compare",
    metavar="NAME,NAME",
    help="Solve with each of these schedulers: one line each, or with --output json a list of plans.",
)
@click.option(
    "--solve-time",
    metavar="DURATION",
    help="Seconds to search; default: planner.solve_time, at least 1m for questions of mixes. The best so far stands.",
)
@click.option(
    "--evaluations", type=click.IntRange(min=1), help="Plans to judge at most: the same number gives the same plan."
)
@plan_market.money_options
@click.option(
    "--export",
    "target",
    type=click.Choice(list(EXPORTERS)),
    help="Answer with the settings that launch the plan there; what they cannot say comes as notes.",
)
@click.option(
    "--what-if",
    metavar="KEY=VALUE,...",
    help="Compare with the plan under changes: add=8xL40S, remove=node3, eta=8, kv=keep, update=overlapped, price.H20=1.2.",
)
@calibration_option
@click.option("--explain", is_flag=True, help="Add what holds the plan back and what single changes would give.")
@set_option
@output_option
def plan(
    *,
    config: str,
    scheduler: str | None,
    compare: str | None,
    solve_time: str | None,
    evaluations: int | None,
    target: str | None,
    what_if: str | None,
    explain: bool,
    calibration: str | None,
    settings: tuple[str, ...],
    output: str,
    **asked: Any,
) -> int:
    if scheduler and compare:
        raise click.UsageError("--scheduler names one, --compare several: give one of the two")
    money = plan_market.wanted(asked)
    questions = {
        "--compare": compare, "--export": target, "--what-if": what_if, "--explain": explain, "a question of money": money
    }  # fmt: skip
    if len(given := [name for name, value in questions.items() if value]) > 1:
        raise click.UsageError(f"one question at a time: {' and '.join(given)} were given")
    loaded = load(config, settings)
    limit_s = seconds(solve_time, where="--solve-time") if solve_time else loaded.config.planner.solve_time
    with stdout_kept_pure():
        problem = problem_of(loaded.config, calibration)
    if money:
        if evaluations:
            raise click.UsageError("--evaluations is about one fleet: leave it out where mixes are chosen")
        limit_s = limit_s if solve_time else max(limit_s, plan_market.LEAST_TIME_S)
        return plan_market.run(
            loaded.config, problem, asked, scheduler=scheduler or "hex", limit_s=limit_s, output=output
        )
    names = [n.strip() for n in (compare or scheduler or loaded.config.planner.scheduler).split(",")]
    with stop_after(limit_s) as stop:

        def search(problem: Problem, name: str = names[0]) -> tuple[Solution, float]:
            stop.again()
            budget = Budget(mip_seconds=limit_s)
            budget = replace(budget, evaluations=evaluations) if evaluations else budget
            return solve(problem, name, should_stop=stop, budget=budget)

        if what_if:
            return answer_what_if(problem, what_if, search, output)
        if explain:
            return answer_explained(problem, search, output, stop)
        with stdout_kept_pure():
            solved = [search(problem, name) for name in names]
    if compare:
        answer(output, [plan_document(s, t) for s, t in solved], comparison_text(solved))
        return Exit.FINE if any(isinstance(s, Feasible) for s, _ in solved) else Exit.INFEASIBLE
    [(solution, solve_s)] = solved
    document = plan_document(solution, solve_s)
    if isinstance(solution, Infeasible):
        return answer_infeasible(solution, document, output)
    if target:
        return answer_exported(output, target, solution, problem)
    answer(output, document, plan_text(solution, solve_s))
    return Exit.FINE


def problem_of(config: Any, calibration: str | None = None) -> Problem:
    """The planner's problem for a configuration as it is written. Devices are looked for only where `fleet.source` is "gpus", which
    means those that are here, whatever the file lists. `calibration`: as --calibration."""
    from planner.model import load_model_spec
    from runtime.config.calibration import calibration_file, load_calibration
    from runtime.config.problem import cluster_from_config, engine_name, problem_from_config

    file = calibration_file(config, named=calibration)
    measured = None
    if file is not None:
        measured = load_calibration(file)
        named = [t.kind for t in measured.kinds]
        say(f"counting with {file}: {', '.join(named) or 'no kinds'}")
    model = load_model_spec(Path(config.model.path))
    if config.fleet.source == "gpus":
        from hexctl.cli.found_fleet import found_cluster

        cluster, notes = found_cluster(config)
        for note in notes:
            say(note)
    else:
        cluster = cluster_from_config(config)
    problem = problem_from_config(config, cluster, model, calibration=measured)
    if config.planner.capabilities == "runtime":
        _say_of_parts(problem, measured, engine_name(config))
    return problem


def _say_of_parts(problem: Problem, measured: "Calibration | None", engine: str) -> None:
    """Whose rates parts of cards are planned with."""
    parts = [k for k in problem.cluster.kinds.values() if k.part_of]
    if not parts:
        return
    from planner.calibrated import rates_from

    found = rates_from(problem, measured, engine)
    for kind in parts:
        whose = found.get(kind.name)
        if whose == kind.name:
            say(f"{kind.name}: as measured on parts, each role beside the other")
        else:
            say(f"{kind.name}: {f'as {whose} was measured, ' if whose else 'not measured, '}{ASSUMED_OF_PARTS}")
